"""Pages as kernels want them: one size that all of them take, and larger pages handed over as several smaller ones.

Legend: R requests, W pages of a request, N pages, P tokens of a page, G kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd, lcm

import torch

from omni_attn.errors import ConfigError
from omni_attn.facts.kv_cache import BlockSizes, MultipleOf, is_kernel_block_size

# Smaller pages fit more chunks and windows exactly; up to 16 tokens FA3 and FlashInfer are as fast as with any
# (causal Wan 480p on an H200: 526 and 459 TFLOP/s at 8, 523 and 459 at 16, 500 at 1560 on FA3).
_USUAL, _ALIGNED = 16, 8
_SEARCH_LIMIT = 1 << 16


def _listed(able: int | MultipleOf) -> Iterable[int]:
    """The sizes that a kernel names one by one; multiples without end are none."""
    if isinstance(able, int):
        return (able,)
    return () if able.maximum is None else range(able.base, able.maximum + 1, able.base)


def _common(block_size: int, backends: Iterable[BlockSizes]) -> int | None:
    backends = tuple(backends)
    smaller = {
        size for sizes in backends for able in sizes for size in _listed(able) if block_size % size == 0
    }
    for size in (block_size, *sorted(smaller, reverse=True)):
        if all(is_kernel_block_size(sizes, size) for sizes in backends):
            return size
    return None


def _period(every: Iterable[BlockSizes]) -> int:
    """Page sizes that suit repeat after so many tokens, as far as anybody wants to look."""
    numbers = (able.base if isinstance(able, MultipleOf) else able for sizes in every for able in sizes)
    return min(max(lcm(*numbers), _USUAL), _SEARCH_LIMIT)


def _nearest(block_size: int, backends: Iterable[BlockSizes]) -> list[int]:
    """The next smaller and the next larger page size that all of them can be served with."""
    backends = tuple(backends)
    below, above = range(block_size - 1, 0, -1), range(block_size + 1, block_size + _period(backends) + 1)
    found = [next((size for size in sizes if _common(size, backends)), None) for sizes in (below, above)]
    return [size for size in found if size is not None]


def _able(backends: Mapping[str, BlockSizes]) -> str:
    return "; ".join(f"{name} takes {' or '.join(map(str, sizes))}" for name, sizes in backends.items())


def select_common_block_size(block_size: int, backends: Mapping[str, BlockSizes]) -> int:
    """The page size that kernels get, where a cache has pages of `block_size` tokens.

    Args:
        backends: name -> page sizes that its kernel takes; an exact size is meant exactly.

    Returns:
        `block_size` where all take it, else the largest size that divides it and that all take, of exact ones and of
        multiples up to a maximum.

    Raises:
        ConfigError: there is none; the text names each backend's sizes and the nearest page sizes that would do.
    """
    if block_size < 1:
        raise ConfigError(f"kv_cache.block_size: {block_size} tokens. A page has at least 1")
    found = _common(block_size, backends.values())
    if found is not None:
        return found
    near = " or ".join(map(str, _nearest(block_size, backends.values())))
    advice = (
        f"Write kv_cache.block_size {near}" if near else "No page size suits them all: choose other backends"
    )
    raise ConfigError(f"No common block size for {block_size}: {_able(backends)}. {advice}")


@dataclass(frozen=True, kw_only=True)
class BlockSizePlan:
    """One page size for the caches of a model.

    Attributes:
        block_size: tokens of a page.
        kernel_block_sizes: group -> tokens of the pages that its kernels get, a divisor of block_size.
    """

    block_size: int
    kernel_block_sizes: Mapping[str, int]


def plan_block_sizes(
    groups: Mapping[str, Mapping[str, BlockSizes]], *, block_size: int | None = None, unit: int = 0
) -> BlockSizePlan:
    """Looks at all groups at once, so that no group's size is chosen before another group is asked.

    Args:
        groups: KV-cache group -> backend -> page sizes that its kernel takes.
        block_size: `kv_cache.block_size` of the pipeline; None = the largest size up to 16 that suits all, a
            multiple of 8 if there is one, else the smallest above.
        unit: tokens that are kept or forgotten as one, as those of a latent frame, which pages have to divide; 0 =
            nothing but pages ends anywhere.

    Raises:
        ConfigError: no size suits all groups, or the one asked for does not divide `unit`.
    """
    every = [sizes for backends in groups.values() for sizes in backends.values()]
    fitting = [size for size in range(1, (unit or _period(every)) + 1) if not unit or unit % size == 0]
    suiting = [s for s in fitting if all(_common(s, backends.values()) for backends in groups.values())]
    named = {
        f"{name} of group {group!r}": sizes
        for group, backends in groups.items()
        for name, sizes in backends.items()
    }
    if block_size is None:
        if not suiting:
            raise ConfigError(
                f"No common block size for {f'a frame of {unit} tokens' if unit else 'this model'}: {_able(named)}. "
                "Choose backends that share one, or another height and width"
            )
        usual = [size for size in suiting if size <= _USUAL]
        aligned = [size for size in usual if size % _ALIGNED == 0]
        block_size = max(aligned or usual) if usual else suiting[0]
    elif unit and block_size > 0 and unit % block_size:
        near = " or ".join(str(size) for size in sorted(suiting, key=lambda size: abs(size - block_size))[:2])
        raise ConfigError(
            f"kv_cache.block_size: pages of {block_size} tokens do not divide a frame of {unit}, whose keys are "
            f"forgotten together. {f'Write {near}' if near else 'Choose other backends'}, or leave it out"
        )
    kernel = {group: select_common_block_size(block_size, backends) for group, backends in groups.items()}
    return BlockSizePlan(block_size=block_size, kernel_block_sizes=kernel)


def get_block_table_width(num_blocks: int, block_size: int, token_alignment: int | None = 128) -> int:
    """Entries of a block table's row, so that the row covers a multiple of `token_alignment` tokens (None = any).

    Raises:
        ValueError: a size is not positive.
    """
    for name, size in {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "token_alignment": token_alignment,
    }.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}={size}: the width of a block table needs at least 1")
    if token_alignment is None:
        return num_blocks
    step = token_alignment // gcd(token_alignment, block_size)
    return -(-num_blocks // step) * step


def map_to_kernel_blocks(
    block_table: torch.Tensor, ratio: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A block table for kernels whose pages are `ratio` times smaller. Slots stay what they are.

    Args:
        block_table: int32 [R, W]; whatever stands behind a row's pages stays no page of the row.
        out: int32 [R, at least W * ratio], which keeps its address; None = a new tensor.

    Returns:
        int32 [R, W * ratio]: entry c * ratio + j is block_table[:, c] * ratio + j.
    """
    requests, width = block_table.shape
    if ratio == 1 and out is None:
        return block_table
    if out is None:
        out = block_table.new_empty(requests, width * ratio)
    if out.shape[0] != requests or out.shape[1] < width * ratio:
        raise ValueError(
            f"out is {list(out.shape)}: {requests} rows of {width} pages in {ratio} parts need "
            f"[{requests}, {width * ratio}]"
        )
    part = torch.arange(ratio, dtype=block_table.dtype, device=block_table.device)
    mapped = out[:, : width * ratio]
    torch.add(block_table.unsqueeze(2) * ratio, part, out=mapped.view(requests, width, ratio))
    return mapped


