"""Public faults, group G3: availability, capability and head size.

Every recipe runs over the registered names, so a backend meets them when it arrives. Waiting:
    B17   FA4, whose row opens with its variant; FlashInfer's with its backend
    B19   kernels that pad head sizes: none of the present ones does
    B22   TRTLLM_ATTN and FASTVIDEO_VSA by name
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_attn.backends.registry import DiffusionAttentionBackendEnum, registered_names
from omni_attn.errors import BackendImportError, BackendRejectedError
from omni_attn.facts import DeviceInfo, KernelFacts, PackageRequirement
from omni_attn.layer import Attention
from omni_attn.models.wan.model import WanModel
from omni_attn.ops.reference import reference_attention
from omni_attn.selector import select, use_attention_config
from omni_attn.testing import fake_device, fake_kernels, fake_package
from tests.faults.test_g1_selection import TINY
from tests.selection.fresh import run_fresh, write_metadata
from tests.selection.stubs import EVERY_PACKAGE, ask, choose, kernels_of

# --- B16 a broken package that nobody asked for stops the program

BROKEN = {
    "import": ("raise ImportError('undefined symbol: x')", "undefined symbol: x"),
    "version": ("raise RuntimeError('needs version <= y')", "needs version <= y"),
    "system": ("raise OSError('libcudart.so.11: cannot open')", "libcudart.so.11: cannot open"),
    "function": ("__version__ = '2.8.3'", "flash_attn_func"),
}
ASK_FOUR_TIMES = """
import json
import omni_attn
from omni_attn.testing import fake_device
H100 = fake_device("sm_90", packages={"flash-attn": "2.8.3"})
def build(config):
    with omni_attn.use_attention_config(config, platform=H100, dtype="bfloat16"):
        return omni_attn.Attention(2, 64, role="self", mask_usage="never")
answers = {"sdpa": build("TORCH_SDPA").selection.backend}
default = build({}).selection
answers |= {"default": default.backend, "explained": default.explain()}
try:
    build("FLASH_ATTN")
except ImportError as error:
    answers |= {"error": str(error), "type": type(error).__name__, "cause": repr(error.__cause__)}
