"""Bar charts of what was measured, one panel per shape."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_attn.errors import ConfigError
from omni_attn.models.runtime import import_extra
from omni_attn.tuning.bench import ShapeResults
from omni_attn.tuning.measure import Result

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = {"exact": "#4f46e5", "quantised": "#f59e0b", "approximate": "#0d9488"}
BROKEN_COLOUR = "#dc2626"
TITLE_WIDTH = 110  # characters that fit over the panels
_BAR, _HEAD = 0.32, 0.75  # inches of height


def check_plot_path(path: Path) -> None:
    """Nothing if a chart can be drawn and written there; asked before anything is measured.

    Raises:
        ConfigError: another kind of file, or no such folder.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: charts are written as {', '.join(SUFFIXES)}. Choose one of these.")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}. Create it first.")
    _agg()


def write_plot(path: Path, found: Sequence[ShapeResults], title: str) -> None:
    """Writes a chart of everything that has a time.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    figure = build_figure(found, title)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error}") from None


def build_figure(found: Sequence[ShapeResults], title: str) -> Any:
    """A matplotlib figure: per shape one bar per backend, as long as its TFLOP/s, fastest on top."""
    shown = [results for results in found if results.measured]
    heights = [_HEAD + _BAR * len(results.measured) for results in shown]
    figure = import_extra("matplotlib.figure", "Drawing a chart", extra="viz").Figure(
        figsize=(9, 0.9 + sum(heights)), layout="constrained"
    )
    _agg().FigureCanvasAgg(figure)
    figure.suptitle(textwrap.fill(title, TITLE_WIDTH), fontsize=9)
    panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights) if shown else []
    for (panel,), results in zip(panels, shown, strict=True):
        _draw(panel, results)
    return figure


def _draw(panel: Any, results: ShapeResults) -> None:
    rows = sorted(results.measured, key=_speed)
    bars = panel.barh(
        [row.label for row in rows], [_speed(row) for row in rows], color=list(map(_colour, rows))
    )
    panel.bar_label(bars, labels=[_caption(row, results) for row in rows], padding=4, fontsize=8)
    panel.set_title(f"{results.shape.name}: {results.shape}", fontsize=9, loc="left")
    panel.set_xlabel("TFLOP/s", fontsize=8)
    panel.margins(x=0.35)  # room for the captions
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _caption(row: Result, results: ShapeResults) -> str:
    words = [f"{row.milliseconds:.3g} ms", f"error {row.error:.1e}"]
    if row.label == results.default:
        words.append("default")
    if row.candidate.numerics != "exact":
        words.append(str(row.candidate.numerics))
    if row.is_broken:
        words.append("wrong numbers")
    return ", ".join(words)


def _colour(row: Result) -> str:
    return BROKEN_COLOUR if row.is_broken else COLOURS[row.candidate.numerics or "exact"]


def _speed(row: Result) -> float:
    assert row.tflops is not None
    return row.tflops


def _agg() -> Any:
    """matplotlib's canvas that needs no display."""
    return import_extra("matplotlib.backends.backend_agg", "Drawing a chart", extra="viz")
