"""The `omni-attn` command: one file per command, over functions that a library user can call as well.

The command files import torch, pydantic and the models inside their functions, so that `--help` answers at
once. `explain`, `overview` and `plain` beside this package hold what the commands print.
"""

from __future__ import annotations

import warnings

from omni_attn.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of `omni-attn` and of `python -m omni_attn`; exits 0 if all is well, 2 on a person's mistake."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    app(prog_name="omni-attn")
