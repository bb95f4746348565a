"""`backends`, `doctor` and `schema`: the matrix from the facts, the health of this machine, the JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_attn.backends.registry import DiffusionAttentionBackendEnum
from omni_attn.config import PipelineConfig
from omni_attn.diagnosis import diagnose
from omni_attn.overview import PAGED_COLUMNS, backend_rows, built_in_facts, paged_rows, registered_facts
from omni_attn.platforms import current_omni_platform
from omni_attn.testing import fake_device, fake_kernels
from tests.cli.conftest import ROOT, Cli
from tests.selection.stubs import registered
from tools import docs

BUILT_IN = [member.name for member in DiffusionAttentionBackendEnum]


def test_every_kernel_over_pages_has_its_row() -> None:
    rows = paged_rows(built_in_facts())
    owners = {listed.name for listed in built_in_facts() if listed.facts.paged is not None}
    assert {row.backend for row in rows} == owners >= {"TORCH_SDPA", "TRITON_ATTN"}
    cells = {row.variant: dict(zip(PAGED_COLUMNS, row.paged_cells(), strict=True)) for row in rows}
    assert cells["invariant"]["batch invariant"] == "yes" and cells["split"]["batch invariant"] == "no"
    assert cells["split"]["page sizes"] == "any" and cells["split"]["cache dtypes"] == "the layer's, fp8_e4m3"


def test_the_command_shows_kernels_over_pages(cli: Cli) -> None:
    table = cli("backends").stdout.partition("Over a paged KV cache")[2]
    assert "invariant" in table and "sliding window" in table and "SAGE_ATTN" not in table


def test_a_backend_over_pages_alone_is_asked_about_a_paged_layer() -> None:
    device = fake_device("sm_90", packages={"triton": "3.6.0"})
    health = {found.backend: found for found in diagnose(current_omni_platform(device)).backends}
    assert health["TRITON_ATTN"].variants == ("split", "invariant") and health["TRITON_ATTN"].usable
    bare = diagnose(current_omni_platform(fake_device("sm_90", packages={}))).backends
    reasons = next(found.reasons for found in bare if found.backend == "TRITON_ATTN")
    assert "needs triton" in reasons[0] and "stateless" not in reasons[0]


def test_matrix_has_a_row_per_variant(cli: Cli) -> None:
    table = cli("backends").stdout
    for name in BUILT_IN:
        assert name in table
    assert sum("FLASH_ATTN" in line and "fa3" in line for line in table.splitlines()) == 3


def test_matrix_as_json(cli: Cli) -> None:
    data = json.loads(cli("backends", "--json").stdout)
    facts = {entry["backend"]: entry for entry in data if entry["family"] is None}
    assert list(facts) == BUILT_IN
    own = {entry["family"]: entry for entry in data if entry["backend"] == "FLASH_ATTN"}
    assert list(own) == [None, "rocm", "npu", "xpu", "musa"]
    assert own["rocm"]["architectures"] == ["gfx942", "gfx950"]
    sizes = {"allowed": None, "multiple_of": 8, "minimum": 1, "maximum": 256, "beside": []}
    assert facts["CUDNN_ATTN"]["head_sizes"] == sizes
    assert [variant["name"] for variant in facts["FLASH_ATTN"]["variants"]] == ["fa3", "fa4", "fa2"]


def test_every_class_of_a_name_has_its_rows_and_none_twice() -> None:
    rows = [(row.backend, row.variant) for row in backend_rows(built_in_facts())]
    assert len(set(rows)) == len(rows)
    variants = [variant for name, variant in rows if name == "FLASH_ATTN"]
    assert variants[-4:] == ["aiter", "mindiesd", "vllm-xpu-kernels", "mate"]
    places = {row.variant: row.place_cells()[2] for row in backend_rows(built_in_facts())}
    assert places["aiter"] == "rocm gfx942, gfx950"
    assert places["vllm-xpu-kernels"] == "xpu except pvc"


def test_a_registered_class_has_no_rows_of_other_families() -> None:
    """It holds everywhere, so a family's own class is out of play."""
    with registered(("FLASH_ATTN", "omni_attn.backends.flash_attn.FlashAttentionBackend")):
        assert [b.family for b in registered_facts() if b.name == "FLASH_ATTN"] == [None]


