"""RainFusion's order of a joint sequence: each frame in patches of 8 x 8 tokens, all other rows behind the videos.

After MindIE-SD (mindiesd/layers/flash_attn/sparse_flash_attn_rf_v2.py) and vLLM-Omni's layouts of several videos.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from omni_attn.errors import MetadataError
from omni_attn.ops.block_sparse.kept import keep_captured, refuse_in_capture
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.layout import int32_on

Extent = tuple[int, int, int]
#: Extent of a patch in rows and columns.
PATCH = 8


@dataclass(frozen=True)
class RainFusionLayout:
    """Where videos lie in a sequence.

    Attributes:
        used_len: tokens in use.
        spans: (first token, (frames, rows, columns)) of each video, in order; all other tokens are dense context.

    Raises:
        MetadataError: a span overlaps the one before it, or ends behind the used tokens.
    """

    used_len: int
    spans: tuple[tuple[int, Extent], ...]

    def __post_init__(self) -> None:
        end = 0
        for start, grid in self.spans:
            if start < end or min(grid) < 1 or start + prod(grid) > self.used_len:
                raise MetadataError(
                    f"a video of grid {grid} from token {start} on needs to start at {end} or later and to end within "
                    f"{self.used_len} tokens, found its end at {start + prod(grid)}"
                )
            end = start + prod(grid)

    @property
    def video_rows(self) -> int:
        """Tokens of all videos."""
        return sum(prod(grid) for _, grid in self.spans)

    def missing_rows(self, block_size: int) -> int:
        """How many context rows are missing to fill the last blocks of all videos but the last one; 0 = none."""
        gaps = sum(-prod(grid) % block_size for _, grid in self.spans[:-1])
        return max(0, gaps - (self.used_len - self.video_rows))


class RainFusionCall(NamedTuple):
    """What a sparse call is told beside its tensors.

    Attributes:
        layout: where the videos lie among the tokens in use.
        block_size: tokens of a block.
        sparsity: share of the key blocks that a query block leaves out.
        softmax_scale: factor on the scores.
    """

    layout: RainFusionLayout
    block_size: int
    sparsity: float
    softmax_scale: float


@dataclass(frozen=True, eq=False)
class RainFusionBlocks:
    """A layout on a device.

    Attributes:
        partition: its used tokens in blocks.
        protected: bool [blocks]: blocks of a first frame, or with a context row; they see and are seen by all.
    """

    partition: BlockPartition
    protected: torch.Tensor


def video_order(grid: Extent) -> torch.Tensor:
    """int64 [T*H*W]: the tokens of a video, numbered in raster order, frame by frame in patches of 8 x 8.

    Where rows or columns are no multiple of 8, the first frame stays as it is, and each later one has its leftover
    rows, whole, and then its leftover columns behind its patches.
    """
    frames, rows, columns = grid
    numbers = torch.arange(prod(grid), device="cpu").view(frames, rows, columns)
    main_rows, main_columns = rows - rows % PATCH, columns - columns % PATCH
    if (main_rows, main_columns) == (rows, columns):
        return _patches(numbers).flatten()
    later = numbers[1:]
    parts = (
        _patches(later[:, :main_rows, :main_columns]),
        later[:, main_rows:].flatten(1),
        later[:, :main_rows, main_columns:].flatten(1),
    )
    return torch.cat([numbers[0].flatten(), torch.cat(parts, dim=1).flatten()])


def _patches(frames_THW: torch.Tensor) -> torch.Tensor:
    """[T, H*W]: the numbers of each frame, patch by patch; H and W are multiples of 8."""
    frames, rows, columns = frames_THW.shape
    cut = frames_THW.reshape(frames, rows // PATCH, PATCH, columns // PATCH, PATCH)
    return cut.transpose(2, 3).flatten(1)


def rainfusion_order(layout: RainFusionLayout, block_size: int) -> torch.Tensor:
    """The used tokens in block order, int64 [used_len] on the host.

    Videos come first, each from a block of its own on: context rows fill the last block of the video before. The
    other context rows come last.

    Raises:
        MetadataError: there are too few context rows for that, see RainFusionLayout.missing_rows.
    """
    if missing := layout.missing_rows(block_size):
        raise MetadataError(
            f"RainFusion fills the last block of {block_size} tokens of each video but the last with other rows, and "
            f"{missing} of them are missing: attend densely to this sequence"
        )
    is_context = torch.ones(layout.used_len, dtype=torch.bool, device="cpu")
    for start, grid in layout.spans:
        is_context[start : start + prod(grid)] = False
    context = is_context.nonzero().flatten()
    parts: list[torch.Tensor] = []
    for index, (start, grid) in enumerate(layout.spans):
        gap = -prod(grid) % block_size if index < len(layout.spans) - 1 else 0
        parts += [start + video_order(grid), context[:gap]]
        context = context[gap:]
    return torch.cat([*parts, context])


def protected_blocks(layout: RainFusionLayout, block_size: int) -> frozenset[int]:
    """The numbers of the blocks that hold rows of a video's first frame, or context rows; host arithmetic alone.

    The last block of a first frame counts whole, whatever else is in it.
    """
    protected: set[int] = set()
    block = 0  # that the next video starts with
    for index, (_, grid) in enumerate(layout.spans):
        frame, whole = -(-grid[1] * grid[2] // block_size), prod(grid) // block_size
        protected |= set(range(block, block + frame))
        block += whole
        if index < len(layout.spans) - 1 and prod(grid) % block_size:
            protected.add(block)
            block += 1
    blocks = -(-layout.used_len // block_size)
    gaps = sum(-prod(grid) % block_size for _, grid in layout.spans[:-1])
    has_rest = layout.used_len - layout.video_rows > gaps
    return frozenset(protected | set(range(block, blocks) if has_rest else ()))


def rainfusion_blocks(layout: RainFusionLayout, block_size: int, device: torch.device) -> RainFusionBlocks:
    """The blocks of a layout on a device; kept for later calls.

    Not for compiled code, where the cache cannot be asked: call it inside an operator.

    Raises:
        MetadataError: see rainfusion_order; or the first call for a layout lies inside a CUDA-graph capture.
    """
    blocks = _rainfusion_blocks(layout, block_size, device)
    keep_captured(blocks, device)
    return blocks


@lru_cache(maxsize=64)
def _rainfusion_blocks(layout: RainFusionLayout, block_size: int, device: torch.device) -> RainFusionBlocks:
    order, protected = rainfusion_order(layout, block_size), protected_blocks(layout, block_size)
    sizes = [min(block_size, len(order) - start) for start in range(0, len(order), block_size)]
    refuse_in_capture(device)
    with torch.inference_mode(False):  # kept tensors must serve calls with gradients too
        flags = int32_on(device, [block in protected for block in range(len(sizes))])
        return RainFusionBlocks(BlockPartition.of(order, sizes, block_size, device), flags.bool())
