"""What benchmarks/sequence_parallel.py times: one attention call, or one forward of Wan, alone or split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from benchmarks.h3_call import OVERRIDES
from benchmarks.wan_models import TEXT_TOKENS
from omni_attn import Attention, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.backends.metadata import VideoLayout
from omni_attn.config import ParallelConfig
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.presets import WAN_PRESETS
from omni_attn.models.wan.seeded import materialise_seeded
from omni_attn.ops.video_tiles import Extent
from omni_attn.parallel import Parallel, use_parallel
from omni_attn.parallel.cost import AttentionCall
from omni_attn.parallel.heads import split_heads
from omni_attn.tuning.clocks import Call

Join = Callable[[ParallelConfig], Parallel]
Made = tuple[Call, Callable[[torch.Tensor], torch.Tensor]]
"""A call, and what makes its output whole on every rank."""


@dataclass(frozen=True)
class Work:
    """The sizes of a run.

    Attributes:
        grid, heads, head_size: of the attention call.
        tile: of video sparse attention.
        preset, latents, text_tokens: of the forward.
    """

    grid: Extent
    heads: int
    head_size: int
    dtype: torch.dtype
    tile: Extent
    preset: str
    latents: Extent
    text_tokens: int

    @property
    def tokens(self) -> int:
        """Of the attention call."""
        return prod(self.grid)

    def call(self, *, kept: float = 1.0, gated: bool = False) -> AttentionCall:
        """The attention call as the cost model sees it."""
        return AttentionCall(
            tokens=self.tokens,
            heads=self.heads,
            head_size=self.head_size,
            kept=kept,
            beside_query=int(gated),
            element_bytes=self.dtype.itemsize,
        )


# Wan 14B at 720p, and 1.3B at 480p, 81 frames.
FULL = Work((21, 45, 80), 40, 128, torch.bfloat16, (4, 8, 8), "wan2.1-t2v-1.3b", (21, 60, 104), TEXT_TOKENS)
TOY = Work((3, 5, 7), 6, 16, torch.float32, (1, 2, 2), "wan-tiny", (2, 6, 10), 4)


@dataclass(frozen=True)
class Candidate:
    """One way to run one piece of work.

    Attributes:
        name: heads its row.
        config: None = on one rank.
        make: builds it among the ranks, None = alone. The same on every rank, so that all fail or none.
        target: times as fast as one rank that two ranks should be.
        is_yardstick: the same work in another order of rounding: others may differ from the first by twice as much.
    """

    name: str
    config: ParallelConfig | None
    make: Callable[[Parallel | None], Made]
    target: float | None = None
    is_yardstick: bool = False


def inputs(work: Work, device: torch.device, tensors: int) -> list[torch.Tensor]:
    """Normal tensors [1, S, H, D], equal on every rank."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, work.tokens, work.heads, work.head_size)
    return [torch.randn(shape, device=device, dtype=work.dtype, generator=generator) for _ in range(tensors)]


def attention(
    work: Work,
    whole: list[torch.Tensor],
    spec: Mapping[str, Any] | None,
    *,
    overridden: bool,
    parallel: Parallel | None,
) -> Made:
    """A self-attention layer on query, key, value and perhaps a gate; spec None = the platform's default."""
    query = whole[0]
    lengths = {"self": (work.tokens, work.tokens)}
    config: dict[str, Any] = {} if spec is None else {"default": dict(spec)}
    with (
        use_parallel(parallel),
        use_attention_config(config, device=query.device, dtype=query.dtype, lengths=lengths),
    ):
        layer = Attention(
            work.heads,
            work.head_size,
            role="self",
            mask_usage="never",
            video_grid=True,
            impl_overrides=OVERRIDES if overridden else None,
        )
    layout = VideoLayout((), (work.grid,), work.tokens) if overridden else None
    record = AttentionMetadata(vsa_dit_seq_shape=work.grid, video_layout=layout)
    prepare_attention(layer, {"self": record}, lengths)
    own = whole if parallel is None else [parallel.split(tensor).contiguous() for tensor in whole]
    if len(own) > 3:
        record = record.with_layer_inputs(gate_compress=own[3])
    return partial(layer, own[0], own[1], own[2], record), _gatherer(parallel, work.tokens)


