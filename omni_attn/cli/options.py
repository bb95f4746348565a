"""Arguments and options that several commands share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PipelineFile = Annotated[Path, typer.Argument(metavar="PIPELINE.yaml", help="The pipeline file.")]

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
