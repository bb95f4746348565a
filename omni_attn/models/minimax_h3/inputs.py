"""Shapes of one forward call, checked before any work, with both numbers in the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from omni_attn.backends.metadata import AttentionMetadata, PackedPadding
from omni_attn.errors import MetadataError


class Rows(NamedTuple):
    """Rows of a packed sequence: all of them, those in use, and those of the text."""

    length: int
    used: int
    text: int


class Kind(NamedTuple):
    """Rows of one kind.

    Attributes:
        name: the argument they came as.
        rows: [B, N, C].
        channels: the C that this model needs.
        indices: [N], their places in the sequence.
    """

    name: str
    rows: Tensor
    channels: int
    indices: Tensor


def check_inputs(
    kinds: Mapping[str, Kind], timestep: Tensor, per_row: Mapping[str, Tensor], position_ids: Tensor
) -> Rows:
    """How many rows a call has whose tensors fit the model and one another.

    Args:
        kinds: "video", "audio" and "text".
        timestep: distinct times, [M].
        per_row: arguments with one integer for each row of the sequence, by name.
        position_ids: [S, 3].

    Raises:
        MetadataError: they do not.
    """
    if position_ids.ndim != 2 or position_ids.shape[1] != 3:
        raise MetadataError(
            f"position_ids has shape {list(position_ids.shape)}; it must be [rows, 3], (t, h, w) of each row."
        )
    length = position_ids.shape[0]
    for name, tensor in per_row.items():
        if tensor.shape != (length,) or tensor.is_floating_point():
            raise MetadataError(
                f"{name} is {tensor.dtype} of shape {list(tensor.shape)}, and position_ids has {length} rows; it must "
                f"hold one integer for each, [{length}]."
            )
    if timestep.ndim != 1 or not timestep.shape[0]:
        raise MetadataError(
            f"timestep has shape {list(timestep.shape)}; it must be [distinct times], at least one, which "
            "timestep_indices point into."
        )
    batch = kinds["video"].rows.shape[0]
    for kind, given in kinds.items():
        _check_kind(kind, given, batch)
    counts = {kind: given.rows.shape[1] for kind, given in kinds.items()}
    used = sum(counts.values())
    if used > length:
        told = " + ".join(f"{count} {kind}" for kind, count in counts.items())
        raise MetadataError(
            f"{told} rows are {used}, and position_ids has {length}: each row of the sequence belongs to one kind."
        )
    if used < length and batch > 1:
        raise MetadataError(
            f"{length - used} of {length} rows belong to no kind, so they are padding, and the batch is {batch}: pad "
            "single requests only, or leave the padding out."
        )
    return Rows(length, used, counts["text"])


def check_text(encoder_hidden_states: Tensor, text_dim: int) -> None:
    """Nothing if this is text that the model refines.

    Raises:
        MetadataError: it has another shape.
    """
    if encoder_hidden_states.ndim != 3 or encoder_hidden_states.shape[2] != text_dim:
        raise MetadataError(
            f"encoder_hidden_states has shape {list(encoder_hidden_states.shape)}; this model needs [batch, text rows, "
            f"{text_dim}]."
        )


def padding_behind(used: int, length: int) -> PackedPadding | None:
    """What a record states of a sequence of this length with so many rows in use; None without padding."""
    return None if used == length else PackedPadding(used, used)


def check_records(records: Mapping[str, AttentionMetadata], rows: Rows) -> None:
    """Nothing if the record of the main blocks is that of a sequence with these rows.

    Raises:
        MetadataError: it is not, or there is none.
    """
    record = records.get("self")
    if record is None:
        raise MetadataError(
            f"attention_records holds {', '.join(map(repr, records)) or 'nothing'}, and no record for 'self', the role "
            "of the main blocks. Give what attention_records of the model makes."
        )
    layout, padding = record.video_layout, record.packed_padding
    if layout is not None and layout.used_len != rows.used:
        raise MetadataError(
            f"the record's video_layout holds {layout.used_len} rows, and video, audio and text are {rows.used}: make "
            "the record for this sequence."
        )
    padded_from = rows.length if padding is None else padding.q_length
    if padded_from != rows.used:
        stated = "no padding" if padding is None else f"padding behind {padding.q_length} rows"
        raise MetadataError(
            f"the record states {stated}, and {rows.used} of {rows.length} rows are in use: give attention_records the "
            f"padded_len {rows.length}."
        )


def _check_kind(kind: str, given: Kind, batch: int) -> None:
    name, rows, channels, indices = given
    if rows.ndim != 3 or rows.shape[0] != batch or rows.shape[2] != channels:
        raise MetadataError(
            f"{name} has shape {list(rows.shape)}; this model needs [{batch}, {kind} rows, {channels}]."
        )
    if indices.shape != (rows.shape[1],) or indices.is_floating_point():
        raise MetadataError(
            f"{kind}_indices is {indices.dtype} of shape {list(indices.shape)}, and {name} has {rows.shape[1]} rows; "
            f"it must hold the place of each in the sequence, [{rows.shape[1]}]."
        )
