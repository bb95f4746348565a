"""Where Triton's kernels run in this process: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

#: A process decides that once, see test_interpreted.py.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = INTERPRETED or torch.cuda.is_available()
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
needs_triton = pytest.mark.skipif(
    not HERE, reason="needs a GPU, or TRITON_INTERPRET=1 for Triton's interpreter"
)
_LACKING = "needs Triton, which has no package for this platform" if find_spec("triton") is None else ""
#: For a test that calls `interpret` on its own file.
in_another_process = pytest.mark.skipif(
    HERE or bool(_LACKING), reason=_LACKING or "the tests of this file run in this process"
)


def interpret(file: str) -> None:
    """Runs the tests of a file in Triton's interpreter, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0 and "passed" in run.stdout, run.stdout[-3000:] + run.stderr[-1000:]
