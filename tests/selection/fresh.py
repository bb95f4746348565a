"""Runs a program in an interpreter of its own, where nothing is imported yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_fresh(program: str, *first_on_path: Path) -> str:
    """What the program prints; it must end well, and sees `first_on_path` before all installed packages."""
    environ = {key: value for key, value in os.environ.items() if not key.endswith("_BACKEND")}
    behind = [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
    environ["PYTHONPATH"] = os.pathsep.join(map(str, (*first_on_path, ROOT, *behind)))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_metadata(folder: Path, distribution: str, version: str, entry_points: str = "") -> None:
    """What pip leaves beside an installed distribution."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)
