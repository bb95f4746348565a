"""Gradients of the Triton kernels, in Triton's interpreter.

A process is interpreted as a whole or not at all, so triton_gradients.py runs in one of its own. On a machine with a
GPU that file can also be named to pytest: then the kernels are compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("triton_gradients.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")
def test_the_interpreted_kernels() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    environ = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = TESTS.parents[2]
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
