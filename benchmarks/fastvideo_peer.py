"""Video sparse attention of fastvideo-kernel, called as FastVideo's own attention layer calls it.

From the public sources of fastvideo-kernel 0.3.5 and of FastVideo's backend: `video_sparse_attn` takes [B, H, S, D] and
serves tiles of 64 tokens, `video_sparse_attn_bshd` takes [B, S, H, D] and serves 256. Both want every tile padded to
its full size with zeros. Environment variables, read at each call, choose the kernel.

FastVideo's layer also stacks query, key, value and gate for its all-to-all; that serves several GPUs and is left out.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.vsa_inputs import Inputs, SparseCase
from omni_attn.ops.block_sparse.partition import BlockPartition


@dataclass(frozen=True)
class FastVideoPath:
    """One way into the package: entry "bhsd" or "bshd", the tile volumes it serves, and the switch that chooses it."""

    name: str
    entry: str
    volumes: tuple[int, ...]
    switch: str


PATHS = (
    FastVideoPath("fastvideo tk", "bhsd", (64,), "FASTVIDEO_VSA_TK"),
    FastVideoPath("fastvideo triton", "bhsd", (64,), "FASTVIDEO_VSA_TRITON"),
    FastVideoPath("fastvideo triton", "bshd", (256,), "FASTVIDEO_VSA_TRITON"),
    FastVideoPath("fastvideo cute", "bshd", (256,), "FASTVIDEO_VSA_CUTEDSL"),
    # Copies to [B, S, H, D] and back inside; how it was called before the other entry existed.
    FastVideoPath("fastvideo cute, heads first", "bhsd", (256,), "FASTVIDEO_VSA_CUTEDSL"),
)
_SWITCHES = (
    "FASTVIDEO_VSA_TRITON",
    "FASTVIDEO_KERNEL_VSA_FORCE_TRITON",
    "FASTVIDEO_VSA_TK",
    "FASTVIDEO_VSA_SM100A",
    "FASTVIDEO_VSA_CUTEDSL",
)


class FastVideoTiles:
    """Its passes into and out of tile order, with one buffer for all calls of a step."""

    def __init__(self, tiles: BlockPartition) -> None:
        self._raster = tiles.order.long()
        self._untile = tiles.slots()
        self._slots = self._untile[self._raster]
        self._padded = tiles.num_blocks * tiles.capacity
        self._buffer: torch.Tensor | None = None

    def tile(self, inputs: Inputs) -> Inputs:
        """Each as [B, padded slots, H, D] with zeros behind a tile's tokens; valid until the next call."""
        batch, _, *rest = inputs.query.shape
        if self._buffer is None:
            self._buffer = inputs.query.new_zeros(len(inputs) * batch, self._padded, *rest)
        parts = self._buffer.chunk(len(inputs))
        for part, tensor in zip(parts, inputs, strict=True):
            part[:, self._slots] = tensor[:, self._raster]
        return Inputs(*parts)

    def untile(self, output: torch.Tensor) -> torch.Tensor:
        """[B, padded slots, H, D] -> [B, S, H, D] in raster order."""
        return output[:, self._untile]

    def release(self) -> None:
        """Lets the buffer go, so that the next call's memory counts it."""
        self._buffer = None


class FastVideoAttention:
    """One path of the package on one case.

    Raises:
        ImportError: the package, or the kernel that this path stands for, is not there.
    """

    def __init__(self, path: FastVideoPath, case: SparseCase, topk: int, device: torch.device) -> None:
        package = importlib.import_module("fastvideo_kernel")
        if path.switch == "FASTVIDEO_VSA_TK":
            _need_extension()
        self._path, self._case, self._topk = path, case, topk
        self._entry: Any = (
            package.video_sparse_attn if path.entry == "bhsd" else package.video_sparse_attn_bshd
        )
        self._sizes = case.tiles(device).block_sizes
        self._switches = dict.fromkeys(_SWITCHES, "0") | {path.switch: "1"}

    def layout(self, tiled: Inputs) -> Inputs:
        """Tensors in tile order as this entry takes them."""
        if self._path.entry == "bshd":
            return tiled
        return Inputs(*(x.transpose(1, 2).contiguous() for x in tiled))

    def kernel(self, inputs: Inputs) -> torch.Tensor:
        """The package's call alone, on tensors that `layout` made: [B, padded slots, H, D], maybe a view."""
        query, key, value, gate = inputs
        with _environment(self._switches):
            output: torch.Tensor = self._entry(
                query, key, value, self._sizes, self._sizes, self._topk, self._case.tile, gate
            )
        return output if self._path.entry == "bshd" else output.transpose(1, 2)

    @contextmanager
    def noting_map(self) -> Iterator[list[torch.Tensor]]:
        """Within it, the bool maps [B, H, N, N] that the package selects are noted down."""
        operations = importlib.import_module("fastvideo_kernel.ops")
        select, maps = operations.fused_topk_mask, list[torch.Tensor]()

        def noting(*arguments: Any, **named: Any) -> torch.Tensor:
            maps.append(select(*arguments, **named))
            return maps[-1]

        with patch.object(operations, "fused_topk_mask", noting):
            yield maps


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables that are set within it; a copy of all others would be host time inside what is timed."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _need_extension() -> None:
    """Nothing if the ThunderKittens kernels can be loaded; without them the package runs Triton in their place."""
    operations: Any = importlib.import_module("fastvideo_kernel._C.fastvideo_kernel_ops")
    if not hasattr(operations, "block_sparse_fwd") or torch.cuda.get_device_capability() != (9, 0):
        raise ImportError("fastvideo_kernel has no ThunderKittens block-sparse kernel for this device")
