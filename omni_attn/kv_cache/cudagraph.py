"""CUDA-graph modes, and the record of how a requested one became the one that holds.

A full graph holds a whole step, attention included. A piecewise one holds what lies between the attention calls, which
are left out as splitting ops and run eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Self

from omni_attn.config.names import nearest
from omni_attn.errors import ConfigError
from omni_attn.facts.kv_cache import AttentionCGSupport


class CUDAGraphMode(Enum):
    """What is captured. A pair holds the mode of uniform batches (decode), then that of all other ones."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    @classmethod
    def of(cls, name: Self | str | None) -> CUDAGraphMode:
        """The mode of a name in any case; None = NONE.

        Raises:
            ConfigError: there is no such mode.
        """
        if isinstance(name, CUDAGraphMode):
            return name
        if name is None:
            return cls.NONE
        if (upper := str(name).upper()) in cls.__members__:
            return cls[upper]
        near = nearest(upper, cls.__members__)
        hint = f" -- did you mean {near}?" if near else ""
        raise ConfigError(f"cudagraph_mode {name!r} is none of {', '.join(cls.__members__)}{hint}")

    def __bool__(self) -> bool:
        return self is not CUDAGraphMode.NONE

    def separate_routine(self) -> bool:
        """Whether uniform batches and other ones are captured differently."""
        return isinstance(self.value, tuple)

    def decode_mode(self) -> CUDAGraphMode:
        """NONE, PIECEWISE or FULL: the mode of uniform batches."""
        return CUDAGraphMode(self.value[0]) if self.separate_routine() else self

    def mixed_mode(self) -> CUDAGraphMode:
        """NONE, PIECEWISE or FULL: the mode of batches whose query lengths differ."""
        return CUDAGraphMode(self.value[1]) if self.separate_routine() else self

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Whether some batches run in `mode`, which is a single one."""
        if mode.separate_routine():
            raise ValueError(f"{mode.name} holds two modes: ask for one of NONE, PIECEWISE, FULL")
        return mode in (self.decode_mode(), self.mixed_mode())

    def has_full_cudagraphs(self) -> bool:
        """Whether some batches run as one graph, attention included."""
        return self.has_mode(CUDAGraphMode.FULL)

    def requires_piecewise_compilation(self) -> bool:
        """Whether the model has to be split at its attention calls."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def max_cudagraph_mode(self) -> CUDAGraphMode:
        """The single mode that captures most."""
        return max(self.decode_mode(), self.mixed_mode(), key=lambda mode: mode.value)

    def without_piecewise(self) -> CUDAGraphMode:
        """The same, with eager launches where graphs would be piecewise."""
        return {
            CUDAGraphMode.PIECEWISE: CUDAGraphMode.NONE,
            CUDAGraphMode.FULL_AND_PIECEWISE: CUDAGraphMode.FULL_DECODE_ONLY,
        }.get(self, self)

    def valid_runtime_modes(self) -> frozenset[CUDAGraphMode]:
        """The single modes that batches can run in."""
        return frozenset({self.decode_mode(), self.mixed_mode()})


@dataclass(frozen=True)
class LoweringStep:
    """One lowering.

    Attributes:
        before, after: modes.
        reason: the sentence that tells why.
        by_backend: the support of a backend is the reason.
    """

    before: CUDAGraphMode
    after: CUDAGraphMode
    reason: str
    by_backend: bool = True

    def __str__(self) -> str:
        return f"{self.reason}; lowered to {self.after.name}"


@dataclass(frozen=True)
class ModeDecision:
    """What was asked for, what holds, and why they differ.

    Attributes:
        requested, final: modes.
        steps: lowerings in order; empty = it holds as requested.
        culprit: the first backend with the lowest support, where that support made the difference; else None.
        culprit_support: its level.
        culprit_layers: names of its layers, as far as they were given.
    """

    requested: CUDAGraphMode
    final: CUDAGraphMode
    steps: tuple[LoweringStep, ...] = ()
    culprit: str | None = None
    culprit_support: AttentionCGSupport | None = None
    culprit_layers: tuple[str, ...] = ()

    @property
    def lowered(self) -> bool:
        """Whether less is captured than was asked for, or something else."""
        return self.final is not self.requested

    def __str__(self) -> str:
        if not self.steps:
            return f"cudagraph_mode {self.final.name}, as requested"
        return "\n".join(
            [f"cudagraph_mode {self.requested.name} became {self.final.name}:", *map(str, self.steps)]
        )
