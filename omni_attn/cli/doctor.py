"""`omni-attn doctor`: this machine, which backends it can run, and whether their kernels are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from omni_attn.cli.options import AsJson

if TYPE_CHECKING:
    from omni_attn.tuning.verify import Verification

COLUMNS = ("backend", "usable", "variant", "why not", "install")
VERIFY_COLUMNS = (
    *("backend", "variant", "result", "passed", "failed", "skipped"),
    *("dtype", "head size", "allowed", "first failure, or why not verified"),
)
WRONG = 1

Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Also run the conformance tests on every usable kernel; exit 1 if one is wrong or fails.",
    ),
]


def doctor(verify: Verify = False, as_json: AsJson = False) -> None:
    """Show this machine's versions and, for every backend, whether it is usable, or exactly why not."""
    from omni_attn.cli.console import print_json, print_line, print_table, progress
    from omni_attn.diagnosis import diagnose

    diagnosis = diagnose()
    if not as_json:
        for name, fact in diagnosis.machine_lines():
            print_line(f"{name:<10}{fact}")
        rows = [
            (
                health.backend,
                "usable" if health.usable else "not usable",
                ", ".join(health.variants) or "-",
                "; ".join(health.reasons),
                " or ".join(health.install),
            )
            for health in diagnosis.backends
        ]
        print_table(COLUMNS, [rows], details=("why not", "install"))
    outcomes: list[Verification] = []
    if verify:
        from omni_attn.tuning.verify import verify as verified

        outcomes = list(verified(progress=progress))
    if as_json:
        found = {"verification": [outcome.to_dict() for outcome in outcomes]} if verify else {}
        print_json({**diagnosis.to_dict(), **found})
    elif verify:
        print_table(VERIFY_COLUMNS, [list(map(_cells, outcomes))], details=VERIFY_COLUMNS[-1:])
    if any(outcome.failed for outcome in outcomes):
        raise typer.Exit(WRONG)


def _cells(outcome: Verification) -> tuple[str, ...]:
    """Cells under VERIFY_COLUMNS."""
    names = (outcome.backend, outcome.variant or "-")
    if outcome.reasons:
        return (*names, outcome.result, *("-",) * 6, "; ".join(outcome.reasons))
    # Of a wrong one the first wrong result, even if another test raised before it.
    told = [name for name in outcome.failed if name not in outcome.raised] or outcome.raised
    first = f"{told[0]}: {outcome.failed[told[0]]}" if told else ""
    return (
        *names,
        outcome.result,
        *(str(len(tests)) for tests in (outcome.passed, outcome.failed, outcome.skipped)),
        *(str(outcome.dtype), str(outcome.head_size), f"{outcome.allowed:.1e}", first),
    )
