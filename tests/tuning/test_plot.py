"""The chart has a bar per measured backend, as long as its speed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from omni_attn.errors import ConfigError, MissingExtraError
from omni_attn.testing import fake_package
from omni_attn.tuning.bench import bench
from omni_attn.tuning.candidates import specs_named
from omni_attn.tuning.plot import COLOURS, SUFFIXES, build_figure, check_plot_path, write_plot
from omni_attn.tuning.shapes import SHAPES
from tests.selection.stubs import registered
from tests.tuning.stubs import CPU, CoarseBackend, QuickBackend, WrongBackend, cpu, pair


@pytest.fixture(scope="module")
def found() -> list:
    with registered(pair(QuickBackend), pair(CoarseBackend), pair(WrongBackend)):
        specs = specs_named(["TORCH_SDPA", "QUICK_TEST", "COARSE_TEST", "WRONG_TEST", "CUDNN_ATTN"], cpu())
        shapes = [SHAPES["tiny"], SHAPES["tiny-cross"]]
        return list(bench(shapes, cpu(), CPU, "float32", specs=specs, rounds=1))


def test_bars_are_the_speeds(found: list) -> None:
    pytest.importorskip("matplotlib", reason="needs the viz extra: pip install matplotlib")
    panels = build_figure(found, "this machine").axes
    assert len(panels) == len(found) == 2
    for panel, results in zip(panels, found, strict=True):
        bars = {
            tick.get_text(): bar.get_width()
            for tick, bar in zip(panel.get_yticklabels(), panel.patches, strict=True)
        }
        assert bars == {row.label: row.tflops for row in results.measured}
        assert len(bars) == 4 and list(bars.values()) == sorted(bars.values())
        captions = " ".join(text.get_text() for text in panel.texts)
        assert "default" in captions and "quantised" in captions and "wrong numbers" in captions
        assert results.shape.name in panel.get_title(loc="left")


def test_a_picture_with_bars(found: list, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the viz extra: pip install matplotlib")
    image = pytest.importorskip("PIL.Image", reason="needs the pipelines extra: pip install pillow")
    path = tmp_path / "chart.png"
    write_plot(path, found, "this machine")
    with image.open(path) as picture:
        assert picture.format == "PNG" and min(picture.size) > 400
        pixels = Counter(picture.convert("RGB").get_flattened_data())
    for numerics in ("exact", "quantised"):
        rgb = tuple(int(COLOURS[numerics][i : i + 2], 16) for i in (1, 3, 5))
        assert pixels[rgb] > 1000, numerics


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_paths_that_work(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the viz extra: pip install matplotlib")
    check_plot_path(tmp_path / f"chart{suffix}")


def test_paths_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chart\.jpeg: charts are written as \.png"):
        check_plot_path(tmp_path / "chart.jpeg")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_plot_path(tmp_path / "no" / "chart.png")


def test_without_matplotlib(tmp_path: Path) -> None:
    error = ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    with (
        fake_package("matplotlib.backends.backend_agg", raises=error),
        pytest.raises(MissingExtraError, match=r'needs matplotlib.*pip install "omni-attn\[viz\]"'),
    ):
        check_plot_path(tmp_path / "chart.png")
