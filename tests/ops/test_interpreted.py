"""Our Triton kernels on the CPU: Triton's interpreter runs the tests of their contract in a process of its own.

The interpreter is a decision of the process, made before the kernels are imported. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/ops/test_executors.py -k interpreted
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: What lies around the kernels is tested with the torch executor as well; here it only has to fit.
TESTS = [
    "tests/ops/test_block_means.py",
    "tests/ops/test_mean_topk.py",
    "tests/ops/test_executor_gradients.py",
    "tests/ops/test_executors.py",
    "tests/ops/test_video_sparse.py::test_any_grid_budget_and_gate",
    "tests/ops/test_video_sparse.py::test_published_numbers",
]


@pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton, which has no package for this platform"
)
def test_kernels_keep_the_contract_in_the_interpreter() -> None:
    arguments = ["-q", "-k", "interpreted", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, *TESTS],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
