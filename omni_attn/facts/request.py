"""What one attention layer needs, stated before any backend is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from omni_attn.facts.kv_cache import KVCacheSpec, SlidingWindowSpec

MaskUsage = Literal["never", "padding", "arbitrary"]
SequenceParallel = Literal["ulysses", "ring", "ulysses_ring", "allgather_kv"]

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
MASK_USAGES = (None, "never", "padding", "arbitrary")
SEQUENCE_PARALLEL_MODES = (None, "ulysses", "ring", "ulysses_ring", "allgather_kv")


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """One layer's needs. Hashable; every field that can change the choice of a backend is here.

    Attributes:
        role: stable label of the call ("self", "cross.image"); exact and case-sensitive.
        role_category: broader class of the role ("self", "cross", "joint", "text"), or None.
        num_heads: query heads, None if unknown.
        head_size: channels of one query and key head; -1 if unknown.
        num_kv_heads: key and value heads, None = num_heads.
        value_head_size: channels of one value head, None = head_size.
        dtype: name of the tensors' dtype ("bfloat16"), None if unknown; a torch.dtype is turned into its name.
        causal: query i sees key j only if j <= i + (key tokens - query tokens): aligned at the bottom right.
        mask_usage: masks the model will pass: "never", "padding" (bool [B, K] masks), "arbitrary" (all others,
            float [B, K] ones too), or None = not stated.
        packed: several sequences lie behind one another in [1, T, H, D], separated by cu_seqlens.
        softmax_scale: factor on the scores, None = head_size ** -0.5.
        max_seqlen_q, max_seqlen_k: tokens expected, None if unknown; order tables may use them.
        video_grid: the model publishes the (T, H, W) grid of the sequence.
        sequence_parallel: how the sequence is split over ranks, None = not split.
        kv_cache: specification of a paged KV cache, None for stateless attention.
        requires_grad: a backward pass will run.
        compile: the layer will run under torch.compile(fullgraph=True).
        window: (left, right) tokens a query sees around its own position, -1 = unlimited; None = no window.
        batch_invariant: the result of one item may not depend on the others in the batch, to the bit.

    Raises:
        ValueError: a field is out of its range; the text names the field and the value.
    """

    role: str
    role_category: str | None = None
    num_heads: int | None
    head_size: int
    num_kv_heads: int | None = None
    value_head_size: int | None = None
    dtype: str | None = None
    causal: bool = False
    mask_usage: MaskUsage | None = None
    packed: bool = False
    softmax_scale: float | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    video_grid: bool = False
    sequence_parallel: SequenceParallel | None = None
    kv_cache: KVCacheSpec | None = None
    requires_grad: bool = False
    compile: bool = False
    window: tuple[int, int] | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("role", "role_category"):
            label = getattr(self, name)
            if label is None and name == "role_category":
                continue
            if not isinstance(label, str) or not label or any(c.isspace() for c in label):
                raise ValueError(
                    f"{name}={label!r}: a {name} is a non-empty text without spaces, for example 'self'"
                )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
            if self.dtype not in DTYPES:
                raise ValueError(
                    f"dtype={self.dtype!r}: needs one of {', '.join(DTYPES)}, or None if unknown"
                )
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.value_head_size is None:
            object.__setattr__(self, "value_head_size", self.head_size)
        self._check_counts()
        if self.mask_usage not in MASK_USAGES:
            raise ValueError(f"mask_usage={self.mask_usage!r}: needs one of {MASK_USAGES}")
        if self.sequence_parallel not in SEQUENCE_PARALLEL_MODES:
            raise ValueError(
                f"sequence_parallel={self.sequence_parallel!r}: needs one of {SEQUENCE_PARALLEL_MODES}"
            )
        for name in ("causal", "packed", "video_grid", "requires_grad", "compile", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: needs True or False")
        scale = self.softmax_scale
        if scale is not None and not (_is_number(scale) and 0 < scale < float("inf")):
            raise ValueError(f"softmax_scale={self.softmax_scale!r}: needs a finite positive number, or None")
        if self.window is not None:
            sides = tuple(self.window) if isinstance(self.window, (tuple, list)) else ()
            if len(sides) != 2 or not all(_is_count(side, -1) for side in sides):
                raise ValueError(
                    f"window={self.window!r}: needs (left, right) token counts, -1 for unlimited"
                )
            object.__setattr__(self, "window", sides)

        self._check_cache()

    def _check_cache(self) -> None:
        cache = self.kv_cache
        if cache is None:
            return
        if not isinstance(cache, KVCacheSpec):
            raise ValueError(f"kv_cache={cache!r}: needs a KVCacheSpec, or None for stateless attention")
        heads, kept = (self.num_kv_heads, self.head_size), (cache.num_kv_heads, cache.head_size)
        if cache.kind != "mla" and None not in heads and -1 not in heads and heads != kept:
            raise ValueError(
                f"kv_cache keeps {kept[0]} heads of {kept[1]}, and the layer has {heads[0]} key-value heads of "
                f"{heads[1]}: state both alike"
            )
        if isinstance(cache, SlidingWindowSpec) and self.window and self.window[0] >= cache.window:
            raise ValueError(
                f"window={self.window}: a query sees {self.window[0] + 1} tokens with itself, and kv_cache keeps "
                f"window={cache.window} of them: state window={(cache.window - 1, self.window[1])}, or keep more"
            )

    def _check_counts(self) -> None:
        counts = {"num_heads": 1, "num_kv_heads": 1, "max_seqlen_q": 0, "max_seqlen_k": 0}
        for name, least in counts.items():
            count = getattr(self, name)
            if count is not None and not _is_count(count, least):
                raise ValueError(
                    f"{name}={count!r}: needs a whole number from {least} on, or None if unknown"
                )
        for name in ("head_size", "value_head_size"):
            size = getattr(self, name)
            if size != -1 and not _is_count(size, 1):
                raise ValueError(f"{name}={size!r}: needs a positive number of channels, or -1 if unknown")
        if (
            self.num_heads is not None
            and self.num_kv_heads is not None
            and self.num_heads % self.num_kv_heads
        ):
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}: "
                "each key-value head serves the same number of query heads"
            )

    @property
    def default_scale(self) -> bool:
        """True where the softmax scale is head_size ** -0.5, the one scale every kernel has."""
        return self.softmax_scale is None or abs(self.softmax_scale * self.head_size**0.5 - 1) < 1e-6

    @property
    def is_cross(self) -> bool:
        """True where role or category say that keys come from elsewhere, and no grid of its own says otherwise."""
        return not self.video_grid and "cross" in (self.role.partition(".")[0], self.role_category)

    @property
    def unequal_lengths(self) -> bool:
        """True where the hints say that query and key lengths differ."""
        hints = (self.max_seqlen_q, self.max_seqlen_k)
        return None not in hints and hints[0] != hints[1]


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