def split_pages(kv_cache: torch.Tensor, kernel_block_size: int) -> torch.Tensor:
    """The same memory as smaller pages.

    Args:
        kv_cache: [N, 2, P, G, D], or [N, P, D] of MLA.
        kernel_block_size: tokens of the smaller pages.

    Returns:
        [N * ratio, 2, kernel_block_size, G, D], or [N * ratio, kernel_block_size, D]; a view.

    Raises:
        ConfigError: the size does not divide a page, or the tokens of a page lie head by head.
    """
    at = 1 if kv_cache.ndim == 3 else 2
    block_size = kv_cache.shape[at]
    if kernel_block_size < 1 or block_size % kernel_block_size:
        raise ConfigError(
            f"a page of {block_size} tokens cannot be split into pages of {kernel_block_size}. Choose a "
            f"kv_cache.block_size that is a multiple of {kernel_block_size}"
        )
    if kernel_block_size == block_size:
        return kv_cache
    token, page = kv_cache.stride(at), kv_cache.stride(0)
    if page != block_size * token:
        raise ConfigError(
            f"pages of {block_size} tokens cannot be split into pages of {kernel_block_size} that the kernel wants: "
            "their tokens do not lie one behind the other, page after page, as they do in layout NHD. Write "
            f"kv_cache.layout NHD, or kv_cache.block_size {kernel_block_size}"
        )
    ratio = block_size // kernel_block_size
    shape, stride = list(kv_cache.shape), list(kv_cache.stride())
    shape[0], shape[at], stride[0] = shape[0] * ratio, kernel_block_size, kernel_block_size * token
    return kv_cache.as_strided(shape, stride)
