"""Before the blocks of a step run: each group of a model's layers prepares once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.layer import Attention


def prepare_attention(
    model: nn.Module,
    records: Mapping[str, AttentionMetadata],
    lengths: Mapping[str, tuple[int, int]],
) -> None:
    """Prepares one step: each group of layers builds once what its calls need. Call it before the blocks run.

    Args:
        model: module whose Attention layers are prepared.
        records: role -> what the calls of that role look like; roles not named stay unprepared.
        lengths: role -> (query tokens, key tokens), for every role in records: of the whole sequence, joint streams
            included, where the layers split it over ranks; what each rank has for layers that do not.

    Raises:
        MetadataError: a role that no layer has or that lacks lengths; one record for calls of different lengths; or
            a record that a backend cannot express.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    roles = {layer.role for layer in layers}
    for role in records:
        if role not in roles:
            raise MetadataError(f'no layer has role "{role}"; the roles of this model are {sorted(roles)}')
        if role not in lengths:
            raise MetadataError(f'role "{role}" has a record but no lengths: give (query tokens, key tokens)')
    done: dict[tuple[int, str], tuple[str, tuple[int, int]]] = {}
    for layer in layers:
        record = records.get(layer.role)
        if record is None or layer.custom_attention is not None:
            continue
        wanted = (lengths[layer.role][0], lengths[layer.role][1])
        role, known = done.setdefault((id(record), layer.group_id), (layer.role, wanted))
        if known != wanted:
            raise MetadataError(
                f'roles "{role}" and "{layer.role}" share one record but have lengths {known} and {wanted}: state one '
                "record per kind of call"
            )
        layer.prepare(record, wanted)
