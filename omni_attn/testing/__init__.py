"""For tests, ours and other people's: assumed devices, stand-in packages and kernels, and the conformance classes."""

from omni_attn.platforms.assumed import assumed_device as fake_device
from omni_attn.testing.conformance import BackendConformance
from omni_attn.testing.mla_conformance import MLABackendConformance
from omni_attn.testing.packages import fake_package
from omni_attn.testing.paged_conformance import PagedBackendConformance
from omni_attn.testing.ranks import fake_ranks
from omni_attn.testing.standins import fake_kernels

__all__ = [
    "BackendConformance",
    "MLABackendConformance",
    "PagedBackendConformance",
    "fake_device",
    "fake_kernels",
    "fake_package",
    "fake_ranks",
]
