"""Which backends this machine can run, found by asking the facts and then constructing each accepted kernel."""

from __future__ import annotations

import dataclasses
import platform as python_platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import distributed

from omni_attn import __version__
from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.registry import load_backend, registered_names
from omni_attn.config import AttentionSpec
from omni_attn.errors import BackendImportError
from omni_attn.facts import (
    AttentionRequest,
    BackendFacts,
    DeviceInfo,
    FullAttentionSpec,
    KernelFacts,
    choose_variant,
    evaluate,
)
from omni_attn.plain import to_plain
from omni_attn.platforms import OmniPlatform, current_omni_platform

# A layer of which nothing is known that could speak against a backend, and everything that could speak for it.
ANY_LAYER = AttentionRequest(role="any", num_heads=None, head_size=-1, video_grid=True)
HEAD_SIZE = 128  # of the kernel that is constructed as a trial; every backend serves it
# Of the layers that a backend for paged attention alone is asked about.
ANY_CACHE = FullAttentionSpec(block_size=128, num_kv_heads=1, head_size=HEAD_SIZE, dtype="float16")
ANY_PAGED_LAYER = dataclasses.replace(ANY_LAYER, kv_cache=ANY_CACHE)


@dataclass(frozen=True)
class BackendHealth:
    """One backend on one machine: the variants that can run, or why none can and what to install."""

    backend: str
    usable: bool
    variants: tuple[str, ...]
    reasons: tuple[str, ...]
    install: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """A machine and the health of every registered backend on it."""

    device: DeviceInfo
    versions: dict[str, str]
    backends: tuple[BackendHealth, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "device": to_plain(self.device),
            "versions": self.versions,
            "backends": [to_plain(health) for health in self.backends],
        }

    def machine_lines(self) -> Iterator[tuple[str, str]]:
        """(what, fact) pairs for people."""
        device = self.device
        capability = f", compute capability {device.capability}" if device.capability else ""
        about = device.product or device.kind
        yield "device", device.name + (f" ({about})" if about != device.name else "") + capability
        yield "driver", device.driver or "none"
        yield from self.versions.items()
        packages = [f"{name} {found}" for name, found in device.packages.items()]
        yield "kernels", ", ".join(packages) or "no optional kernel package installed"


def diagnose(platform: OmniPlatform | None = None) -> Diagnosis:
    """The health of every registered backend on a platform (None = this machine's)."""
    platform = platform or current_omni_platform()
    return Diagnosis(
        device=platform.device,
        versions=_versions(platform.device),
        backends=tuple(_health(name, platform) for name in registered_names()),
    )


def _health(name: str, platform: OmniPlatform) -> BackendHealth:
    try:
        backend = load_backend(platform.class_path(name), name)
    except BackendImportError as error:
        return BackendHealth(name, False, (), (str(error),), ())
    (verdict,) = platform.evaluate(AttentionSpec(backend=name), _layer_for(backend.facts))
    if not verdict.accepted:
        return BackendHealth(
            name, False, (), verdict.reasons, _install_commands(backend.facts, platform.device)
        )
    broken: list[str] = []
    working: list[str] = []
    for variant in _accepted_variants(backend.facts, platform.device):
        try:
            _construct(backend, variant)
            working.append(variant or "")
        except BackendImportError as error:
            broken.append(str(error))
    return BackendHealth(
        name, bool(working), tuple(filter(None, working)), () if working else tuple(broken), ()
    )


def _layer_for(facts: BackendFacts) -> AttentionRequest:
    return ANY_LAYER if facts.stateless else ANY_PAGED_LAYER


def _own_facts(facts: BackendFacts) -> BackendFacts:
    return facts if facts.stateless or facts.paged is None else facts.paged


def _accepted_variants(facts: BackendFacts, device: DeviceInfo) -> list[str | None]:
    names: list[str | None] = [variant.name for variant in _own_facts(facts).variants]
    layer = _layer_for(facts)
    return [name for name in names or [None] if not choose_variant(facts, layer, device, name)[1]]


def _construct(backend: type[AttentionBackend], variant: str | None) -> None:
    """Imports the optional package of a backend by constructing one layer's kernel.

    Raises:
        BackendImportError: the package is there and broken.
    """
    geometry: dict[str, Any] = {"head_size": HEAD_SIZE, "softmax_scale": HEAD_SIZE**-0.5, "variant": variant}
    geometry |= {"num_heads": 1, "num_kv_heads": 1}
    if backend.facts.stateless:
        backend.get_impl_cls()(**geometry)
    else:
        backend.get_paged_impl_cls()(kv_cache_spec=ANY_CACHE, **geometry)


def _install_commands(facts: BackendFacts, device: DeviceInfo) -> tuple[str, ...]:
    """What would make the backend usable here; nothing where a package is not what is missing."""
    facts = _own_facts(facts)
    kernels: list[KernelFacts] = [variant.facts for variant in facts.variants] or [facts]
    commands = [
        package.install_command
        for kernel in kernels
        if not evaluate(dataclasses.replace(kernel, packages=()), ANY_LAYER, device)
        for package in kernel.packages
    ]
    return tuple(dict.fromkeys(commands))


def _versions(device: DeviceInfo) -> dict[str, str]:
    versions = {"omni-attn": __version__, "python": python_platform.python_version()}
    versions["torch"] = device.torch_version or "unknown"
    try:
        versions["triton"] = version("triton")
    except PackageNotFoundError:
        versions["triton"] = "not installed"
    versions["cudnn"] = device.cudnn_text or "none"
    versions["parallel"] = _collectives()
    return versions


def _collectives() -> str:
    """What processes that share a sequence can exchange through here, and over how many devices."""
    found = []
    if distributed.is_available() and distributed.is_nccl_available():
        version_of_nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found.append(f"nccl {version_of_nccl} over {torch.cuda.device_count()} GPUs")
    if distributed.is_available() and distributed.is_gloo_available():
        found.append("gloo on the CPU")
    return ", ".join(found) or "no collectives in this PyTorch"
