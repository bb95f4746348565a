"""Writes the generated pages of docs/ and parts of pages, or says which of them are stale.

python -m tools.docs            write them
python -m tools.docs --check    exit 1 and name the stale ones (part of `make check`)

Both exit 1 where a built-in backend has no page of its own, or the page lacks a section.
"""

from __future__ import annotations

import sys
from pathlib import Path

from omni_attn.backends.registry import DiffusionAttentionBackendEnum
from omni_attn.overview import backends_markdown, built_in_facts
from tools.backend_pages import PageError, backend_pages, with_links
from tools.import_picture import import_picture
from tools.parallel_plan import PlanError, with_generated

DOCS = Path(__file__).resolve().parent.parent / "docs"

BACKENDS_HEAD = """\
# Backends

Written by `make docs` from the facts of each backend, the same ones that selection judges: `omni-attn backends`
prints these tables, `omni-attn doctor` says which backend this machine can run and why the others cannot. Each name
leads to a page on how to install it, what it refuses, and how exact it is.

"""


def pages() -> dict[Path, str]:
    """Every page with a generated part, and what belongs in it.

    Raises:
        PageError, PlanError: a page that has to be written by hand is missing or incomplete.
    """
    ranks = DOCS / "sequence_parallel.md"
    listed = built_in_facts()
    families = {
        (backend.name, variant.name)
        for backend in listed
        if backend.family
        for variant in backend.facts.variants
    }
    matrix = with_links(backends_markdown(listed), DiffusionAttentionBackendEnum.__members__, families)
    return {
        DOCS / "backends.md": BACKENDS_HEAD + matrix,
        DOCS / "imports.svg": import_picture(DOCS.parent / "pyproject.toml"),
        ranks: with_generated(ranks.read_text(encoding="utf-8")),
        **backend_pages(DOCS),
    }


def main() -> int:
    """Writes or checks the pages; the exit status."""
    try:
        wanted = pages()
    except (PageError, PlanError) as error:
        print(error, file=sys.stderr)
        return 1
    stale = [
        (page, text)
        for page, text in wanted.items()
        if not page.is_file() or page.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        for page, _ in stale:
            print(f"{page.relative_to(DOCS.parent)} is stale: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for page, text in stale:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
