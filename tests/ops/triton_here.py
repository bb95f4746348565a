"""Where Triton's kernels run in this process: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

#: A process decides that once, see test_interpreted.py.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = INTERPRETED or torch.cuda.is_available()
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
needs_triton = pytest.mark.skipif(
    not HERE, reason="needs a GPU, or TRITON_INTERPRET=1 for Triton's interpreter"
)