print(json.dumps(answers))
"""


@pytest.mark.parametrize("kind", BROKEN)
def test_b16_a_broken_package_breaks_its_own_backend_only(kind: str, tmp_path: Path) -> None:
    code, quoted = BROKEN[kind]
    (tmp_path / "flash_attn.py").write_text(f"{code}\n")
    write_metadata(tmp_path, "flash-attn", "2.8.3")
    answers = json.loads(run_fresh(ASK_FOUR_TIMES, tmp_path))
    assert (answers["sdpa"], answers["default"]) == ("TORCH_SDPA", "TORCH_SDPA")
    assert "FLASH_ATTN" in answers["explained"] and quoted in answers["explained"]
    assert answers["type"] == "BackendImportError" and "FLASH_ATTN" in answers["error"]
    assert quoted in answers["error"] and answers["cause"] != "None"
    assert "not installed" not in answers["error"]


def test_b16_a_missing_package_reads_differently() -> None:
    with pytest.raises(BackendRejectedError, match="none of them installed"):
        select(ask(), choose("FLASH_ATTN"), fake_device("sm_90"))


# --- B17 a flash package is installed, and has no kernel for the device

CAPABILITIES = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
FLASH = {"fa2": {"flash-attn": "2.8.3"}, "fa3": {"fa3-fwd": "0.0.3"}, "fa4": {"flash-attn-4": "4.0.0b36"}}
INSTALLED = [*FLASH, "flashinfer", "cudnn"]
MODES = (None, "ulysses", "ring", "ulysses_ring", "allgather_kv")


def subsets() -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(combinations(INSTALLED, size) for size in range(len(INSTALLED) + 1))


def machine(name: str, installed: tuple[str, ...]) -> DeviceInfo:
    packages = {k: v for part in installed for k, v in FLASH.get(part, {}).items()}
    if "flashinfer" in installed:
        packages["flashinfer-python"] = "0.6.18"
    return fake_device(name, packages=packages, cudnn=91900 if "cudnn" in installed else None)


def answer(config: object, device: DeviceInfo, mode: Any) -> tuple[str, str | None]:
    """("accepted", label) or ("refused", text)."""
    try:
        return "accepted", select(ask(sequence_parallel=mode), choose(config), device).label
    except BackendRejectedError as error:
        return "refused", str(error)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_b17_flash_runs_where_its_package_has_kernels_and_nowhere_else(name: str) -> None:
    capability = fake_device(name).capability
    assert capability is not None
    runs = {"fa2": (8, 0) <= capability < (10, 0), "fa3": (9, 0) <= capability < (10, 0), "fa4": False}
    for installed in subsets():
        device = machine(name, installed)
        able = [variant for variant in ("fa3", "fa2") if variant in installed and runs[variant]]
        state, said = answer("FLASH_ATTN", device, None)
        assert said is not None
        if able:
            assert (state, said) == ("accepted", f"FLASH_ATTN ({able[0]})"), installed
        elif "fa4" not in installed or capability < (8, 0):
            assert state == "refused", installed
            if {"fa2", "fa3"} & set(installed):
                assert str(capability) in said
                assert all(variant in said for variant in ("fa2", "fa3") if variant in installed)
        _, default = answer({}, device, None)
        assert default is not None
        if default.startswith("FLASH_ATTN"):
            assert capability >= (8, 0) and default[-4:-1] in installed and (able or default[-4:-1] == "fa4")


@pytest.mark.parametrize("name", CAPABILITIES)
def test_b17_ring_and_local_agree(name: str) -> None:
    for installed, config in product(subsets(), ({}, "FLASH_ATTN", "CUDNN_ATTN", "TORCH_SDPA")):
        answers = {answer(config, machine(name, installed), mode) for mode in MODES}
        assert len(answers) == 1, (installed, config)


# --- B19 head sizes that a kernel does not have

HEAD_SIZES = (32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512)
# What the kernels' own pages promise; a backend without a row here fails the first test.
SERVED = {
    "TORCH_SDPA": HEAD_SIZES,
    "CUDNN_ATTN": HEAD_SIZES[:11],
    "FLASH_ATTN": HEAD_SIZES[:11],
}
H100 = fake_device("sm_90", packages={"fa3-fwd": "0.0.3", "flash-attn": "2.8.3"}, cudnn=91900)
B200 = fake_device("sm_100", packages=EVERY_PACKAGE, cudnn=91900)


def test_b19_every_built_in_backend_has_its_row() -> None:
    assert SERVED.keys() == DiffusionAttentionBackendEnum.__members__.keys()


@pytest.mark.parametrize("device", [H100, B200], ids=str)
@pytest.mark.parametrize(("name", "head_size"), list(product(SERVED, HEAD_SIZES)))
def test_b19_unsupported_sizes_are_refused_by_number(name: str, head_size: int, device: DeviceInfo) -> None:
    state, said = answer_for_size({"default": name}, head_size, device)
    if head_size not in SERVED[name]:
        assert state == "refused" and name in said and f"head_size={head_size}" in said
    else:
        assert f"head_size={head_size}" not in said
        assert (state == "accepted") == (name != "FLASH_ATTN" or device is H100)
    default = select(ask(head_size=head_size), None, device).backend
    assert head_size in SERVED[default]


def answer_for_size(config: object, head_size: int, device: DeviceInfo) -> tuple[str, str]:
    try:
        return "accepted", select(ask(head_size=head_size), choose(config), device).label
    except BackendRejectedError as error:
        return "refused", str(error)


@pytest.mark.parametrize("name", SERVED)
def test_b19_accepted_sizes_are_computed_at_their_own_size(name: str) -> None:
    dtype, tolerance = (torch.float32, 1e-5) if name == "TORCH_SDPA" else (torch.bfloat16, 2e-2)
    generator = torch.Generator().manual_seed(0)
    for head_size, (variant, _) in product(SERVED[name], kernels_of(name)):
        query, key, value = (torch.randn(1, 5, 2, head_size, generator=generator).to(dtype) for _ in range(3))
        spec = {"backend": name, "variant": variant}
        with fake_kernels(name, variant), use_attention_config({"default": spec}, platform=H100, dtype=dtype):
            output = Attention(2, head_size, role="self")(query, key, value)
        assert output.shape == query.shape and output.is_contiguous()
        expected = reference_attention(query, key, value)[0]
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=0)


# --- B20 a choice is accepted, and the kernel turns out missing in the first forward


def needed_packages() -> Iterator[Any]:
    for name in registered_names():
        for variant, kernel in kernels_of(name):
            for package in kernel.packages:
                identity = f"{name}-{variant}-{package.distribution}"
                yield pytest.param(name, variant, kernel, package, id=identity)


@pytest.mark.parametrize("fault", ["symbol is None", "import fails"])
@pytest.mark.parametrize(("name", "variant", "kernel", "package"), list(needed_packages()))
def test_b20_construction_finds_it_on_every_path(
    name: str, variant: str | None, kernel: KernelFacts, package: PackageRequirement, fault: str
) -> None:
    machines = (fake_device(n, packages=EVERY_PACKAGE, cudnn=91900) for n in CAPABILITIES)
    spec = {"backend": name, "variant": variant}
    request = ask(head_size=TINY.attention_head_dim, num_heads=TINY.num_attention_heads)
    device = next(d for d in machines if answer_for_size({"default": spec}, 32, d)[0] == "accepted")
    assert select(request, choose({"default": spec}), device).variant == variant
    broken = ImportError(f"{package.module}: undefined symbol: _ZN2at4cuda")
    faulty = (
        fake_package(package.module, **{package.symbol: None})
        if fault == "symbol is None"
        else fake_package(package.module, raises=broken)
    )
    texts = []
    with faulty, use_attention_config({"default": spec}, platform=device, dtype="bfloat16"):
        with pytest.raises(BackendImportError) as alone:
            Attention(TINY.num_attention_heads, TINY.attention_head_dim, role="self", mask_usage="never")
        texts.append(str(alone.value))
        with pytest.raises(BackendImportError) as whole, torch.device("meta"):
            WanModel(TINY)
        texts.append(str(whole.value))
    with faulty_again(package, fault), use_attention_config(None, platform=device, dtype="bfloat16"):
        with pytest.raises(BackendImportError) as own:
            Attention(2, 32, role="self", mask_usage="never", config=choose({"per_role": {"self": spec}}))
        texts.append(str(own.value))
    assert len(set(texts)) == 1 and name in texts[0] and '"self"' in texts[0]
    assert (package.symbol if fault == "symbol is None" else "undefined symbol: _ZN2at4cuda") in texts[0]
