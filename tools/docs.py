"""Writes the generated pages of docs/, or says which of them are stale.

python -m tools.docs            write them
python -m tools.docs --check    exit 1 and name the stale ones (part of `make check`)
"""

from __future__ import annotations

import sys
from pathlib import Path

from omni_attn.overview import backends_markdown, built_in_facts
from tools.import_picture import import_picture

DOCS = Path(__file__).resolve().parent.parent / "docs"

BACKENDS_HEAD = """\
# Backends

Written by `make docs` from the facts of each backend, the same ones that selection judges: `omni-attn backends`
prints these tables, `omni-attn doctor` says which backend this machine can run and why the others cannot.

"""


def pages() -> dict[Path, str]:
    """Every generated page and what belongs in it."""
    return {
        DOCS / "backends.md": BACKENDS_HEAD + backends_markdown(built_in_facts()),
        DOCS / "imports.svg": import_picture(DOCS.parent / "pyproject.toml"),
    }


def main() -> int:
    """Writes or checks the pages; the exit status."""
    stale = [
        (page, text)
        for page, text in pages().items()
        if not page.is_file() or page.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        for page, _ in stale:
            print(f"{page.relative_to(DOCS.parent)} is stale: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for page, text in stale:
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
