"""`omni-attn run`: denoise with a pipeline YAML, then show what ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_attn.cli.options import Overrides, PipelineFile
from omni_attn.cli.ranks import is_first, one_voice, ranks_of

if TYPE_CHECKING:
    from omni_attn.config import PipelineConfig
    from omni_attn.models.runtime import RunResult
    from omni_attn.report import ReportRow

COLUMNS = ("role", "category", "layers", "backend", "variant", "source", "reason")


def run(pipeline: PipelineFile, overrides: Overrides) -> None:
    """Run a pipeline: denoise, show what every attention role ran, write the results into the output folder.

    A file with a section `parallel` runs in several processes: torchrun --nproc-per-node=2 -m omni_attn run FILE.
    """
    from omni_attn.cli.console import progress
    from omni_attn.config import load_pipeline
    from omni_attn.models import get_family
    from omni_attn.models.runtime import no_progress

    config = load_pipeline(pipeline, overrides=overrides)
    with one_voice(), ranks_of(config):
        refuse_what_cannot_run(config)
        result = get_family(config.pipeline).run(config, progress=progress if is_first() else no_progress)
        if is_first():
            print_result(result)


def refuse_what_cannot_run(config: PipelineConfig) -> None:
    """Nothing if every role can run; warnings of what a person should know, on the first process.

    Raises:
        BackendRejectedError: some role cannot; the text holds all of them.
    """
    from omni_attn.cli.console import warn
    from omni_attn.explain import explain_pipeline

    explanation = explain_pipeline(config)
    told = [f"{path}: {text}" for path, text in explanation.unmatched.items()]
    # Notes come before a refusal: on another machine they are often the explanation.
    for text in [*told, *explanation.notes] if is_first() else ():
        warn(text)
    explanation.raise_if_refused()


def print_result(result: RunResult) -> None:
    """The table of attention roles, the notes, and the files that were written."""
    from omni_attn.cli.console import print_line, print_table
    from omni_attn.report import attention_report

    print_line(f"Attention on {result.device}, {result.dtype}", style="bold")
    rows = attention_report(result.model).rows
    if any(row.parallel for row in rows):
        cells = [(*report_cells(row), row.parallel or "-") for row in rows]
        print_table((*COLUMNS, "parallel"), [cells], details=("reason", "parallel"))
    else:
        print_table(COLUMNS, [map(report_cells, rows)], details=("reason",))
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
