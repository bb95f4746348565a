"""`omni-attn backends`: what every backend can do, as a matrix."""

from __future__ import annotations

from omni_attn.cli.options import AsJson

FEATURE_DETAILS = ("masks", "compile", "CUDA graph", "sequence parallel", "options")


def backends(as_json: AsJson = False) -> None:
    """Show every backend's facts: where it runs, and what it can do."""
    from omni_attn.cli.console import print_json, print_line, print_table
    from omni_attn.overview import (
        FEATURE_COLUMNS,
        PAGED_COLUMNS,
        PLACE_COLUMNS,
        backend_rows,
        backends_as_data,
        paged_rows,
        registered_facts,
    )

    facts = registered_facts()
    if as_json:
        print_json(backends_as_data(facts))
        return
    rows = backend_rows(facts)
    print_line("Where a backend runs", style="bold")
    print_table(PLACE_COLUMNS, [[row.place_cells() for row in rows]], details=PLACE_COLUMNS[2:])
    print_line("What it can do", style="bold")
    print_table(FEATURE_COLUMNS, [[row.feature_cells() for row in rows]], details=FEATURE_DETAILS)
    print_line("Over a paged KV cache", style="bold")
    print_table(PAGED_COLUMNS, [[row.paged_cells() for row in paged_rows(facts)]], details=PAGED_COLUMNS[2:])
