"""What impls of every kind refuse in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_attn.errors import MetadataError

if TYPE_CHECKING:
    import torch

    from omni_attn.backends.abstract import AttentionImpl
    from omni_attn.backends.mla import MLAImpl
    from omni_attn.backends.paged import PagedAttentionImpl


def foreign_metadata(
    impl: AttentionImpl | PagedAttentionImpl | MLAImpl, metadata: object, expected: type
) -> MetadataError:
    """The error for an M that this impl's builder did not make; records are prepared by the Attention layer."""
    return MetadataError(
        f"{impl.backend or type(impl).__name__} needs the {expected.__name__} that its builder makes, found "
        f"{type(metadata).__name__}: hand records to the Attention layer, which prepares them for its backend"
    )


def metadata_of_another(label: str, metadata: Any) -> MetadataError:
    """The error for an M that the same builder class made for another kernel, whose limits it was held against."""
    return MetadataError(
        f"{label} needs the {type(metadata).__name__} that its own builder makes, found one made_for "
        f"{metadata.made_for}, whose kernel has other limits: hand records to the Attention layer"
    )


def refuse_output_scales(impl: PagedAttentionImpl | MLAImpl, *scales: torch.Tensor | None) -> None:
    """For impls that write their output in query's dtype alone.

    Raises:
        NotImplementedError: a scale is given.
    """
    if any(scale is not None for scale in scales):
        raise NotImplementedError(
            f"{type(impl).__name__} has no quantised output, found an output_scale or output_block_scale: leave it "
            "out, and quantise what it gives"
        )
