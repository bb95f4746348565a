"""What a layer keeps of earlier tokens, as data: KV-cache specs, and what kernels over a paged cache can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar, Self

#: Bytes of one number of each dtype that a cache may have.
CACHE_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1}
KV_LAYOUTS = ("NHD", "HND")


class AttentionCGSupport(IntEnum):
    """Which batches one captured CUDA graph can serve; of several layers the lowest decides."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Every query has one token."""
    UNIFORM_BATCH = 2
    """Every query has the same number of tokens."""
    ALWAYS = 3


@dataclass(frozen=True, kw_only=True)
class MultipleOf:
    """Every multiple of `base`, up to `maximum` where there is one."""

    base: int
    maximum: int | None = None

    def __contains__(self, size: int) -> bool:
        return size % self.base == 0 and (self.maximum is None or size <= self.maximum)

    def __str__(self) -> str:
        sizes = "any" if self.base == 1 else f"multiples of {self.base}"
        return sizes + ("" if self.maximum is None else f" up to {self.maximum}")


BlockSizes = tuple[int | MultipleOf, ...]


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What one layer keeps per token. Equal specs may share a page table.

    Attributes:
        block_size: tokens of a page.
        num_kv_heads, head_size, value_head_size: of key and value; value_head_size None = head_size.
        dtype: of what is stored, a name of CACHE_ITEM_BYTES.

    Raises:
        ValueError: a number is not positive, or the dtype is none that a cache may have.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    value_head_size: int | None = None
    dtype: str

    kind: ClassVar[str] = "full"

    def __post_init__(self) -> None:
        if self.value_head_size is None:
            object.__setattr__(self, "value_head_size", self.head_size)
        for name in ("block_size", "num_kv_heads", "head_size", "value_head_size"):
            if (number := getattr(self, name)) < 1:
                raise ValueError(f"{name}={number}: a KV cache needs at least 1")
        if self.dtype not in CACHE_ITEM_BYTES:
            raise ValueError(f"dtype={self.dtype!r}: a KV cache needs one of {', '.join(CACHE_ITEM_BYTES)}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        assert self.value_head_size is not None
        return self.num_kv_heads * (self.head_size + self.value_head_size) * CACHE_ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.block_size * self.token_bytes

    def blocks_for(self, tokens: int) -> int:
        """Most pages that a stream of so many tokens holds at once."""
        return -(-tokens // self.block_size)

    def with_block_size(self, block_size: int) -> Self:
        """The same with pages of another size, as a kernel may want them."""
        return replace(self, block_size=block_size)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token is kept."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(KVCacheSpec):
    """The first tokens, and a window of the last ones, are kept.

    Attributes:
        window: tokens that a query sees, itself included.
        sink: tokens at the beginning that are seen by everyone.
    """

    window: int
    sink: int = 0

    kind: ClassVar[str] = "sliding_window"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or self.sink < 0:
            raise ValueError(
                f"window={self.window}, sink={self.sink}: needs a window from 1 on and a sink from 0 on"
            )

    def blocks_for(self, tokens: int) -> int:
        """See KVCacheSpec; the window may begin and end within a page."""
        kept = -(-self.window // self.block_size) + 1 + -(-self.sink // self.block_size)
        return min(super().blocks_for(tokens), kept)


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(KVCacheSpec):
    """One latent per token, shared by all heads: [compressed | rope], which serves as key, and its first part as value.

    Attributes:
        rope_size: channels of the part that carries positions; head_size counts both parts.
    """

    rope_size: int

    kind: ClassVar[str] = "mla"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads != 1 or not 0 < self.rope_size < self.head_size:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads}, rope_size={self.rope_size}, head_size={self.head_size}: MLA keeps "
                "one head, and its rope part is smaller than the whole"
            )

    @property
    def latent_size(self) -> int:
        """Channels of the compressed part."""
        return self.head_size - self.rope_size

    @property
    def token_bytes(self) -> int:
        """See KVCacheSpec; key and value are the same numbers."""
        return self.head_size * CACHE_ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class CacheFacts:
    """What a kernel over a paged cache takes, beside the limits that every kernel has.

    Attributes:
        block_sizes: page sizes, exact ones and multiples. A larger page that divides into one of them is taken as well:
            it is handed to the kernel as several.
        layouts: of KV_LAYOUTS, most preferred first.
        cache_dtypes: beside the dtype of the layer.
        kinds: of "full", "sliding_window", "mla".
        non_causal: queries may also see what comes behind them.
        causal_by_request: causal and non-causal requests may lie in one batch.
        host_lengths: the host has to know the lengths of each step, and exactly: an upper bound does not do.
        cudagraph: see AttentionCGSupport.
    """

    block_sizes: BlockSizes = (MultipleOf(base=1),)
    layouts: tuple[str, ...] = KV_LAYOUTS
    cache_dtypes: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset({"full", "sliding_window"})
    non_causal: bool = True
    causal_by_request: bool = False
    host_lengths: bool = False
    cudagraph: AttentionCGSupport = AttentionCGSupport.NEVER


def kv_cache_shape(num_blocks: int, spec: KVCacheSpec) -> tuple[int, ...]:
    """Logical shape of one layer's pages, whatever the layout in memory.

    Returns:
        (num_blocks, 2, block_size, num_kv_heads, head_size), keys before values; of MLA (num_blocks, block_size,
        head_size).

    Raises:
        ValueError: key and value differ in size, which one tensor cannot hold.
    """
    if spec.kind == "mla":
        return num_blocks, spec.block_size, spec.head_size
    if spec.value_head_size != spec.head_size:
        raise ValueError(
            f"head_size={spec.head_size} and value_head_size={spec.value_head_size}: a paged KV cache holds both in "
            "one tensor and needs them equal"
        )
    return num_blocks, 2, spec.block_size, spec.num_kv_heads, spec.head_size


def is_kernel_block_size(block_sizes: BlockSizes, block_size: int) -> bool:
    """Whether a kernel itself takes pages of this size; an exact size is meant exactly."""
    return any(
        block_size in size if isinstance(size, MultipleOf) else block_size == size for size in block_sizes
    )


def takes_block_size(block_sizes: BlockSizes, block_size: int) -> bool:
    """Whether pages of this size can be handed to a kernel, whole or as several of one of its sizes."""
    return any(
        block_size % (size.base if isinstance(size, MultipleOf) else size) == 0 for size in block_sizes
    )


def cache_reasons(
    facts: CacheFacts, spec: KVCacheSpec, dtype: str | None, *, causal: bool = True
) -> Iterator[str]:
    """Why a kernel cannot serve a cache, each "needs X, found Y".

    Args:
        dtype: of the layer's tensors, None = unknown.
        causal: the layer says that its attention is causal.
    """
    if not causal and not facts.non_causal:
        yield "needs causal attention over a paged KV cache, found causal=False"
    if not takes_block_size(facts.block_sizes, spec.block_size):
        able = " or ".join(map(str, facts.block_sizes))
        yield f"needs a block_size that divides into {able}, found {spec.block_size}"
    if spec.kind not in facts.kinds:
        yield f"needs a KV cache of kind {' or '.join(sorted(facts.kinds))}, found {spec.kind}"
    if dtype is not None and spec.dtype != dtype and spec.dtype not in facts.cache_dtypes:
        able = " or ".join(sorted({dtype, *facts.cache_dtypes}))
        yield f"needs a KV cache of dtype {able}, found {spec.dtype}"
