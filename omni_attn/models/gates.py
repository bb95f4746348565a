"""Gates of video sparse attention in a checkpoint: in every block or in none; and runs that leave them out.

A gate is a Linear of an attention block, `to_gate_compress`, which weighs the coarse output of video sparse attention.
Only weights tell whether a checkpoint has them: no config.json does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from omni_attn.errors import ConfigError
from omni_attn.layer import Attention
from omni_attn.models.checkpoint import first_names

GATE = "to_gate_compress"


def is_gate(name: str) -> bool:
    """Whether a weight of this name, in any spelling, belongs to a gate."""
    return f".{GATE}." in name


def has_gates(names: Iterable[str]) -> bool:
    """Whether a checkpoint with weights of these names, in any spelling, has gates."""
    return any(map(is_gate, names))


def check_gate_names(wanted: Sequence[str], names: Collection[str], num_layers: int, source: str) -> None:
    """Nothing if all wanted gates are there, or no gate at all.

    Args:
        wanted: names of the gates of a model that has them in all of its blocks.
        names: of all weights, in the model's spelling.
        num_layers: how many blocks that are.
        source: where the weights come from, for the error text.

    Raises:
        ConfigError: some are missing; the text names them.
    """
    if not has_gates(names):
        return
    if missing := [name for name in wanted if name not in names]:
        raise ConfigError(
            f"{source}: gates of video sparse attention are there in part: of {len(wanted)} weights {len(missing)} are "
            f"missing: {first_names(missing)}. A model has gates in each of its {num_layers} "
            "blocks or in none; fetch or save the checkpoint again."
        )


def unread_gates_note(model: nn.Module) -> tuple[str, ...]:
    """A note if the model has gates that no backend of the layers they belong to reads, else nothing."""
    gated = [
        module.attention
        for module in model.modules()
        if isinstance(getattr(module, GATE, None), nn.Module) and isinstance(module.attention, Attention)
    ]
    idle = [attention for attention in gated if not attention.reads("gate_compress")]
    if not idle:
        return ()
    return (
        f"gates: {len(idle)} of {len(gated)} layers leave out to_gate_compress, which {idle[0].route} does not read, "
        f"so the result is not what the model was made for; FASTVIDEO_VSA for role {idle[0].role} reads them",
    )
