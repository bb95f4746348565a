"""`python -m omni_attn` is the `omni-attn` command."""

from __future__ import annotations

from omni_attn.cli import main

if __name__ == "__main__":
    main()
