"""A denoising step of causal Wan, launched eagerly and replayed as a CUDA graph, with seeded weights.

The second chunk of a video over the pages of the first one: what a graph saves is the host's time, so the picture is
small. Both calls do all that a step needs, the look at whether metadata is up to date included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import gcd

import torch

from benchmarks.paged_calls import spec_of
from benchmarks.rounds import first_line, shuffled_rounds
from omni_attn import use_attention_config
from omni_attn.models.wan.causal import CachePlan, CausalCache, CausalWanModel
from omni_attn.models.wan.causal.stepping import ChunkStepper
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.presets import WAN_PRESETS
from omni_attn.models.wan.seeded import materialise_seeded

CHUNK_FRAMES, CHUNKS = 3, 2
CALLS = 5
LATENT_PIXELS = 8
COLUMNS = ("backend", "eager ms", "replay ms", "eager / replay", "same bits")
TARGET = 1.5


@dataclass
class GraphRow:
    """What was found about one backend.

    Attributes:
        eager, replay: milliseconds, medians of rounds.
        same_bits: a replay gave what an eager step gave.
        problem: why there is nothing.
    """

    name: str
    eager: float | None = None
    replay: float | None = None
    same_bits: bool = False
    rounds: dict[str, list[float]] = field(default_factory=lambda: {"eager": [], "replay": []})
    problem: str = ""


class CausalStep:
    """One step of the second chunk, as a model and a captured graph run it.

    Args:
        word: backend of both roles, see spec_of.
        preset: of Wan.
        pixels: height and width of the video.

    Attributes:
        eager: the step, launch after launch; replay: as a graph. What either gives holds until its next call.

    Raises:
        ValueError: no graph can hold the step on that backend.
    """

    def __init__(
        self, word: str, preset: str, pixels: tuple[int, int], device: torch.device, dtype: torch.dtype
    ) -> None:
        config = WAN_PRESETS[preset].transformer
        height, width = (size // LATENT_PIXELS for size in pixels)
        name = str(dtype).removeprefix("torch.")
        grid = config.token_grid(CHUNK_FRAMES, height, width)
        frame = grid[1] * grid[2]
        plan = CachePlan(frame_tokens=frame, chunk_frames=CHUNK_FRAMES, block_size=gcd(frame, 8), dtype=name)
        self.model = _model(config, plan, word, device, dtype)
        self.cache = CausalCache(self.model, streams=1, num_frames=CHUNKS * CHUNK_FRAMES)
        numbers = torch.Generator(device).manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=dtype, generator=numbers)

        self.cache.begin(self.model, random(1, 512, config.text_dim))
        latents = random(1, config.in_channels, CHUNK_FRAMES, height, width)
        inputs = latents, torch.tensor([500.0], device=device), self.model.rope(grid, CHUNK_FRAMES)
        self._eager = ChunkStepper(self.model, self.cache)
        self._graph = ChunkStepper(self.model, self.cache, cudagraph_mode="FULL_DECODE_ONLY")
        if not self._graph.decision.final:
            raise ValueError(str(self._graph.decision).replace("\n", " "))
        self.eager = partial(self._eager.velocity, *inputs)
        self.replay = partial(self._graph.velocity, *inputs)
        for chunk in range(CHUNKS):
            self.cache.open(CHUNK_FRAMES)
            self.eager()
            if chunk < CHUNKS - 1:
                self.cache.commit()

    @property
    def label(self) -> str:
        """Backends of the roles."""
        return ", ".join(dict.fromkeys(group.selection.label for group in self.cache.groups))

    def same_bits(self) -> bool:
        """Whether a replay gives what an eager step gives, to the last bit."""
        eager, replays = self.eager(), self._graph.replays
        same = torch.equal(eager, self.replay())
        if self._graph.replays == replays:
            raise ValueError("the step was not replayed, but run eagerly")
        return same


def _model(
    config: WanConfig, plan: CachePlan, word: str, device: torch.device, dtype: torch.dtype
) -> CausalWanModel:
    with torch.device("meta"), use_attention_config(spec_of(word), device=device, dtype=dtype):
        model = CausalWanModel(config, plan)
    return materialise_seeded(model, torch.Generator(device).manual_seed(0), plan.dtype).eval()


def graph_rows(
    words: Iterable[str],
    preset: str,
    pixels: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    rounds: int,
    seed: int,
) -> list[GraphRow]:
    """A row for each backend, one model after the other; shuffled rounds of eager steps and replays."""
    rows = []
    for word in words:
        row = GraphRow(word)
        rows.append(row)
        try:
            step = CausalStep(word, preset, pixels, device, dtype)
            row.name = f"{word}: {step.label}"
            row.same_bits = step.same_bits()
        except Exception as error:  # a package may raise anything
            row.problem = first_line(error)
            continue
        calls: dict[str, Callable[[], object]] = {"eager": step.eager, "replay": step.replay}
        for _, name in shuffled_rounds(calls, rounds, seed):
            row.rounds[name].append(wall_milliseconds(calls[name], device))
        row.eager, row.replay = (statistics.median(row.rounds[name]) for name in calls)
    return rows


def wall_milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Mean time of some calls in a row, from an idle device to an idle one: the slower of host and device counts."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    wait()
    return (time.perf_counter() - start) / CALLS * 1e3


def graph_cells(row: GraphRow) -> list[str]:
    """One backend under COLUMNS."""
    if row.eager is None or row.replay is None:
        return [row.name, row.problem, "", "", ""]
    return [
        row.name,
        f"{row.eager:.2f}",
        f"{row.replay:.2f}",
        f"{row.eager / row.replay:.2f}",
        "yes" if row.same_bits else "no",
    ]


def held_graph(row: GraphRow) -> str:
    """A sentence on the target, empty where there is nothing to judge."""
    if row.eager is None or row.replay is None:
        return ""
    factor = row.eager / row.replay
    missed = "" if factor >= TARGET and row.same_bits else ", missed"
    bits = "the same bits" if row.same_bits else "other bits"
    return f"{row.name}: a replay is {factor:.2f} times as fast, with {bits} (target {TARGET}, the same bits{missed})."
