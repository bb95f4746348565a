"""From a layer's request and the ranks to the strategy that splits it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omni_attn.config.parallel import ParallelConfig
from omni_attn.errors import ConfigError
from omni_attn.facts import AttentionRequest
from omni_attn.parallel.allgather import AllGatherKV
from omni_attn.parallel.context import Parallel
from omni_attn.parallel.pieces import UlyssesInPieces
from omni_attn.parallel.ring import Ring
from omni_attn.parallel.strategy import Strategy
from omni_attn.parallel.ulysses import Ulysses
from omni_attn.parallel.ulysses_ring import UlyssesRing

NOT_SPLIT = "not split: runs on each rank's own tensors"
"""What a layer that leaves its sequence to the model says of itself, among ranks."""


def _ulysses(request: AttentionRequest, parallel: Parallel) -> Strategy:
    whole, pieces = Ulysses(request, parallel), UlyssesInPieces(request, parallel)
    return pieces if len(pieces.trades) > 1 else whole


STRATEGIES: Mapping[str, Callable[[AttentionRequest, Parallel], Strategy]] = {
    Ulysses.mode: _ulysses,
    **{strategy.mode: strategy for strategy in (Ring, UlyssesRing, AllGatherKV)},
}
"""The strategies by the mode that a request states."""


def describe_split(request: AttentionRequest, config: ParallelConfig) -> str | None:
    """What ranks so configured do with a layer's sequence, in words; None where there is one process.

    Raises:
        ConfigError: see split_layer.
    """
    if config.mode is None:
        return None
    if request.sequence_parallel is None:
        return NOT_SPLIT
    return split_layer(request, Parallel.planned(config)).describe()


def split_layer(request: AttentionRequest, parallel: Parallel) -> Strategy:
    """How a layer is split among these ranks, in the mode of their configuration.

    Raises:
        ConfigError: the layer cannot be split this way; the same on every rank, before any exchange.
    """
    mode = parallel.mode
    assert mode is not None, "ranks that split nothing are not in force"
    if request.window is not None and mode != "ulysses":
        raise ConfigError(
            f'parallel: role "{request.role}" has a window of {request.window} tokens, which {mode} would cut at the '
            "borders between ranks. Set ulysses_degree alone"
        )
    return STRATEGIES[mode](request, parallel)
