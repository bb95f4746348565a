"""`omni-attn doctor`: this machine, and which backends it can run."""

from __future__ import annotations

from omni_attn.cli.options import AsJson

COLUMNS = ("backend", "usable", "variant", "why not", "install")


def doctor(as_json: AsJson = False) -> None:
    """Show this machine's versions and, for every backend, whether it is usable, or exactly why not."""
    from omni_attn.cli.console import print_json, print_line, print_table
    from omni_attn.diagnosis import diagnose

    diagnosis = diagnose()
    if as_json:
        print_json(diagnosis.to_dict())
        return
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
