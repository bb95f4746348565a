"""Cases of benchmarks/vsa.py, and their query, key, value and gate: random, or correlated in space and time.

Legend: B batch, S tokens in raster order, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from omni_attn.errors import ConfigError
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.video_tiles import Extent, tile_count, video_tiles
from omni_attn.tuning.shapes import shapes_named

DTYPE = torch.bfloat16
LARGE_CASES = ("wan-14b-720p/4x8x8", "wan-14b-720p/4x4x4", "wan-1.3b-480p/4x8x8", "wan-1.3b-480p/4x4x4")
# Found by trying: attention is local, and 10 % of the tiles keep most of its mass, but not all; see correlated_inputs.
_AMPLITUDE = 1.1
_NOISE = 0.3
_REACH = (2.0, 8.0)


class Inputs(NamedTuple):
    """Query, key, value and gate, each [B, S, H, D] in raster order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate: torch.Tensor


@dataclass(frozen=True)
class SparseCase:
    """One self-attention call and how its video is cut.

    Attributes:
        segments: tokens of each segment before the video.
    """

    name: str
    grid: Extent
    tile: Extent
    heads: int
    head_size: int
    batch: int = 1
    segments: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """S."""
        return self.before + math.prod(self.grid)

    @property
    def before(self) -> int:
        """Tokens before the video."""
        return sum(self.segments)

    @property
    def num_tiles(self) -> int:
        """Of the video."""
        return tile_count(self.grid, self.tile)

    @property
    def scale(self) -> float:
        """The softmax scale that the peers have built in."""
        return 1 / math.sqrt(self.head_size)

    def tiles(self, device: torch.device) -> BlockPartition:
        """The partition of the S tokens."""
        return video_tiles(self.grid, self.tile, device, self.segments)

    def __str__(self) -> str:
        return (
            f"{self.name}: grid {self.grid}, tile {self.tile}, {self.num_tiles} tiles, batch {self.batch}, "
            f"{self.heads} heads of {self.head_size}"
        )


def case_named(name: str) -> SparseCase:
    """The case of a name like "wan-14b-720p/4x8x8": a named shape of a whole video, and a tile.

    Raises:
        ConfigError: no such shape, a shape without a video grid, or a tile that is not three positive numbers.
    """
    shape_name, _, words = name.partition("/")
    (shape,) = shapes_named([shape_name])
    extents = words.split("x")
    if len(extents) != 3 or not all(word.isdigit() and int(word) for word in extents):
        raise ConfigError(f"case {name!r} needs a tile behind the shape, for instance {shape_name}/4x8x8")
    if shape.grid is None:
        raise ConfigError(f"case {name!r}: {shape_name} is no whole video, so it has no tiles")
    frames, rows, columns = (int(word) for word in extents)
    return SparseCase(name, shape.grid, (frames, rows, columns), shape.heads, shape.head_size, shape.batch)


def random_inputs(case: SparseCase, device: torch.device, generator: torch.Generator) -> Inputs:
    """Four normal tensors: every tile is as good as another, and lists of tiles have nothing in common."""
    return Inputs(*(_normal(case, device, generator) for _ in range(4)))


def correlated_inputs(case: SparseCase, device: torch.device, generator: torch.Generator) -> Inputs:
    """Query and key that follow smooth random fields over the (T, H, W) grid; value and gate are normal.

    Each head has D random Fourier features, amplitude * sqrt(2) cos(w . position + phase), where 1 / w is of the size
    of the head's reach: drawn log-uniformly between 2 and 8 tokens along rows and columns, and half of that along
    frames, so that some heads look in space and others in time. Query and key share the features and have noise of
    their own, 0.3 of the variance. The scores between two tokens then fall like a Gaussian of their distance, from
    about 9.6 at none (D 128), on a floor of random scores. The best 10 % of the tiles of float64 means then keep this
    share of the attention's mass, and the lists of tiles that follow each other have this share in common (some heads):

    ========== ============= ============= ======================
    grid       tile 4x4x4    tile 4x8x8    random inputs, 4x4x4
    ========== ============= ============= ======================
    21, 30, 52 0.88 and 0.53 0.85 and 0.36 0.08 and 0.14
    21, 45, 80 0.74 and 0.45 0.71 and 0.29 0.08 and 0.15
    ========== ============= ============= ======================

    The script reports both for each run.
    """
    positions = torch.cartesian_prod(*(torch.arange(extent) for extent in case.grid)).to(device).float()
    # What lies before the video has no place on the grid.
    make = _normal if case.before else _empty
    query, key = (make(case, device, generator) for _ in range(2))
    for item in range(case.batch):
        for head in range(case.heads):
            field = _smooth_field(positions, case.head_size, generator)
            for tensor in (query, key):
                noise = torch.randn(field.shape, device=device, generator=generator)
                mixed = math.sqrt(1 - _NOISE) * field + math.sqrt(_NOISE) * noise
                tensor[item, case.before :, head] = _AMPLITUDE * mixed
    return Inputs(query, key, _normal(case, device, generator), _normal(case, device, generator))


MAPS: dict[str, Callable[[SparseCase, torch.device, torch.Generator], Inputs]] = {
    "random": random_inputs,
    "correlated": correlated_inputs,
}
"""What `--maps` takes; named for the block maps that they lead to."""


def _smooth_field(positions: torch.Tensor, channels: int, generator: torch.Generator) -> torch.Tensor:
    """[S, channels] in float32, of unit variance."""
    device = positions.device
    shortest, longest = _REACH
    reach = shortest * (longest / shortest) ** torch.rand(3, device=device, generator=generator)
    reach[0] /= 2
    waves = torch.randn(3, channels, device=device, generator=generator) / reach[:, None]
    phases = 2 * math.pi * torch.rand(channels, device=device, generator=generator)
    return math.sqrt(2) * torch.cos(positions @ waves + phases)


def _shape(case: SparseCase) -> tuple[int, int, int, int]:
    return case.batch, case.tokens, case.heads, case.head_size


def _empty(case: SparseCase, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(_shape(case), device=device, dtype=DTYPE)


def _normal(case: SparseCase, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(_shape(case), device=device, dtype=DTYPE, generator=generator)
