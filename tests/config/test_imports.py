"""The configuration is light: a fresh interpreter proves what importing it does not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import omni_attn.config
from omni_attn.config import load_pipeline
load_pipeline({"pipeline": "wan", "model": "wan-tiny", "attention": "VSA"}, environ={})
ours = {name.split(".")[1] for name in sys.modules if name.startswith("omni_attn.")}
print("torch" in sys.modules, "numpy" in sys.modules, sorted(ours))
"""


def test_config_loads_no_torch_and_no_other_part() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "False False ['config', 'errors', 'frozen']"