def _gatherer(parallel: Parallel | None, tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
    if parallel is None:
        return lambda output: output
    return lambda output: parallel.gather(output, tokens)


def model_config(work: Work) -> WanConfig:
    """Of the forward."""
    return WAN_PRESETS[work.preset].transformer


class Forwards:
    """Makes forwards of a model; all share one set of seeded weights, equal on every rank."""

    def __init__(self, work: Work, device: torch.device, *, compiled: bool) -> None:
        self._work, self._device, self._compiled = work, device, compiled
        self._weights: Mapping[str, Any] | None = None

    def yardstick(self) -> Candidate:
        """The forward on one rank by torch's own attention: how far rounding alone leads through all blocks."""
        return Candidate("one rank, TORCH_SDPA", None, partial(self, backend="TORCH_SDPA"), is_yardstick=True)

    def __call__(self, parallel: Parallel | None, backend: str | None = None) -> Made:
        """A forward among these ranks, which gathers its output itself; backend None = the platform's default."""
        work, device, config = self._work, self._device, model_config(self._work)
        tokens = prod(config.token_grid(*work.latents))
        lengths = {"self": (tokens, tokens), "cross": (tokens, work.text_tokens)}
        with (
            use_parallel(parallel),
            use_attention_config(backend, device=device, dtype=work.dtype, lengths=lengths),
            torch.device("meta"),
        ):
            model = WanModel(config)
        if self._weights is None:
            materialise_seeded(model, torch.Generator(device).manual_seed(0), str(work.dtype))
            self._weights = model.state_dict()
        model.load_state_dict(self._weights, assign=True)
        if self._compiled:
            for block in model.blocks:
                block.compile(fullgraph=True)
        generator = torch.Generator(device).manual_seed(0)
        latents, text = (
            torch.randn(shape, device=device, dtype=work.dtype, generator=generator)
            for shape in ((1, config.in_channels, *work.latents), (1, work.text_tokens, config.text_dim))
        )
        timestep = torch.tensor([500.0], device=device)
        return partial(model.eval(), latents, timestep, text), lambda output: output


def splits(
    ranks: int,
    heads: int,
    pieces: Iterable[int] = (),
    *,
    ulysses_alone: bool = False,
    ways: Sequence[bool | None] = (None,),
) -> list[ParallelConfig]:
    """The configurations of so many ranks: Ulysses, also in pieces, ring, both, gathered keys and values.

    Args:
        heads: of the call, which decide whether there can be pieces.
        pieces: numbers to try.
        ways: values of symmetric_memory, where it decides how exchanges travel.
    """
    shared = split_heads(heads, heads, ranks, role="measured")
    numbers = sorted({len(shared.cut(number)) for number in (1, *pieces)})
    found = [ParallelConfig(ulysses_degree=ranks, head_pieces=number) for number in numbers]
    if not ulysses_alone:
        inner = [degree for degree in range(1, ranks) if ranks % degree == 0]
        found += [ParallelConfig(ulysses_degree=degree, ring_degree=ranks // degree) for degree in inner]
    found = [config.model_copy(update={"symmetric_memory": way}) for config in found for way in ways]
    return found if ulysses_alone else [*found, ParallelConfig(allgather_degree=ranks)]


def attention_candidates(
    work: Work,
    whole: list[torch.Tensor],
    spec: Mapping[str, Any] | None,
    configs: Iterable[ParallelConfig],
    targets: Mapping[str, float],
    *,
    overridden: bool = False,
) -> list[Candidate]:
    """One rank first, then each configuration."""

    def make(parallel: Parallel | None) -> Made:
        return attention(work, whole, spec, overridden=overridden, parallel=parallel)

    return candidates(make, configs, targets)


def candidates(
    make: Callable[[Parallel | None], Made], configs: Iterable[ParallelConfig], targets: Mapping[str, float]
) -> list[Candidate]:
    """One rank first, then each configuration."""
    alone = Candidate("one rank", None, make)
    return [
        alone,
        *(Candidate(_name(config), config, make, targets.get(config.describe())) for config in configs),
    ]


def _name(config: ParallelConfig) -> str:
    pieces = f", {config.head_pieces} pieces" if config.head_pieces > 1 else ""
    return config.describe() + pieces + (", over NCCL" if config.symmetric_memory is False else "")