@pytest.mark.parametrize(
    ("device", "install"),
    [
        ("gfx942", ("pip install amd-aiter",)),
        ("npu", ("pip install mindiesd",)),
        ("xpu", ("pip install vllm-xpu-kernels",)),
        ("musa", ("pip install --no-build-isolation git+https://github.com/MooreThreads/mate",)),
        ("gfx1100", ()),
        ("pvc", ()),
        ("musa_22", ()),
        ("mps", ()),
    ],
)
def test_doctor_looks_at_the_class_of_the_family(device: str, install: tuple[str, ...]) -> None:
    health = {h.backend: h for h in diagnose(current_omni_platform(fake_device(device))).backends}
    assert not health["FLASH_ATTN"].usable and health["FLASH_ATTN"].install == install
    assert health["TORCH_SDPA"].usable


@pytest.mark.parametrize(
    ("device", "packages", "name", "variant"),
    [
        ("gfx950", {"amd-aiter": "0.1.7"}, "FLASH_ATTN", "aiter"),
        ("gfx950", {"amd-aiter": "0.1.7"}, "AITER_QUANT_ATTN", None),
        ("npu", {"mindiesd": "3.1.0"}, "FLASH_ATTN", "mindiesd"),
        ("xpu", {"vllm-xpu-kernels": "0.1.16.2"}, "FLASH_ATTN", "vllm-xpu-kernels"),
        ("musa", {"mate": "0.1.3"}, "FLASH_ATTN", "mate"),
    ],
)
def test_doctor_constructs_the_kernel_of_the_family(
    device: str, packages: dict[str, str], name: str, variant: str | None
) -> None:
    platform = current_omni_platform(fake_device(device, packages=packages))
    with fake_kernels(name, variant):
        health = {h.backend: h for h in diagnose(platform).backends}[name]
    assert health.usable and health.variants == ((variant,) if variant else ())
    broken = {h.backend: h for h in diagnose(platform).backends}[name]
    assert not broken.usable and "not installed" in broken.reasons[0]


def test_doctor_on_this_machine(cli: Cli) -> None:
    result = cli("doctor", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["versions"]["torch"].startswith("2.")
    health = {entry["backend"]: entry for entry in data["backends"]}
    assert health["TORCH_SDPA"] == {
        "backend": "TORCH_SDPA",
        "usable": True,
        "variants": [],
        "reasons": [],
        "install": [],
    }
    for entry in health.values():
        assert entry["usable"] == (not entry["reasons"])
    table = cli("doctor").stdout
    for entry in health.values():
        assert all(reason in table for reason in entry["reasons"])


def test_doctor_says_what_to_install() -> None:
    bare = {
        health.backend: health for health in diagnose(current_omni_platform(fake_device("sm_90"))).backends
    }
    flash = bare["FLASH_ATTN"]
    assert not flash.usable
    assert 'pip install "omni-attn[fa3]"' in flash.install
    assert bare["CUDNN_ATTN"].install == ()  # cuDNN comes with torch: no command brings it alone
    cpu = {health.backend: health for health in diagnose(current_omni_platform(fake_device("cpu"))).backends}
    assert cpu["FLASH_ATTN"].install == ()  # nothing to install makes a CPU a GPU


def test_doctor_finds_a_package_that_is_listed_but_does_not_import() -> None:
    device = fake_device("sm_90", packages={"fa3-fwd": "0.0.3"})
    health = {entry.backend: entry for entry in diagnose(current_omni_platform(device)).backends}[
        "FLASH_ATTN"
    ]
    assert not health.usable
    assert "fa3_fwd_interface" in health.reasons[0]


def test_schema_is_that_of_the_pipeline(cli: Cli) -> None:
    result = cli("schema")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == PipelineConfig.model_json_schema()


def test_generated_docs_are_fresh(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["docs", "--check"])
    assert docs.main() == 0, capsys.readouterr().err


def test_stale_docs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {tmp_path / path.relative_to(ROOT): text for path, text in docs.pages().items()}
    monkeypatch.setattr(docs, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(docs, "pages", lambda: pages)
    monkeypatch.setattr("sys.argv", ["docs"])
    assert docs.main() == 0
    next(iter(pages)).write_text("old", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["docs", "--check"])
    capsys.readouterr()
    assert docs.main() == 1
    assert capsys.readouterr().err == "docs/backends.md is stale: run `make docs`\n"
