"""What a layer looks like to the backend that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_attn.config import AttentionSpec


class LayerGeometry:
    """What every builder and impl is constructed with; the same keywords for both.

    Args:
        num_heads, num_kv_heads: query heads, key-value heads.
        head_size: channels of a query and key head; value_head_size of a value head (None = head_size).
        softmax_scale: factor on the scores.
        causal: bottom-right aligned causal attention.
        spec: the person's options, None for a platform default.
        variant: the variant that was selected, None for a backend without variants.
        window: (left, right) tokens in sight, None = all.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        spec: AttentionSpec | None = None,
        variant: str | None = None,
        window: tuple[int, int] | None = None,
        value_head_size: int | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.softmax_scale = softmax_scale
        self.causal = causal
        self.spec = spec
        self.variant = variant
        self.window = window
        self.value_head_size = head_size if value_head_size is None else value_head_size
