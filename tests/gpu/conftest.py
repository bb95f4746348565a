"""Skips what this machine's facts refuse, before a test starts on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.machine import Kernel


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """The kernel of a parametrised test, and the grid that its records state where it needs one."""
    chosen: Kernel = request.param
    if reasons := chosen.why_not():
        pytest.skip(f"{chosen}: {'; '.join(reasons)}")
    with chosen.kernels():
        yield chosen
