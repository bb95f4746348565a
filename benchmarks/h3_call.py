"""The attention call of one MiniMax-H3 block: dense, and each sparse method at the same sparsity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.layer_calls import SUMMARY_BACKEND, LayerCall, layer_call, try_each
from benchmarks.rounds import Candidate, Row
from benchmarks.sampled import SampledRows, best_blocks
from benchmarks.vsa_checks import shared
from benchmarks.vsa_inputs import Inputs, SparseCase
from omni_attn import AttentionMetadata
from omni_attn.backends.metadata import VideoLayout
from omni_attn.models.minimax_h3.attention.fastvideo_h3 import MiniMaxH3VSAImpl
from omni_attn.models.minimax_h3.packing import pack_t2va
from omni_attn.models.minimax_h3.sizes import audio_latents, latent_size
from omni_attn.ops.block_sparse.selection import BlockSelection, block_map
from omni_attn.ops.block_sparse.selectors import blocks_kept
from omni_attn.ops.video_tiles import Extent, chunk_sizes, tile_count

PLATFORM_DEFAULT = "dense, platform default"
VSA = "FASTVIDEO_VSA"
OVERRIDES = {VSA: MiniMaxH3VSAImpl}
BACKENDS = (VSA, "RAINFUSION_ATTN", SUMMARY_BACKEND)
TEXT_ROWS, PIXELS = 30, (768, 1344)


def _case(num_frames: int) -> SparseCase:
    packed = pack_t2va(TEXT_ROWS, latent_size(num_frames, *PIXELS), audio_latents(num_frames))
    return SparseCase(
        f"{num_frames}-frames", packed.grid, (4, 4, 4), heads=56, head_size=128, segments=packed.segments
    )


CASES = {case.name: case for case in map(_case, (124, 243, 345))}
# What a CPU runs: enough video for each method's own rules to choose its sparse route.
TOY = SparseCase("toy", (4, 32, 32), (4, 4, 4), heads=2, head_size=16, segments=(6, 10))


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to configure self-attention.

    Attributes:
        name: heads a table's row.
        spec: None = the platform's default.
        sparsity: 0 = dense.
        tile: of video sparse attention.
        gated: whether it is given a gate.
    """

    name: str
    spec: Mapping[str, Any] | None
    sparsity: float = 0.0
    tile: Extent | None = None
    gated: bool = False

    @property
    def label(self) -> str:
        """The name, with the variant that is asked for."""
        variant = "" if self.spec is None else self.spec.get("variant", "")
        return f"{self.name}, {variant}" if variant else self.name


def dense_methods(device: torch.device) -> list[Method]:
    """FlashAttention 3, or torch's own attention where there is no GPU, and the platform's default."""
    on_gpu = device.type == "cuda"
    first = {"backend": "FLASH_ATTN", "variant": "fa3"} if on_gpu else {"backend": "TORCH_SDPA"}
    return [Method(name="dense", spec=first), Method(name=PLATFORM_DEFAULT, spec=None)]


def sparse_methods(
    sparsity: float, backends: Sequence[str], tiles: Iterable[Extent], variants: Sequence[str]
) -> list[Method]:
    """Video sparse attention at each tile and variant, gated; once without a gate; and the methods on raster blocks."""
    found = []
    for tile in tiles if VSA in backends else ():
        words = f"VSA {sparsity:g}, {'x'.join(map(str, tile))}"
        block = {"sparsity": sparsity, "tile_size": list(tile)}
        base: dict[str, Any] = {"backend": VSA, "fastvideo_vsa": block}
        for number, variant in enumerate(variants):
            method = Method(name=words, spec=base | {"variant": variant}, sparsity=sparsity, tile=tile)
            found.append(replace(method, name=f"{words}, gate", gated=True))
            if number == 0:
                found.append(method)
    for backend in (name for name in backends if name != VSA):
        spec = {"backend": backend, "block_sparse": {"sparsity": sparsity}}
        found.append(
            Method(name=f"{backend.partition('_ATTN')[0]} {sparsity:g}", spec=spec, sparsity=sparsity)
        )
    return found


@dataclass(frozen=True)
class Calls:
    """The methods on one set of inputs, and their float64 counterpart."""

    case: SparseCase
    inputs: Inputs
    sampled: SampledRows

    @classmethod
    def of(cls, case: SparseCase, inputs: Inputs) -> Calls:
        """With rows sampled for the check."""
        return cls(case, inputs, SampledRows(*inputs[:3], case.scale))

    def candidates(self, methods: Iterable[Method]) -> list[JudgedCandidate | tuple[str, Exception]]:
        """A candidate for each method, or its name and why it is not here."""
        return try_each({method.label: partial(self._candidate, method) for method in methods})

    def _candidate(self, method: Method) -> JudgedCandidate:
        layout = VideoLayout(self.case.segments, (self.case.grid,), self.case.tokens)
        call = layer_call(
            self.inputs[:3],
            method.spec,
            AttentionMetadata(video_layout=layout),
            gate=self.inputs.gate if method.gated else None,
            impl_overrides=OVERRIDES,
        )
        return JudgedCandidate(
            name=f"{method.name}: {call.label}",
            kind="ours" if method.sparsity else "dense",
            call=call,
            executor=call.executor,
            method=method,
            layer=call,
        )

    def check(self, candidate: Candidate, row: Row) -> float:
        """The error over the candidate's own blocks; fills in how these agree with those of float64 means."""
        assert isinstance(candidate, JudgedCandidate)
        selection, chosen = None, None
        if candidate.layer.is_sparse:
            selection = candidate.layer.selection()
            chosen = block_map(selection.selected, selection.key_blocks.num_blocks)
            exact = self._exact(candidate.method, selection)
            row.as_exact = None if exact is None else shared(chosen, exact)
        return self.sampled.error(candidate.call(), candidate.layer.expected(self.sampled, selection, chosen))

    def _exact(self, method: Method, selection: BlockSelection) -> torch.Tensor | None:
        """The blocks that the method's rule takes from float64 means; None where RainFusion protects some."""
        assert method.spec is not None
        if method.spec["backend"] == "RAINFUSION_ATTN":
            return None
        scores = self.sampled.scores(selection.query_blocks)
        if method.tile is None:
            return best_blocks(scores, blocks_kept(method.sparsity, scores.shape[-1]))
        before = len(chunk_sizes(self.case.segments, method.tile))
        chosen = torch.ones_like(scores, dtype=torch.bool)
        video = scores[..., before:, before:]
        chosen[..., before:, before:] = best_blocks(
            video, blocks_kept(method.sparsity, tile_count(self.case.grid, method.tile))
        )
        return chosen


@dataclass(frozen=True, kw_only=True)
class JudgedCandidate(Candidate):
    """A candidate that is one call of a layer."""

    method: Method
    layer: LayerCall
