"""Device families: each platform is a function of facts, and the facts come from torch alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_attn.backends.registry import DiffusionAttentionBackendEnum, load_backend
from omni_attn.errors import BackendImportError, ConfigError
from omni_attn.facts import DeviceCapability, DeviceInfo
from omni_attn.layer import Attention
from omni_attn.platforms import (
    CpuPlatform,
    MpsPlatform,
    MusaPlatform,
    NpuPlatform,
    OmniPlatform,
    RocmPlatform,
    XpuPlatform,
    current_omni_platform,
    family_class_paths,
    reset_device_facts,
)
from omni_attn.platforms.assumed import ASSUMED_NAMES
from omni_attn.platforms.detect import device_info, musa_facts, npu_facts, xpu_facts
from omni_attn.platforms.families import FAMILIES
from omni_attn.selector import select, use_attention_config
from omni_attn.testing import fake_device, fake_kernels, fake_package
from tests.selection.fresh import write_metadata
from tests.selection.stubs import EVERY_PACKAGE, OwnSDPABackend, ask, choose, registered

FAMILY_OF = {
    "gfx942": RocmPlatform,
    "gfx1100": RocmPlatform,
    "npu": NpuPlatform,
    "xpu": XpuPlatform,
    "pvc": XpuPlatform,
    "musa": MusaPlatform,
    "musa_22": MusaPlatform,
    "mps": MpsPlatform,
    "cpu": CpuPlatform,
}


# --- the table


@pytest.mark.parametrize(("name", "family"), FAMILY_OF.items())
def test_a_device_has_the_platform_of_its_kind(name: str, family: type[OmniPlatform]) -> None:
    assert type(current_omni_platform(fake_device(name))) is family


def test_every_kind_of_an_assumed_device_has_a_family() -> None:
    assert {fake_device(name).kind for name in ASSUMED_NAMES} == set(FAMILIES)


@pytest.mark.parametrize(("kind", "name", "path"), family_class_paths())
def test_a_class_of_a_family_is_a_backend_of_the_name_for_that_family(
    kind: str, name: str, path: str
) -> None:
    backend = load_backend(path, name)
    built_in = DiffusionAttentionBackendEnum[name].value
    assert backend.get_name() == name and path != built_in
    assert backend.facts.device_kinds == {kind}
    assert all(variant.facts.device_kinds == {kind} for variant in backend.facts.variants)
    taken = {variant.name for variant in load_backend(built_in, name).facts.variants}
    assert not taken & {variant.name for variant in backend.facts.variants}


@pytest.mark.parametrize("name", ["gfx942", "npu", "xpu", "musa"])
def test_a_runtime_registration_goes_before_the_table_of_the_family(name: str) -> None:
    platform = current_omni_platform(fake_device(name))
    own = platform.class_path("FLASH_ATTN")
    assert own == platform.class_paths["FLASH_ATTN"]
    assert platform.class_path("TORCH_SDPA") == DiffusionAttentionBackendEnum["TORCH_SDPA"].value
    with registered(("FLASH_ATTN", "omni_attn.backends.flash_attn.FlashAttentionBackend")):
        assert platform.class_path("FLASH_ATTN").endswith("flash_attn.FlashAttentionBackend")
    with registered(("TORCH_SDPA", OwnSDPABackend)):
        assert platform.class_path("FLASH_ATTN") == own
        assert platform.class_path("TORCH_SDPA").endswith("OwnSDPABackend")


@pytest.mark.parametrize("name", FAMILY_OF)
def test_equal_facts_give_equal_answers(name: str) -> None:
    """Nothing but the facts decides: neither this machine, nor what was asked before."""
    first, second = (fake_device(name, packages=EVERY_PACKAGE) for _ in range(2))
    for request in (ask(), ask(mask_usage="padding"), ask(head_size=72, dtype=None), ask(causal=True)):
        verdicts = [type(current_omni_platform(d))(d).evaluate(None, request) for d in (first, second)]
        assert verdicts[0] == verdicts[1]
        assert any(verdict.accepted for verdict in verdicts[0])


@pytest.mark.parametrize(
    ("name", "packages", "variant"),
    [
        ("gfx942", {"amd-aiter": "0.1.7"}, "aiter"),
        ("npu", {"mindiesd": "3.1.0"}, "mindiesd"),
        ("xpu", {"vllm-xpu-kernels": "0.1.16.2"}, "vllm-xpu-kernels"),
        ("musa", {"mate": "0.1.3"}, "mate"),
    ],
)
def test_a_broken_package_moves_a_default_and_stops_a_choice(
    name: str, packages: Mapping[str, str], variant: str
) -> None:
    device = fake_device(name, packages=packages)
    (package,) = load_backend(
        current_omni_platform(device).class_path("FLASH_ATTN"), "FLASH_ATTN"
    ).facts.packages
    needs: dict[str, Any] = {"role": "self", "mask_usage": "never"}
    with fake_package(package.module, raises=ImportError("undefined symbol: y")):
        with use_attention_config({}, platform=device, dtype="bfloat16"):
            layer = Attention(2, 128, **needs)
        assert layer.selection is not None and layer.selection.backend == "TORCH_SDPA"
        assert "undefined symbol: y" in layer.selection.explain()
        with (
            use_attention_config("FLASH_ATTN", platform=device, dtype="bfloat16"),
            pytest.raises(BackendImportError, match="undefined symbol: y"),
        ):
            Attention(2, 128, **needs)
    with fake_kernels("FLASH_ATTN", variant) as log, use_attention_config({}, platform=device):
        layer = Attention(2, 128, **needs, dtype="bfloat16")
        layer(*(torch.randn(1, 8, 2, 128, dtype=torch.bfloat16) for _ in range(3)))
    assert layer.selection is not None and layer.selection.label == f"FLASH_ATTN ({variant})"
    assert len(log) == 1


# --- assumed devices


def test_assumed_devices_of_musa_and_xpu() -> None:
    assert fake_device("musa").capability == (3, 1) and fake_device("musa").name == "musa"
    assert fake_device("musa_22").capability == (2, 2) and fake_device("musa_22").kind == "musa"
    assert (fake_device("pvc").kind, fake_device("xpu").kind) == ("xpu", "xpu")
    assert fake_device("npu").capability is None
    with pytest.raises(ConfigError, match="musa_XY"):
        fake_device("musa_2")


# --- what torch says


def module(**functions: Any) -> Any:
    return SimpleNamespace(**{name: lambda device, value=value: value for name, value in functions.items()})


ANY = torch.device("cpu")


def test_an_intel_gpu_is_told_by_its_architecture() -> None:
    known = {
        "get_device_name": "Intel(R) Arc(TM)",
        "get_device_properties": SimpleNamespace(driver_version="1.6"),
    }
    arc = xpu_facts(module(get_device_capability={"architecture": 21479031808}, **known), ANY)
    assert arc == {"name": "xpu", "product": "Intel(R) Arc(TM)", "driver": "1.6"}
    assert (
        xpu_facts(module(get_device_capability={"architecture": 13136561920}, **known), ANY)["name"] == "pvc"
    )


def test_a_moore_threads_gpu_is_told_by_its_capability() -> None:
    facts = musa_facts(module(get_device_capability=(3, 1), get_device_name="MTT"), ANY)
    assert facts == {"name": "musa_31", "capability": DeviceCapability(3, 1), "product": "MTT"}


def test_an_ascend_npu_is_told_by_its_name() -> None:
    assert npu_facts(module(get_device_name="Ascend910B"), ANY) == {"name": "npu", "product": "Ascend910B"}


@pytest.mark.parametrize(("read", "name"), [(npu_facts, "npu"), (xpu_facts, "xpu"), (musa_facts, "musa")])
@pytest.mark.parametrize("how", ["no function", "no device"])
def test_facts_that_cannot_be_read_are_unknown(read: Any, name: str, how: str) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("no device here")

    functions = ("get_device_capability", "get_device_name", "get_device_properties")
    source = SimpleNamespace(**dict.fromkeys(functions, fail if how == "no device" else None))
    facts = read(SimpleNamespace() if how == "no function" else source, ANY)
    assert facts.pop("name") == name
    assert set(facts.values()) == {None}
    assert not select(ask(), None, DeviceInfo(kind=name, name=name)).verdicts[0].accepted


def test_a_device_of_torch_xpu_becomes_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch knows the word "xpu" on every machine; its module is stood in for."""
    monkeypatch.setattr(torch, "xpu", module(get_device_capability={"architecture": 13136561920}))
    found = device_info("xpu")
    assert (found.kind, found.name, found.torch_version) == ("xpu", "pvc", torch.__version__)


# --- packages


def test_packages_of_every_family_are_read_and_none_is_imported(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        "amd-aiter": "aiter",
        "mindiesd": "mindiesd",
        "vllm-xpu-kernels": "vllm_xpu_kernels",
        "mate": "mate",
    }
    for distribution, imported in names.items():
        write_metadata(tmp_path, distribution, "9.9")
        (tmp_path / f"{imported}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reset_device_facts()
    try:
        packages = current_omni_platform("cpu").device.packages
        assert {name: packages[name] for name in names} == dict.fromkeys(names, "9.9")
        assert not any(map(sys.modules.get, names.values()))
    finally:
        monkeypatch.undo()
        reset_device_facts()


def test_another_project_of_a_like_name_is_no_kernel() -> None:
    device = fake_device("gfx942", packages={"aiter": "0.13.20191203"})
    assert select(ask(), None, device).backend == "TORCH_SDPA"
    assert select(
        ask(), choose({"default": {"backend": "FLASH_ATTN", "fallback": ["TORCH_SDPA"]}}), device
    ).is_fallback
