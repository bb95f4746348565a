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
CONTRACT = [
    "tests/ops/test_block_means.py",
    "tests/ops/test_block_summary.py",
    "tests/ops/test_mean_topk.py",
    "tests/ops/test_prefix_topk.py",
    "tests/ops/test_prefix_sparse.py",
    "tests/ops/test_executor_gradients.py",
    "tests/ops/test_executors.py",
    "tests/ops/test_video_sparse.py::test_any_grid_budget_and_gate",
    "tests/ops/test_video_sparse.py::test_published_numbers",
]
#: Files whose tests ask for a GPU or the interpreter themselves.
WHOLE = [
    "tests/ops/test_triton_rows.py",
    "tests/ops/test_triton_rowwise.py",
    "tests/models/minimax_h3/test_kernels.py",
]


@pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton, which has no package for this platform"
)
@pytest.mark.parametrize(
    "arguments", [["-k", "interpreted", *CONTRACT], WHOLE], ids=["contract", "whole files"]
)
def test_kernels_in_the_interpreter(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
