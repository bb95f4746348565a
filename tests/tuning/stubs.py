"""Backends that are slow, quick, coarse, wrong or broken on purpose; they run on any device in any float dtype."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.torch_sdpa import TorchSDPABackend, TorchSDPAImpl
from omni_attn.config import AttentionSpec
from omni_attn.errors import BackendImportError
from omni_attn.facts import BackendFacts, KernelFacts, Variant
from omni_attn.platforms import OmniPlatform, current_omni_platform
from omni_attn.tuning.candidates import candidates_for
from omni_attn.tuning.cases import Case, case_of_shape
from omni_attn.tuning.measure import Result, measure
from omni_attn.tuning.shapes import SHAPES
from tests.selection.stubs import FLOATS, PlainBackend

CPU = torch.device("cpu")


class SlowImpl(TorchSDPAImpl):
    """Right, and 20 ms late."""

    def forward(self, *arguments: Any, **layer_inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(20e-3)
        return super().forward(*arguments, **layer_inputs)


class SlowBackend(TorchSDPABackend):
    @staticmethod
    def get_name() -> str:
        return "SLOW_TEST"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        return SlowImpl


class QuickImpl(TorchSDPAImpl):
    """Remembers its first answer: faster than anything that computes one."""

    deviation: ClassVar[float] = 0.0

    def forward(self, *arguments: Any, **layer_inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "answer"):
            answer = super().forward(*arguments, **layer_inputs)
            self.answer = answer * (1 + self.deviation)
        return self.answer


class QuickBackend(TorchSDPABackend):
    @staticmethod
    def get_name() -> str:
        return "QUICK_TEST"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        return QuickImpl


class CoarseImpl(QuickImpl):
    deviation = 2e-2


class CoarseBackend(TorchSDPABackend):
    """Quick and off by two per cent, as its facts say."""

    facts = BackendFacts(dtypes=FLOATS, numerics="quantised", error="2e-2")

    @staticmethod
    def get_name() -> str:
        return "COARSE_TEST"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        return CoarseImpl


class WrongImpl(QuickImpl):
    deviation = 0.5


class WrongBackend(TorchSDPABackend):
    """Says that it is exact, and is not."""

    @staticmethod
    def get_name() -> str:
        return "WRONG_TEST"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        return WrongImpl


class NaNImpl(TorchSDPAImpl):
    def forward(self, query: torch.Tensor, *_: Any, **__: torch.Tensor) -> torch.Tensor:
        return torch.full_like(query, float("nan"))


class NaNBackend(TorchSDPABackend):
    @staticmethod
    def get_name() -> str:
        return "NAN_TEST"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        return NaNImpl


class CrashingImpl(TorchSDPAImpl):
    def forward(self, *_: Any, **__: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("illegal memory access\nsecond line")


class CrashingBackend(TorchSDPABackend):
    @staticmethod
    def get_name() -> str:
        return "CRASHING_TEST"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        return CrashingImpl


class AbsentImpl(TorchSDPAImpl):
    def __init__(self, **geometry: Any) -> None:
        raise BackendImportError("ABSENT_TEST: module nothing is installed but broken: `pip install nothing`")


class AbsentBackend(TorchSDPABackend):
    @staticmethod
    def get_name() -> str:
        return "ABSENT_TEST"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        return AbsentImpl


_GOOD = KernelFacts(dtypes=FLOATS)
_ELSEWHERE = KernelFacts(dtypes=FLOATS, device_kinds=frozenset({"musa"}))


class VariantsBackend(PlainBackend):
    """Two variants, of which one needs another device."""

    facts = BackendFacts.of(
        _GOOD, variants=(Variant(name="here", facts=_GOOD), Variant(name="there", facts=_ELSEWHERE))
    )

    @staticmethod
    def get_name() -> str:
        return "VARIANTS_TEST"


class GuessingBackend(PlainBackend):
    """Approximate, and nobody says by how much."""

    facts = BackendFacts(dtypes=FLOATS, numerics="approximate")

    @staticmethod
    def get_name() -> str:
        return "GUESSING_TEST"


def pair(backend: type[AttentionBackend]) -> tuple[str, type[AttentionBackend]]:
    """For `registered`."""
    return backend.get_name(), backend


def cpu() -> OmniPlatform:
    return current_omni_platform("cpu")


def tiny() -> Case:
    return case_of_shape(SHAPES["tiny"], "float32")


def measured(*names: str, case: Case | None = None, **options: Any) -> dict[str, Result]:
    """Results by label, of backends by name, on the tiny shape."""
    case = case or tiny()
    candidates = candidates_for(case.request, cpu(), [AttentionSpec(backend=name) for name in names])
    results = measure(case, candidates, cpu(), CPU, **{"rounds": 3, **options})
    return {result.label: result for result in results}
