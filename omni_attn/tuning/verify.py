"""The conformance class on every usable backend and variant of this machine, with their real kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import SkipTest

import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.registry import load_backend
from omni_attn.config import AttentionSpec
from omni_attn.errors import BackendImportError
from omni_attn.facts import AttentionRequest, DeviceInfo, KernelFacts
from omni_attn.models.runtime import Progress, no_progress
from omni_attn.plain import to_plain
from omni_attn.platforms import OmniPlatform, current_omni_platform
from omni_attn.testing.conformance import BackendConformance, conformance_tests, run_conformance
from omni_attn.testing.harness import allowed_error
from omni_attn.tuning.candidates import candidates_for, every_spec, facts_of

# The first pair that a kernel takes is what it is verified with: what diffusion models use most, then the others.
HEAD_SIZES = (128, 64, 256, 96, 192, 80, 72, 32, 16, 8)
DTYPES = {"cpu": ("float32", "bfloat16", "float16", "float64")}
ACCELERATOR_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Verification:
    """One backend or variant.

    Attributes:
        dtype, head_size, allowed: what it was verified with, and the largest deviation from float64 allowed.
        passed, skipped: names of tests; failed: test -> what was wrong.
        raised: those of failed that ended in an exception, not in a wrong result.
        reasons: why it was not verified; empty where it was.
    """

    backend: str
    variant: str | None
    dtype: str | None = None
    head_size: int | None = None
    allowed: float | None = None
    passed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    failed: dict[str, str]
    raised: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def result(self) -> Literal["right", "wrong", "failed", "not verified"]:
        """In one word; failed where it raised, and gave no wrong result beside that."""
        if self.reasons:
            return "not verified"
        if not self.failed:
            return "right"
        return "failed" if len(self.raised) == len(self.failed) else "wrong"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain: dict[str, Any] = to_plain(self)
        return {**plain, "result": self.result}


class _OnThisMachine(BackendConformance):
    """The suite of one kernel of this machine."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        variant: str | None,
        machine: DeviceInfo,
        device: str,
        dtype: str,
        head_size: int,
    ) -> None:
        self._backend = backend
        self.variant, self.machine, self.device = variant, machine, device
        self.dtype, self.head_size = getattr(torch, dtype), head_size

    def get_backend(self) -> type[AttentionBackend]:
        return self._backend

    def construct(self) -> None:
        """Constructs one impl, which imports the optional package.

        Raises:
            BackendImportError: it is missing or broken.
        """
        self._backend.get_impl_cls()(
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_size=self.head_size,
            softmax_scale=self.head_size**-0.5,
            variant=self.variant,
        )


def verify(
    platform: OmniPlatform | None = None, *, progress: Progress = no_progress
) -> Iterator[Verification]:
    """The outcome of every registered backend and variant, as they come.

    Args:
        platform: of a device of this machine; None = its best accelerator, else its CPU.
    """
    platform = platform or current_omni_platform()
    device = torch_device(platform.device)
    lost: str | None = None
    for spec in every_spec(platform):
        if lost is not None:
            yield _not_verified(spec, (f"not run: the device is in an error state since {lost}",))
            continue
        yield _verified(spec, platform, device, progress)
        if _device_error(device):  # sticky: each later call would fail, and not for a reason of its own
            lost = spec.backend if spec.variant is None else f"{spec.backend} ({spec.variant})"


def torch_device(device: DeviceInfo) -> str:
    """What torch calls a device of this machine."""
    return "cuda" if device.kind == "rocm" else device.kind


def _verified(spec: AttentionSpec, platform: OmniPlatform, device: str, progress: Progress) -> Verification:
    answers = {pair: _reasons(spec, platform, *pair) for pair in _pairs(spec, platform)}
    pair = next((pair for pair, reasons in answers.items() if not reasons), None)
    if pair is None:
        return _not_verified(spec, next(iter(answers.values())))
    backend = load_backend(platform.class_path(spec.backend), spec.backend)
    # One that selects tiles of a video is held against dense attention with all of them selected.
    sparse = backend.facts.needs_video_grid
    if backend.facts.numerics == "approximate" and backend.facts.error is None and not sparse:
        why = "approximate, and its facts document no error: there is no number to hold it against"
        return _not_verified(spec, (why,))
    suite = _OnThisMachine(backend, spec.variant, platform.device, device, *pair)
    try:
        suite.construct()
    except BackendImportError as error:
        return _not_verified(spec, (str(error),))
    label = spec.backend if spec.variant is None else f"{spec.backend} ({spec.variant})"
    outcomes: Iterable[tuple[str, Exception | None]] = progress(
        run_conformance(suite), len(conformance_tests(suite)), label
    )
    passed: list[str] = []
    skipped: list[str] = []
    failed: dict[str, str] = {}
    errors: list[str] = []
    for name, raised in outcomes:
        if raised is None:
            passed.append(name)
        elif isinstance(raised, SkipTest):
            skipped.append(name)
        else:
            failed[name] = _text(raised)
            if not isinstance(raised, AssertionError):
                errors.append(name)
    return Verification(
        backend=spec.backend,
        variant=spec.variant,
        dtype=pair[0],
        head_size=pair[1],
        allowed=allowed_error(backend.facts, suite.dtype),
        passed=tuple(passed),
        skipped=tuple(skipped),
        failed=failed,
        raised=tuple(errors),
    )


def _pairs(spec: AttentionSpec, platform: OmniPlatform) -> list[tuple[str, int]]:
    """(dtype, head size) pairs that a kernel's facts take, best first; at least one, to be refused by."""
    wanted = DTYPES.get(platform.device.kind, ACCELERATOR_DTYPES)
    kernel = _kernel(spec, platform)
    if kernel is None:
        return [(wanted[0], HEAD_SIZES[0])]
    dtypes = [dtype for dtype in wanted if dtype in kernel.dtypes] or [wanted[0]]
    sizes = [size for size in HEAD_SIZES if size in kernel.head_sizes] or [HEAD_SIZES[0]]
    return [(dtype, size) for dtype in dtypes for size in sizes]


def _kernel(spec: AttentionSpec, platform: OmniPlatform) -> KernelFacts | None:
    facts = facts_of(spec.backend, platform)
    if facts is None:
        return None
    return next((variant.facts for variant in facts.variants if variant.name == spec.variant), facts)


def _reasons(spec: AttentionSpec, platform: OmniPlatform, dtype: str, head_size: int) -> tuple[str, ...]:
    request = AttentionRequest(
        role="verify",
        num_heads=_OnThisMachine.heads,
        head_size=head_size,
        dtype=dtype,
        video_grid=True,
    )
    (candidate,) = candidates_for(request, platform, (spec,))
    return candidate.verdict.reasons


def _not_verified(spec: AttentionSpec, reasons: tuple[str, ...]) -> Verification:
    return Verification(backend=spec.backend, variant=spec.variant, failed={}, reasons=reasons)


def _text(error: Exception) -> str:
    """An assertion's text says what differs; of anything else the kind matters too."""
    text = (str(error).strip() or "no text").splitlines()[0]
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"


def _device_error(device: str) -> bool:
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
