"""Arguments and options that several commands share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omni_attn.errors import ConfigError


def folder_problem(path: Path) -> str | None:
    """What is wrong with a path that should be a file and is a folder."""
    return f"{path}: is a folder; name a file" if path.is_dir() else None


def _file(path: Path) -> Path:
    if problem := folder_problem(path):
        raise ConfigError(problem)
    return path


PipelineFile = Annotated[
    Path, typer.Argument(metavar="PIPELINE.yaml", help="The pipeline file.", callback=_file)
]

Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace one key of the file, as in attention.default=TORCH_SDPA. Repeatable.",
        default_factory=list,
        show_default=False,
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]

Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:<index> or mps.")]

Rounds = Annotated[
    int, typer.Option(min=1, help="Rounds in which the candidates alternate; the median of each counts.")
]
