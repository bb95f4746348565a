"""`omni-attn explain`: what every attention role would run, and every candidate's verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from omni_attn.cli.options import AsJson, Overrides, PipelineFile
from omni_attn.cli.target import Assume, Cudnn, Packages, target_platform

if TYPE_CHECKING:
    from pathlib import Path

    from omni_attn.config import ParallelConfig
    from omni_attn.explain import PipelineExplanation, RoleExplanation

COLUMNS = ("role", "category", "layers", "source", "backend", "verdict", "reason")


def explain(
    pipeline: PipelineFile,
    overrides: Overrides,
    assume: Assume = None,
    packages: Packages = None,
    cudnn: Cudnn = None,
    as_json: AsJson = False,
) -> None:
    """Show what every attention role would run, and why, on this machine or on an assumed one. Builds no weights."""
    from omni_attn.cli.console import print_json, print_line, print_table, warn
    from omni_attn.config import load_pipeline
    from omni_attn.explain import explain_pipeline

    config = load_pipeline(pipeline, overrides=overrides)
    explanation = explain_pipeline(config, target_platform(config, assume, packages, cudnn))
    if as_json:
        print_json(explanation.to_dict())
    else:
        print_line(
            f"{config.pipeline} {config.model} on {device_line(explanation, assumed=assume is not None)}"
        )
        if explanation.ranks is None:
            print_table(COLUMNS, map(verdict_rows, explanation.roles), details=("reason",))
        else:
            print_line(ranks_line(explanation.ranks, pipeline, overrides))
            columns, details = (*COLUMNS[:-1], "parallel", COLUMNS[-1]), ("parallel", "reason")
            print_table(columns, map(verdict_rows_among_ranks, explanation.roles), details=details)
        for role in explanation.roles:
            if role.cache_line is not None:
                print_line(role.cache_line)
    for path, text in explanation.unmatched.items():
        warn(f"{path}: {text}")
    for note in explanation.notes:
        warn(note)
    explanation.raise_if_refused()


def device_line(explanation: PipelineExplanation, *, assumed: bool) -> str:
    """The device, the dtype and the packages that count, in one line."""
    device = explanation.device
    packages = ", ".join(f"{name} {version}" for name, version in device.packages.items()) or "none"
    kind = "assumed" if assumed else device.product
    name = f"{device.name} ({kind})" if kind else device.name
    return f"{name}, {explanation.dtype}; kernel packages: {packages}"


def ranks_line(ranks: ParallelConfig, pipeline: Path, overrides: Iterable[str]) -> str:
    """Over how many processes the sequence is split, and how to start them."""
    from omni_attn.parallel.connection import torchrun_command

    options = [word for override in overrides for word in ("--set", override)]
    start = torchrun_command(ranks.size, ["omni-attn", "run", str(pipeline), *options])
    return f"{ranks.describe()}: {ranks.size} processes, started by `{start}`"


def verdict_rows_among_ranks(role: RoleExplanation) -> Iterator[tuple[str, ...]]:
    """verdict_rows with what the ranks do before the reason, in the first row."""
    for number, (*cells, reason) in enumerate(verdict_rows(role)):
        yield *cells, ("" if number else role.parallel or "refused"), reason


def verdict_rows(role: RoleExplanation) -> Iterator[tuple[str, ...]]:
    """One row per candidate; the first one also names the role."""
    request = role.request
    head = (request.role, request.role_category or "-", str(role.layers), role.source)
    for number, verdict in enumerate(role.verdicts):
        word = "selected" if verdict is role.chosen else "accepted" if verdict.accepted else "rejected"
        yield (*(head if number == 0 else ("",) * len(head)), verdict.label, word, "; ".join(verdict.reasons))
