"""Skips what this machine's facts refuse, before a test starts on it."""

from __future__ import annotations

import pytest

from tests.gpu.machine import Kernel


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """The kernel of a parametrised test."""
    chosen: Kernel = request.param
    if reasons := chosen.why_not():
        pytest.skip(f"{chosen}: {'; '.join(reasons)}")
    return chosen
