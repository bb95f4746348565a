"""Reads the facts of this machine's devices: torch for the hardware, package metadata for the rest.

No optional package is imported: a kernel package may be broken, or may load a GPU driver.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from omni_attn.backends import registry
from omni_attn.errors import ConfigError, OmniAttnError
from omni_attn.facts import DeviceCapability, DeviceInfo, PackageRequirement
from omni_attn.facts.packages import UNKNOWN_VERSION, read_build_flags
from omni_attn.platforms.assumed import PONTE_VECCHIO
from omni_attn.platforms.families import family_class_paths

# Families in order of preference, each with the torch module that knows its devices.
_ACCELERATORS = ("cuda", "npu", "xpu", "musa", "mps")
# What torch.xpu calls the Data Center GPU Max series: SYCL's intel_gpu_pvc, 12.60.7.
_PONTE_VECCHIO_ID = 13136561920


def device_info(device: str | torch.device | None = None) -> DeviceInfo:
    """Facts of a device of this machine; None = its best accelerator, else the CPU."""
    chosen = best_device() if device is None else _own_device(device)
    packages, flags = _installed_packages(tuple(_known_packages()))
    common: dict[str, Any] = {"packages": packages, "build_flags": flags, "torch_version": torch.__version__}
    if chosen.type in _READERS:
        return DeviceInfo(
            kind=chosen.type, **_READERS[chosen.type](getattr(torch, chosen.type), chosen), **common
        )
    if chosen.type != "cuda":
        kind = "cpu" if chosen.type == "meta" else chosen.type
        product = processor_name() if kind == "cpu" else None
        return DeviceInfo(kind=kind, name=kind, product=product, **common)
    properties = torch.cuda.get_device_properties(chosen)
    if torch.version.hip:
        architecture = properties.gcnArchName.split(":")[0]
        return DeviceInfo(
            kind="rocm", name=architecture, product=properties.name, driver=torch.version.hip, **common
        )
    capability = DeviceCapability(properties.major, properties.minor)
    return DeviceInfo(
        kind="cuda",
        name=f"sm_{capability.major}{capability.minor}",
        capability=capability,
        cudnn=torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        driver=_nvidia_driver(),
        product=properties.name,
        **common,
    )


def npu_facts(npu: Any, device: torch.device) -> dict[str, Any]:
    """Facts of an Ascend NPU from torch_npu's `torch.npu`."""
    return {"name": "npu", "product": _asked(npu, "get_device_name", device)}


def xpu_facts(xpu: Any, device: torch.device) -> dict[str, Any]:
    """Facts of an Intel GPU from `torch.xpu`; kernels tell one architecture apart from the others."""
    architecture = (_asked(xpu, "get_device_capability", device) or {}).get("architecture")
    driver = getattr(_asked(xpu, "get_device_properties", device), "driver_version", None)
    return {
        "name": PONTE_VECCHIO if architecture == _PONTE_VECCHIO_ID else "xpu",
        "product": _asked(xpu, "get_device_name", device),
        "driver": driver,
    }


def musa_facts(musa: Any, device: torch.device) -> dict[str, Any]:
    """Facts of a Moore Threads GPU from torch_musa's `torch.musa`."""
    found = _asked(musa, "get_device_capability", device)
    return {
        "name": f"musa_{found[0]}{found[1]}" if found else "musa",
        "capability": DeviceCapability(found[0], found[1]) if found else None,
        "product": _asked(musa, "get_device_name", device),
    }


_READERS: dict[str, Callable[[Any, torch.device], dict[str, Any]]] = {
    "npu": npu_facts,
    "xpu": xpu_facts,
    "musa": musa_facts,
}


def _asked(module: Any, function: str, device: torch.device) -> Any:
    """What a function of a family's torch module says about a device; None where it says nothing.

    These modules come from plug-ins of many versions: a fact that cannot be read is unknown, and no reason to stop.
    """
    try:
        return getattr(module, function)(device)
    except (AttributeError, RuntimeError, AssertionError):
        return None


def _own_device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"device {device!r}: torch knows no such device: {str(error).splitlines()[0]}"
        ) from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {str(device)!r}: torch {torch.__version__} finds {torch.cuda.device_count()} CUDA devices here; "
            "name one that is there, or 'cpu'"
        )
    return chosen


def best_device() -> torch.device:
    """The first accelerator family that has a device here, else the CPU."""
    for kind in _ACCELERATORS:
        module = torch.backends.mps if kind == "mps" else getattr(torch, kind, None)
        if module is not None and module.is_available():
            return torch.device(kind)
    return torch.device("cpu")


def _installed_packages(
    packages: tuple[PackageRequirement, ...],
) -> tuple[dict[str, str], dict[str, frozenset[str]]]:
    """Versions and published build flags of those packages that are installed.

    A module on the path without metadata (a source checkout) counts for the first distribution that ships it, at
    UNKNOWN_VERSION.
    """
    versions = {p.distribution: found for p in packages if (found := _metadata_version(p.distribution))}
    provided = {p.module for p in packages if p.distribution in versions}
    for package in packages:
        if package.module not in provided and _has_code(package.module):
            versions[package.distribution] = UNKNOWN_VERSION
            provided.add(package.module)
    flags = {
        p.distribution: on
        for p in packages
        if p.distribution in versions
        and p.config_module
        and (on := read_build_flags(p.config_module)) is not None
    }
    return versions, flags


def _has_code(module: str) -> bool:
    """True for a top-level module on the path; a folder without code of its own is none."""
    spec = None if "." in module else PathFinder.find_spec(module)
    return spec is not None and spec.origin is not None


def _metadata_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _known_packages() -> Iterator[PackageRequirement]:
    """Each package that a registered backend, or a family's own class for one, names in its facts."""
    paths = [
        (name, registry.runtime_path(name) or registry.default_path(name))
        for name in registry.registered_names()
    ]
    paths += [(name, path) for _, name, path in family_class_paths()]
    seen = set()
    for name, path in paths:
        try:
            facts = registry.load_backend(path, name).facts
        except OmniAttnError:
            continue  # a broken plug-in must not hide the machine's facts; selecting it gives its own error
        for kernel in (facts, *(variant.facts for variant in facts.variants)):
            for package in kernel.packages:
                if package not in seen:
                    seen.add(package)
                    yield package


@functools.cache
def processor_name() -> str | None:
    """The CPU's model name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or None


@functools.cache
def _nvidia_driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)
