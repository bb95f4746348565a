"""`omni-attn inspect`: what a sparse attention call of a run selected, what that kept, and how fast it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omni_attn.cli.options import AsJson, Overrides, PipelineFile, Rounds
from omni_attn.cli.ranks import refuse_parallel

if TYPE_CHECKING:
    from omni_attn.inspection.figures import Figures
    from omni_attn.inspection.inspection import Inspection

Step = Annotated[int, typer.Option("--step", min=0, help="Index of the denoising step, from 0 on.")]
Layer = Annotated[
    int, typer.Option("--layer", min=0, help="Number of the layer among those of its role, from 0 on.")
]
Role = Annotated[str, typer.Option("--role", help="Role of the layer.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FOLDER",
        help="For the pictures and the figures; without it the file's own `output`.",
    ),
]


def inspect(
    pipeline: PipelineFile,
    overrides: Overrides,
    step: Step,
    layer: Layer,
    output: Output = None,
    role: Role = "self",
    rounds: Rounds = 7,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline up to a step and look at one sparse attention layer: block maps, mass kept, error, speed."""
    from omni_attn.cli.console import print_json, print_line, progress, warn
    from omni_attn.config import load_pipeline
    from omni_attn.explain import explain_pipeline
    from omni_attn.inspection.inspection import inspect_pipeline
    from omni_attn.inspection.pictures import write_pictures
    from omni_attn.inspection.target import Target
    from omni_attn.models.artifacts import create_output_folder

    config = load_pipeline(pipeline, overrides=overrides)
    refuse_parallel(config, "inspect", "Add --set parallel=null.")
    if output is not None:
        config = config.model_copy(update={"output": str(output)})
    explanation = explain_pipeline(config)
    for path, text in explanation.unmatched.items():
        warn(f"{path}: {text}")
    for note in explanation.notes:
        warn(note)
    explanation.raise_if_refused()
    found = inspect_pipeline(config, Target(step, layer, role), rounds=rounds, progress=progress)
    folder = create_output_folder(config.output)
    figures = folder / "inspection.json"
    figures.write_text(json.dumps(found.to_dict(), indent=2), encoding="utf-8")
    files = [figures, *write_pictures(folder, found)]
    if as_json:
        print_json({**found.to_dict(), "files": [str(file) for file in files]})
        return
    print_inspection(found)
    print_line(f"Written into {folder}: {', '.join(file.name for file in files[:3])}, and a map of each head")


def print_inspection(found: Inspection) -> None:
    """What was looked at, a row for each head, and the speed."""
    from omni_attn.cli.console import print_line, print_table
    from omni_attn.inspection.pictures import call_line

    queries, keys = found.selection.query_blocks, found.selection.key_blocks
    print_line(call_line(found), style="bold")
    before = f" behind {found.before} others" if found.before else ""
    grid = "" if found.grid is None else f" (grid {' x '.join(map(str, found.grid))}{before})"
    print_line(
        f"{found.source}, route {found.route}; {found.device}, {found.dtype}; {queries.tokens} query tokens{grid} in "
        f"{queries.num_blocks} tiles, {keys.tokens} key tokens in {keys.num_blocks} tiles of up to {keys.capacity}"
    )
    columns = ["head", "tiles", "token pairs", "mass kept", "least", "in tile", "error"]
    if found.added is not None:
        columns.append(f"without {found.added}")
    columns.append("kernel")
    alone = found.added is not None
    rows = [_cells(figures, alone) for figures in found.heads]
    print_table(columns, [rows, [_cells(found.total, alone)]])
    total = found.total
    print_line(
        f"effective sparsity {100 * total.effective_sparsity:.1f} % (token pairs left out); nominal "
        f"{100 * (1 - total.tiles):.1f} % (tiles left out)"
    )
    print_line()
    print_table(("", "ms", "speed-up", "error"), [_speed_rows(found)])
    print_line(f"{found.speed.rounds} alternating rounds, medians; {found.speed.method}")
    for note in found.notes:
        print_line(f"note: {note}")


def _cells(figures: Figures, with_alone: bool) -> tuple[str, ...]:
    shares = (figures.tiles, figures.pairs, figures.mass_kept, figures.least_mass_kept)
    tiles, pairs, kept, least = (f"{100 * share:.1f} %" for share in shares)
    alone = (f"{figures.error_without_coarse:.2e}",) if with_alone else ()
    return (
        "all" if figures.head is None else str(figures.head),
        *(tiles, pairs, kept, least, str(figures.least_tile), f"{figures.error:.2e}"),
        *alone,
        f"{figures.kernel_error:.1e}",
    )


def _speed_rows(found: Inspection) -> Iterator[tuple[str, ...]]:
    speed = found.speed
    yield f"dense: {speed.dense}", f"{speed.dense_ms:.3f}", "1.00", f"{found.dense_error:.1e}"
    yield found.label, f"{speed.sparse_ms:.3f}", f"{speed.measured:.2f}", f"{found.total.error:.2e}"
    yield "predicted by counting pairs", "-", f"{speed.predicted:.2f}", "-"
