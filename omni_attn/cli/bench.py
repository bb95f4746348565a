"""`omni-attn bench`: time, error and memory of every backend on named shapes, on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omni_attn.cli.options import AsJson, Device, Rounds
from omni_attn.errors import ConfigError

if TYPE_CHECKING:
    from omni_attn.tuning.bench import ShapeResults
    from omni_attn.tuning.measure import Result

COLUMNS = ("shape", "backend", "ms", "TFLOP/s", "error", "peak MiB", "note")

Shapes = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Named shapes; without it the large ones on a GPU and the tiny ones on a CPU. `--shapes list` shows them.",
    ),
]
Backends = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:VARIANT],...",
        help="Only these, for example TORCH_SDPA,FLASH_ATTN:fa3. Without it every registered backend and variant.",
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also draw a bar chart (.png, .svg or .pdf).")
]


def bench(
    shapes: Shapes = None,
    backends: Backends = None,
    rounds: Rounds = 7,
    device: Device = "auto",
    dtype: Dtype = "auto",
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Measure every backend on named shapes: time, TFLOP/s, error against float64, memory. Refused ones say why."""
    from omni_attn.cli.console import print_json, print_line, print_table, progress
    from omni_attn.models.runtime import resolve_device, resolve_dtype
    from omni_attn.platforms import current_omni_platform
    from omni_attn.tuning.bench import bench as measured_shapes
    from omni_attn.tuning.candidates import specs_named
    from omni_attn.tuning.clocks import method_of
    from omni_attn.tuning.machine import machine_line
    from omni_attn.tuning.plot import check_plot_path, write_plot
    from omni_attn.tuning.shapes import LARGE, SHAPES, SMALL, shapes_named

    if shapes == "list":
        print_table(("shape", "role", "what"), [[(s.name, s.role, str(s)) for s in SHAPES.values()]])
        return
    place = resolve_device(device)
    platform = current_omni_platform(place)
    used_dtype = resolve_dtype(dtype, place.type)
    usual = LARGE if place.type == "cuda" else SMALL
    chosen = shapes_named(usual if shapes is None else _words("--shapes", shapes))
    specs = None if backends is None else specs_named(_words("--backends", backends), platform)
    if plot is not None:
        check_plot_path(plot)
    title = f"{machine_line(platform.device)}, {used_dtype}"
    found = list(
        measured_shapes(chosen, platform, place, used_dtype, specs=specs, rounds=rounds, progress=progress)
    )
    if as_json:
        print_json(
            {
                "machine": title,
                "dtype": used_dtype,
                "rounds": rounds,
                "timing": method_of(place),
                "shapes": [results.to_dict() for results in found],
            }
        )
    else:
        print_line(title, style="bold")
        how_many = "1 round" if rounds == 1 else f"{rounds} alternating rounds, medians"
        print_line(f"{how_many}; {method_of(place)}")
        print_table(COLUMNS, [list(_rows(results)) for results in found], details=("note",))
    if not any(results.measured for results in found):
        unwritten = "" if plot is None else f" {plot} was not written."
        raise ConfigError(
            "nothing was measured: no backend could run any of these shapes; the notes above say why."
            + unwritten
        )
    if plot is not None:
        write_plot(plot, found, title)
        if not as_json:
            print_line(f"Written: {plot}")


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"{option} {text!r}: names nothing. Write names with commas between them.")
    return words


def _rows(results: ShapeResults) -> Iterator[tuple[str, ...]]:
    """Measured ones first, fastest on top; then the others in their order."""
    rest = [result for result in results.results if result not in results.measured]
    ordered = [*sorted(results.measured, key=lambda result: result.milliseconds or 0.0), *rest]
    for number, result in enumerate(ordered):
        yield (
            results.shape.name if number == 0 else "",
            result.label,
            *figures(result),
            _note(result, results),
        )


def figures(result: Result) -> tuple[str, str, str, str]:
    """ms, TFLOP/s, error and peak MiB of a result, "-" for what there is not."""
    return (
        "-" if result.milliseconds is None else f"{result.milliseconds:.3f}",
        "-" if result.tflops is None else f"{result.tflops:.4g}",
        "-" if result.error is None else f"{result.error:.2e}",
        "-" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.1f}",
    )


def _note(result: Result, results: ShapeResults) -> str:
    words = []
    if result.label == results.default:
        ratio = results.default_ratio
        words.append("default" if ratio is None else f"default, {ratio:.3f} of the fastest exact one")
    if result.candidate.numerics not in ("exact", None):
        words.append(str(result.candidate.numerics))
    if result.route is not None:
        words.append(f"ran as {result.route}")
    if result.is_broken:
        words.append(result.wrong_numbers)
    if result.status != "measured":
        words.append(f"{result.status}: {result.reason}")
    return "; ".join(words)
