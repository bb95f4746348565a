"""What README and CONTRIBUTING show is run, and each backend has a page whose facts are those of selection."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import SkipTest

import pytest
import torch
from typer.testing import CliRunner

from omni_attn.backends.registry import DiffusionAttentionBackendEnum
from omni_attn.cli.app import app
from omni_attn.facts import AttentionRequest, FullAttentionSpec
from omni_attn.models.minimax_h3 import MINIMAX_H3_PRESETS, MiniMaxH3Model
from omni_attn.platforms import current_omni_platform
from omni_attn.testing import BackendConformance, fake_device
from omni_attn.testing.conformance import run_conformance
from tools import docs
from tools.backend_pages import END, OTHER_FAMILIES, START, PageError, backend_pages, page_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Contents of the fenced code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_readme_example_of_a_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks(README, "python")
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "torch.Size([1, 16, 256])" in printed and "TORCH_SDPA" in printed


def test_readme_shows_what_explain_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, _ = blocks(README, "yaml")
    (tmp_path / "wan.yaml").write_text(pipeline, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command, shown = re.search(
        r"```\n\$ omni-attn (explain[^\n]*)\n(.*?)```", README, flags=re.DOTALL
    ).groups()  # type: ignore[union-attr]
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert [line.rstrip() for line in result.stdout.strip().splitlines()] == shown.strip().splitlines()


def test_readme_example_of_sparse_attention_is_selected(tmp_path: Path) -> None:
    _, attention = blocks(README, "yaml")
    (tmp_path / "wan.yaml").write_text(f"pipeline: wan\nmodel: wan-tiny\n{attention}", encoding="utf-8")
    command = ["explain", str(tmp_path / "wan.yaml"), "--json", "--assume"]
    for device, variant in (("cpu", "torch"), ("sm_90", "triton"), ("gfx942", "triton")):
        result = CliRunner().invoke(app, [*command, device, "--packages", "triton=3.6"])
        assert result.exit_code == 0, result.output
        assert f'"FASTVIDEO_VSA ({variant})"' in result.stdout or f'"variant": "{variant}"' in result.stdout


def test_pages_of_models_show_pipelines_that_explain(tmp_path: Path) -> None:
    pages = sorted((ROOT / "docs").glob("*.md"))
    shown = [text for page in pages for text in blocks(page.read_text(encoding="utf-8"), "yaml")]
    pipelines = [text for text in shown if text.startswith("pipeline:")]
    assert pipelines
    for text in pipelines:
        (tmp_path / "pipeline.yaml").write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, ["explain", str(tmp_path / "pipeline.yaml"), "--assume", "cpu"])
        assert result.exit_code == 0, result.output


def test_the_page_of_minimax_h3_shows_references_that_run() -> None:
    page = (ROOT / "docs" / "minimax_h3.md").read_text(encoding="utf-8")
    (example,) = (text for text in blocks(page, "python") if "pack_ref2va" in text)
    for large, small in (("(37, 48, 84), 207", "(2, 4, 8), 3"), ("(48, 84)", "(4, 8)")):
        assert large in example
        example = example.replace(large, small)
    config = MINIMAX_H3_PRESETS["minimax-h3-tiny"].transformer
    given = {
        "model": MiniMaxH3Model(replace(config, num_layers=1)),
        "prompt_embeds": torch.zeros(1, 5, config.text_dim),
        "picture": torch.zeros(1, 24, 1, 4, 8),
    }
    exec(example, given)
    assert given["video"].shape == (1, 24, 2, 4, 8) and given["sound_rows"].shape == (1, 6, 32)


def test_the_page_of_the_kv_cache_shows_what_runs(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, modes = blocks((ROOT / "docs" / "kv_cache.md").read_text(encoding="utf-8"), "python")
    exec(compile(model, "docs/kv_cache.md", "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert "144 tokens so far, 96 of them in the cache" in printed and "TORCH_SDPA" in printed
    exec(modes, {})
    assert "CUDAGraphMode.NONE SLOW_ATTN" in capsys.readouterr().out
    assert "is not supported with SLOW_ATTN" in caplog.text


def test_matrix_leads_to_the_page_of_each_backend() -> None:
    """MindIE-SD has a variant of two backends; that of one name must not lead to the page of another."""
    matrix = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    links = set(re.findall(r"^\| \[(\w+)\]\(([^)]*)\) \| (\S+) \|", matrix, flags=re.MULTILINE))
    assert ("FLASH_ATTN", OTHER_FAMILIES, "mindiesd") in links
    assert {name for name, target, _ in links if target == OTHER_FAMILIES} == {"FLASH_ATTN"}
    assert {target for name, target, _ in links if name != "FLASH_ATTN"} == {
        page_of(name) for name in DiffusionAttentionBackendEnum.__members__ if name != "FLASH_ATTN"
    }


def test_contributed_backend_conforms() -> None:
    names: dict[str, type] = {}
    backend, conformance = blocks(CONTRIBUTING, "python")
    exec(compile(backend + conformance, "CONTRIBUTING.md", "exec"), names)
    suite = names["TestEinsum"]()
    assert isinstance(suite, BackendConformance)
    outcomes = dict(run_conformance(suite))
    assert len(outcomes) > 15
    torch.compiler.reset()
    assert {name: e for name, e in outcomes.items() if e is not None and not isinstance(e, SkipTest)} == {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of docs/ to spoil."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return Path(shutil.copytree(ROOT / "docs", tmp_path / "docs"))


def page(folder: Path, name: str = "FLASH_ATTN") -> Path:
    return folder / page_of(name)


def faults_of(folder: Path) -> str:
    with pytest.raises(PageError) as raised:
        backend_pages(folder)
    return str(raised.value)


def test_each_backend_has_a_page_with_fresh_facts() -> None:
    pages = backend_pages(ROOT / "docs")
    assert len(pages) == len(DiffusionAttentionBackendEnum)
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is stale: run `make docs`"
        assert text.count(START) == text.count(END) == 1


def test_the_matrix_leads_to_each_page_and_back() -> None:
    matrix = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    for name in DiffusionAttentionBackendEnum.__members__:
        assert matrix.count(f"]({page_of(name)})") >= 3  # the list and a row of each table
        assert "(../backends.md)" in page(ROOT / "docs", name).read_text(encoding="utf-8")


def test_a_page_without_facts_gets_them_and_its_prose_stays(folder: Path) -> None:
    fresh = page(folder).read_text(encoding="utf-8")
    prose = fresh.partition(START)[0].rstrip()
    page(folder).write_text(prose + "\n", encoding="utf-8")
    assert backend_pages(folder)[page(folder)] == fresh


def test_stale_facts_are_replaced_where_they_stand(folder: Path) -> None:
    fresh = page(folder).read_text(encoding="utf-8")
    page(folder).write_text(fresh.replace("| fa3 | fa2 |", "| fa1 |") + "A last word.\n", encoding="utf-8")
    assert backend_pages(folder)[page(folder)] == fresh + "A last word.\n"


def test_what_is_missing_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page(folder, "TORCH_SDPA").unlink()
    text = page(folder).read_text(encoding="utf-8")
    page(folder).write_text(text.replace("## Quality", "## Beauty"), encoding="utf-8")
    first, second = faults_of(folder).splitlines()
    assert first.startswith("docs/backends/torch_sdpa.md is missing: TORCH_SDPA") and "Install" in first
    assert second.startswith("docs/backends/flash_attn.md lacks the section Quality")
    monkeypatch.setattr(docs, "DOCS", folder)
    for arguments in (["docs"], ["docs", "--check"]):
        monkeypatch.setattr("sys.argv", arguments)
        assert docs.main() == 1
        assert capsys.readouterr().err == f"{first}\n{second}\n"


@pytest.mark.parametrize("lost", [START, END])
def test_a_lost_marker_is_named(folder: Path, lost: str) -> None:
    text = page(folder).read_text(encoding="utf-8")
    page(folder).write_text(text.replace(lost, ""), encoding="utf-8")
    assert "flash_attn.md needs both markers" in faults_of(folder)


def _rows_of_orders() -> dict[str, tuple[str, ...]]:
    """Family -> backend names, as the table of docs/platforms.md has them."""
    text = (ROOT / "docs" / "platforms.md").read_text(encoding="utf-8")
    table = text.partition("| family | order |")[2].partition("\n\n")[0]
    cells = [row.split(" | ") for row in table.splitlines()[2:]]
    return {row[0].removeprefix("| "): tuple(re.findall(r"[A-Z]+_[A-Z_]+", row[1])) for row in cells}


@pytest.mark.parametrize(
    ("family", "device", "packages", "keys"),
    [
        ("CUDA, compute capability 9.x", "sm_90", {"fa3-fwd": "0.0.3", "flash-attn-4": "4.0.0b36"}, 512),
        ("CUDA 9.x, else", "sm_90", {"flash-attn-4": "4.0.0b36"}, 4096),
        ("CUDA 9.x, otherwise", "sm_90", {"flash-attn-4": "4.0.0b36"}, 4095),
        ("CUDA 9.x, otherwise", "sm_90", {}, None),
        ("CUDA 10.0 and newer", "sm_120", {}, None),
        ("CUDA below 9.0", "sm_89", {}, None),
        ("ROCm", "gfx942", {}, None),
        ("NPU", "npu", {}, None),
        ("XPU", "xpu", {}, None),
        ("MUSA", "musa", {}, None),
        ("MPS", "mps", {}, None),
        ("CPU", "cpu", {}, None),
    ],
)
def test_the_orders_on_the_page_are_those_in_force(
    family: str, device: str, packages: dict[str, str], keys: int | None
) -> None:
    platform = current_omni_platform(fake_device(device, packages=packages, cudnn=91900))
    request = AttentionRequest(
        role="self",
        num_heads=12,
        head_size=128,
        dtype="bfloat16",
        mask_usage="never",
        max_seqlen_q=keys,
        max_seqlen_k=keys,
    )
    [stated] = [order for name, order in _rows_of_orders().items() if name.startswith(family)]
    assert stated == platform.default_order(request)


@pytest.mark.parametrize(
    ("family", "device"), [("CUDA", "sm_90"), ("CUDA", "sm_80"), ("ROCm", "gfx942"), ("ROCm", "musa")]
)
def test_the_orders_over_a_paged_cache_too(family: str, device: str) -> None:
    cache = FullAttentionSpec(block_size=8, num_kv_heads=12, head_size=128, dtype="bfloat16")
    request = AttentionRequest(role="self", num_heads=12, head_size=128, dtype="bfloat16", kv_cache=cache)
    rows = _rows_of_orders().items()
    [stated] = [order for name, order in rows if name.startswith(f"over a paged KV cache: {family}")]
    assert stated == current_omni_platform(fake_device(device)).default_order(request)
