"""Draws the import direction as an SVG, from the same contract that import-linter enforces."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

LAYERS_CONTRACT = "Imports go down only"

BOX_WIDTH, BOX_HEIGHT, GAP, ROW = 132, 32, 16, 54
MARGIN = 20
STYLE = (
    "text{font:13px ui-monospace,SFMono-Regular,Menlo,monospace;fill:#1f2937}"
    "rect{fill:#eef2ff;stroke:#6366f1;stroke-width:1.2}"
    ".torchless rect{fill:#ecfdf5;stroke:#10b981}"
    "path{stroke:#6b7280;stroke-width:1.4;fill:none;marker-end:url(#tip)}"
)
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 L8 4 L0 8 z" style="fill:#6b7280;stroke:none;marker-end:none"/></marker></defs>'
)


def layers_of(pyproject: Path) -> tuple[list[list[str]], set[str]]:
    """The rows of the layers contract, top first, and the modules that a contract keeps free of torch."""
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    rows: list[list[str]] = []
    torchless: set[str] = set()
    for contract in contracts:
        if contract["name"] == LAYERS_CONTRACT:
            rows = [re.findall(r"\w+", layer) for layer in contract["layers"]]
        if "torch" in contract.get("forbidden_modules", ()):
            torchless |= {module.removeprefix("omni_attn.") for module in contract["source_modules"]}
    return rows, torchless


def import_picture(pyproject: Path) -> str:
    """SVG text: one row of boxes per layer, arrows from each row to the next, torch-free modules in green."""
    rows, torchless = layers_of(pyproject)
    widest = max(map(len, rows))
    width = 2 * MARGIN + widest * (BOX_WIDTH + GAP) - GAP
    height = 2 * MARGIN + (len(rows) - 1) * ROW + BOX_HEIGHT + 26
    middle = width / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>omni_attn: {LAYERS_CONTRACT[0].lower()}{LAYERS_CONTRACT[1:]}</title>",
        f"<style>{STYLE}</style>{TIP}",
        f'<rect width="{width}" height="{height}" style="fill:white;stroke:none"/>',
    ]
    for number, row in enumerate(rows):
        top = MARGIN + number * ROW
        left = middle - (len(row) * (BOX_WIDTH + GAP) - GAP) / 2
        for place, module in enumerate(row):
            parts.append(_box(left + place * (BOX_WIDTH + GAP), top, module, module in torchless))
        if number + 1 < len(rows):
            parts.append(f'<path d="M{middle:g} {top + BOX_HEIGHT + 3} V{top + ROW - 4}"/>')
    parts.append(
        f'<text x="{middle:g}" y="{height - 14}" text-anchor="middle">green: imports no torch</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def _box(left: float, top: float, module: str, torchless: bool) -> str:
    group = '<g class="torchless">' if torchless else "<g>"
    middle = f'x="{left + BOX_WIDTH / 2:g}" y="{top + BOX_HEIGHT / 2 + 4:g}"'
    return (
        f'{group}<rect x="{left:g}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7"/>'
        f'<text {middle} text-anchor="middle">{module}</text></g>'
    )
