"""What is known about one device: a frozen record that selection takes as an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from packaging.utils import canonicalize_name

from omni_attn.frozen import FrozenMapping

#: Device kinds whose devices have a compute capability.
FAMILIES_WITH_CAPABILITY = frozenset({"cuda", "musa"})


class DeviceCapability(NamedTuple):
    """CUDA compute capability; compares like a tuple."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def cudnn_text(version: int) -> str:
    """A cuDNN version as people write it: "9.19.0" for torch's 91900, "8.9.2" for 8902."""
    major = 10000 if version >= 10000 else 1000
    return f"{version // major}.{version % major // 100}.{version % 100}"


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """Facts of one device, gathered once.

    Attributes:
        kind: device family: "cuda", "rocm", "cpu", "mps", "npu", "xpu", "musa". Any other text is legal and
            gets the CPU's policy.
        name: short architecture label: "sm_90", "gfx942", "musa_31", "pvc" (Intel Data Center GPU Max), "cpu".
        capability: compute capability where the family has one (cuda, musa).
        packages: distribution name (any spelling) -> version of the installed packages that a backend may need.
        build_flags: distribution name -> build flags that are switched on in the wheel, for wheels that publish them.
        torch_version: version of torch, None if unknown.
        cudnn: cuDNN version as torch reports it (91900 = 9.19.0), None if there is none.
        driver: driver version, None if unknown.
        product: marketing name, for people only.
    """

    kind: str
    name: str
    capability: DeviceCapability | None = None
    packages: Mapping[str, str] = field(default_factory=FrozenMapping)
    build_flags: Mapping[str, frozenset[str]] = field(default_factory=FrozenMapping)
    torch_version: str | None = None
    cudnn: int | None = None
    driver: str | None = None
    product: str | None = None

    def __post_init__(self) -> None:
        for name in ("packages", "build_flags"):
            by_distribution = {canonicalize_name(key): value for key, value in getattr(self, name).items()}
            object.__setattr__(self, name, FrozenMapping(by_distribution))
        if self.capability is not None:
            object.__setattr__(self, "capability", DeviceCapability(*self.capability))

    @property
    def cudnn_text(self) -> str | None:
        """The cuDNN version as people write it, "9.19.0"; None if there is none."""
        return None if self.cudnn is None else cudnn_text(self.cudnn)

    def __str__(self) -> str:
        return self.name
