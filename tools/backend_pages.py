"""The pages docs/backends/<name>.md: written by hand, with a table of facts at the end that is not.

A built-in backend without a page, or a page without one of the sections that people look for, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from omni_attn.backends.registry import DiffusionAttentionBackendEnum
from omni_attn.facts import KernelFacts
from omni_attn.overview import (
    FEATURE_COLUMNS,
    PAGED_COLUMNS,
    PLACE_COLUMNS,
    BackendRow,
    backend_rows,
    built_in_facts,
    paged_rows,
)

SECTIONS = ("Install", "Limits", "Quality")
START = "<!-- facts: generated -->"
END = "<!-- end of facts -->"
# Facts that a column of the matrix tells; every other yes, no or number gets a row of its own.
_IN_COLUMNS = frozenset({"causal", "gqa", "packing", "window", "lse", "backward", "cudagraph"})
# Facts that say something only where another one holds.
_ONLY_WITH: Mapping[str, Callable[[KernelFacts], bool]] = {
    "float_masks": lambda facts: "arbitrary" in facts.mask_kinds,
    "causal_unequal_lengths": lambda facts: facts.causal,
    "packed_padding": lambda facts: not facts.packing,  # which includes it
}


class PageError(Exception):
    """Pages that are missing or incomplete; one line each."""


def page_of(name: str) -> str:
    """Path of a backend's page below docs/."""
    return f"backends/{name.lower()}.md"


def backend_pages(docs: Path) -> dict[Path, str]:
    """Every built-in backend's page and what belongs in it: the hand-written text with fresh facts.

    Raises:
        PageError: pages, sections or markers that are missing.
    """
    rows, paged = backend_rows(built_in_facts()), paged_rows(built_in_facts())
    texts, faults = dict[Path, str](), list[str]()
    for name in DiffusionAttentionBackendEnum.__members__:
        path = docs / page_of(name)
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = list(_faults(name, text))
        faults += [f"docs/{page_of(name)} {fault}" for fault in found]
        if not found:
            own = ([row for row in kind if row.backend == name] for kind in (rows, paged))
            block = facts_block(*own)
            texts[path] = with_block(text, block)
    if faults:
        raise PageError("\n".join(faults))
    return texts


def _faults(name: str, text: str) -> Iterator[str]:
    if not text:
        yield (
            f"is missing: {name} is built in, so write its page by hand, with the sections {', '.join(SECTIONS)}; "
            "`make docs` adds the facts"
        )
        return
    headings = set(re.findall(r"^#+ +(.*?) *$", text, flags=re.MULTILINE))
    for section in SECTIONS:
        if section not in headings:
            yield f"lacks the section {section}: write it by hand under a heading of that name"
    if (text.count(START), text.count(END)) not in ((0, 0), (1, 1)) or text.find(END) < text.find(START):
        yield f"needs both markers once and in order, or none: {START} and {END}"


def with_block(text: str, block: str) -> str:
    """A page with its facts in place of the old ones, or behind all else where there were none."""
    if START not in text:
        return f"{text.rstrip()}\n\n{block}\n"
    before, _, rest = text.partition(START)
    return before + block + rest.partition(END)[2]


def facts_block(rows: Sequence[BackendRow], paged: Sequence[BackendRow] = ()) -> str:
    """A table with a row per fact and a column per variant, the options, and the way to the matrix.

    Args:
        paged: kernels over a paged KV cache, which get a table of their own.
    """
    columns = [row.variant or row.backend for row in rows]
    table = [["fact", *columns], ["---"] * (len(columns) + 1), *_table(rows)]
    options = sorted(rows[0].facts.option_fields)
    owned = (
        f"Options of its own: {', '.join(f'`{name}`' for name in options)}."
        if options
        else "No options of its own."
    )
    over_pages = []
    if paged:
        cells = zip(PAGED_COLUMNS, *(row.paged_cells() for row in paged), strict=True)
        lines = [
            ("over a paged cache", *(row.variant or row.backend for row in paged)),
            ("---",) * (len(paged) + 1),
            *list(cells)[2:],
        ]
        over_pages = ["", *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join(
        [
            START,
            "## Facts",
            "",
            "What selection judges, written by `make docs`; [all backends](../backends.md) side by side.",
            "",
            *(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in table),
            *over_pages,
            "",
            owned,
            END,
        ]
    )


def _table(rows: Sequence[BackendRow]) -> Iterator[list[str]]:
    for names, cells in (
        (PLACE_COLUMNS, [row.place_cells() for row in rows]),
        (FEATURE_COLUMNS, [row.feature_cells() for row in rows]),
    ):
        for line in list(zip(names, *cells, strict=True))[2:]:  # behind name and variant
            if line[0] != "options":
                yield list(line)
    for field in fields(KernelFacts):
        found = [getattr(row.kernel, field.name) for row in rows]
        if field.name not in _IN_COLUMNS and all(isinstance(value, (bool, int)) for value in found):
            yield [field.name.replace("_", " "), *(_cell(row.kernel, field.name) for row in rows)]


def _cell(facts: KernelFacts, name: str) -> str:
    value = getattr(facts, name)
    if name in _ONLY_WITH and not _ONLY_WITH[name](facts):
        return "-"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


#: The page on the classes that other device families have of a name.
OTHER_FAMILIES = "backends/flash_attn_other_devices.md"


def with_links(matrix: str, names: Iterable[str], families: Iterable[tuple[str, str]]) -> str:
    """The matrix with each backend's name as a link to its page.

    Args:
        matrix: Markdown.
        names: of the backends.
        families: (name, variant) of the classes of other device families, which share a page of their own.
    """
    for name in names:
        link = f"]({page_of(name)})"
        matrix = re.sub(
            rf"^- `{name}`(?= on \w+:)", f"- [`{name}`]({OTHER_FAMILIES})", matrix, flags=re.MULTILINE
        )
        matrix = re.sub(rf"^- `{name}`", f"- [`{name}`{link}", matrix, flags=re.MULTILINE)
        variants = "|".join(re.escape(variant) for owner, variant in families if owner == name)
        if variants:
            elsewhere = rf"^\| {name} (?=\| (?:{variants}) \|)"
            matrix = re.sub(elsewhere, f"| [{name}]({OTHER_FAMILIES}) ", matrix, flags=re.MULTILINE)
        matrix = re.sub(rf"^\| {name} \|", f"| [{name}{link} |", matrix, flags=re.MULTILINE)
    return matrix
