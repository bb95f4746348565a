"""What the builders of block-sparse self-attention read from a record in the same way: the tokens in use."""

from __future__ import annotations

from omni_attn.backends.masked import MaskedMetadata
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.stated import read_record
from omni_attn.errors import MetadataError
from omni_attn.facts import KernelFacts
from omni_attn.facts.lengths import length_reasons
from omni_attn.ops.segments import Segment

INSTEAD = "Choose TORCH_SDPA for this role, or add it as fallback"


def unmasked_tokens(
    record: AttentionMetadata, lengths: tuple[int, int], facts: KernelFacts, backend: str
) -> int:
    """How many tokens are in use by packed_padding, as many queries as keys; 0 where there is nothing to do.

    Args:
        record: of the step.
        lengths: query and key tokens of the call.
        facts: of the kernel, whose lengths hold for the tokens in use.
        backend: name that heads the error texts.

    Raises:
        MetadataError: the record hides other keys than those behind the tokens in use, or the lengths do not fit.
    """
    stated = read_record(record, lengths)
    if stated.mask is not None:
        raise MetadataError(
            f"{backend} cannot take attn_mask {tuple(stated.mask.shape)} {stated.mask.dtype}: blocks are selected by "
            f"their means, which know no masks. {INSTEAD}"
        )
    if record.cu_seqlens_q is not None:
        raise MetadataError(
            f"{backend} cannot take cu_seqlens_q: its blocks are those of one sequence, and packed sequences are "
            f"several. {INSTEAD}"
        )
    queries, keys = lengths
    if record.packed_padding is not None:
        queries, keys = record.packed_padding.q_length, record.packed_padding.kv_length
    if 0 in (*lengths, queries, keys):
        return 0
    if reasons := tuple(length_reasons(facts, queries, keys)):
        raise MetadataError(f"{backend} {'; '.join(reasons)}: it is self-attention. {INSTEAD}")
    return queries


def laid_out_tokens(record: AttentionMetadata, used: int, backend: str) -> int:
    """How many of the `used` tokens the record's video_layout holds; all without one.

    Raises:
        MetadataError: it holds more, or others than packed_padding says.
    """
    layout, is_padded = record.video_layout, record.packed_padding is not None
    if layout is None:
        return used
    if layout.used_len > used or (is_padded and layout.used_len != used):
        source = "packed_padding states" if is_padded else "the call has"
        raise MetadataError(
            f"{backend}: video_layout.used_len is {layout.used_len}, {source} {used} tokens: state the layout of this "
            f"sequence. {INSTEAD}"
        )
    return layout.used_len


def dense_over(used: int | None) -> MaskedMetadata:
    """Dense attention among the first `used` tokens, None = all."""
    return MaskedMetadata(segments=None if used is None else (Segment(0, used, 0, used),))
