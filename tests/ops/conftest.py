"""The executors that the tests of block-sparse attention run on."""

from __future__ import annotations

import pytest

from tests.ops.executors import COARSE_STAGES, EXECUTORS, CoarseStage, ExecutorCase


@pytest.fixture(scope="session", params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> ExecutorCase:
    """Each executor, on each device that it runs on."""
    case: ExecutorCase = request.param
    return case


@pytest.fixture(scope="session", params=COARSE_STAGES)
def stage(request: pytest.FixtureRequest) -> CoarseStage:
    """Each implementation of coarse scores, selection and coarse attention."""
    chosen: CoarseStage = request.param
    return chosen
