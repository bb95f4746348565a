"""`omni-attn run`: denoise with a pipeline YAML, then show what ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_attn.cli.options import Overrides, PipelineFile

if TYPE_CHECKING:
    from omni_attn.models.runtime import RunResult
    from omni_attn.report import ReportRow

COLUMNS = ("role", "category", "layers", "backend", "variant", "source", "reason")


def run(pipeline: PipelineFile, overrides: Overrides) -> None:
    """Run a pipeline: denoise, show what every attention role ran, write the results into the output folder."""
    from omni_attn.cli.console import progress, warn
    from omni_attn.config import load_pipeline
    from omni_attn.explain import explain_pipeline
    from omni_attn.models import get_family

    config = load_pipeline(pipeline, overrides=overrides)
    explanation = explain_pipeline(config)
    for path, text in explanation.unmatched.items():
        warn(f"{path}: {text}")
    for note in explanation.notes:  # before a refusal: on another machine it is often the explanation
        warn(note)
    explanation.raise_if_refused()
    print_result(get_family(config.pipeline).run(config, progress=progress))


def print_result(result: RunResult) -> None:
    """The table of attention roles, the notes, and the files that were written."""
    from omni_attn.cli.console import print_line, print_table
    from omni_attn.report import attention_report

    print_line(f"Attention on {result.device}, {result.dtype}", style="bold")
    print_table(COLUMNS, [map(report_cells, attention_report(result.model).rows)], details=("reason",))
    for note in result.notes:
        print_line(f"note: {note}")
    print_line(f"Written into {result.output_folder}:")
    for file in result.files:
        print_line(f"  {file}")


def report_cells(row: ReportRow) -> tuple[str, ...]:
    """Cells under COLUMNS; the reason also tells of a kernel that ran in place of the selected one."""
    label = f"{row.backend} ({row.variant})" if row.variant else row.backend
    reason = row.reason if row.route == label else f"{row.reason}; ran {row.route}"
    if row.counts:  # route and reason are those of the last step
        reason += f" in the last step; {row.counts}"
    category, variant = row.role_category or "-", row.variant or "-"
    return row.role, category, str(row.layers), row.backend, variant, row.source, reason
