"""What holds for every test.

Kernel packages that this machine happens to have are out of sight, except for tests that want the GPU.
"""

from __future__ import annotations

import sys
from functools import cache

import pytest
from hypothesis import HealthCheck, settings

from omni_attn.backends import sparse_executors
from omni_attn.backends.registry import DiffusionAttentionBackendEnum, load_backend

# A busy machine is no failure: examples have no time limit.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@cache
def kernel_modules() -> frozenset[str]:
    """Modules of all packages that a built-in backend names; not Triton, which torch.compile itself looks at."""
    backends = [load_backend(member.value, member.name) for member in DiffusionAttentionBackendEnum]
    kernels = [k for b in backends for k in (b.facts, *(variant.facts for variant in b.facts.variants))]
    return frozenset(package.module for kernel in kernels for package in kernel.packages) - {"triton"}


@pytest.fixture(autouse=True)
def _no_real_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        for module in kernel_modules():
            monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture(autouse=True)
def _own_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps one executor of each kind, with the kernels, or stand-ins, of whoever asked first."""
    monkeypatch.setattr(sparse_executors, "_made", {})
