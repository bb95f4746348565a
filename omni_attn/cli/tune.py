"""`omni-attn tune`: measure every role of a pipeline here, and write the file with the fastest backends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omni_attn.cli.options import PipelineFile, Rounds
from omni_attn.cli.ranks import refuse_parallel
from omni_attn.errors import ConfigError

if TYPE_CHECKING:
    from omni_attn.tuning.tune import RoleTuning

COLUMNS = ("role", "layers", "backend", "ms", "TFLOP/s", "error", "peak MiB", "note")

Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The tuned pipeline file.")]
MaxError = Annotated[
    float,
    typer.Option(
        help="Largest relative error against float64 that a backend may have; exact ones have 2.3e-3."
    ),
]
Device = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="Measure on this device instead of the file's own.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")]


def tune(
    pipeline: PipelineFile,
    output: Output,
    max_error: MaxError = 5e-3,
    rounds: Rounds = 7,
    device: Device = None,
    force: Force = False,
) -> None:
    """Measure every backend on each role's real shape, and write the pipeline with the fastest ones in per_role."""
    from omni_attn.cli.console import print_line, print_table, progress
    from omni_attn.config import load_pipeline
    from omni_attn.config.yaml_document import read_text
    from omni_attn.models.runtime import resolve_device
    from omni_attn.platforms import current_omni_platform
    from omni_attn.tuning.document import check_output, tuned_document
    from omni_attn.tuning.machine import machine_line
    from omni_attn.tuning.tune import tune as measured

    if not 0 < max_error < float("inf"):
        raise ConfigError(f"--max-error {max_error:g}: needs a positive number, for example 5e-3.")
    text = read_text(pipeline)
    config = load_pipeline(pipeline, environ={})  # the file is what is tuned, whatever the environment says
    refuse_parallel(config, "tune", "Remove the section; what is tuned without it may stand beside it again.")
    check_output(output, force=force)
    place = resolve_device(config.device if device is None else device)
    platform = current_omni_platform(place)
    tuning = measured(config, platform, place, max_error=max_error, rounds=rounds, progress=progress)
    tuned = tuned_document(text, tuning)
    try:
        output.write_text(tuned, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error}") from None
    print_line(f"{machine_line(platform.device)}, {tuning.tuned_for.dtype}", style="bold")
    print_table(COLUMNS, [list(_rows(role)) for role in tuning.roles], details=("note",))
    for role, reason in tuning.unmeasured.items():
        print_line(f"note: role {role} was not measured: {reason}")
    print_line(f"Written: {output}")


def _rows(role: RoleTuning) -> Iterator[tuple[str, ...]]:
    from omni_attn.cli.bench import figures

    for call in role.calls:
        rows = sorted(call.results, key=lambda r: float("inf") if r.milliseconds is None else r.milliseconds)
        for number, result in enumerate(rows):
            head = (role.role, str(call.layers)) if number == 0 else ("", "")
            note = "chosen" if role.won(result) else ""
            if result.status != "measured":
                note = f"{result.status}: {result.reason}"
            elif result.is_broken:
                note = result.wrong_numbers
            yield (*head, result.label, *figures(result), note)
