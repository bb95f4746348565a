"""Public faults, group G3: availability and capability. B19, about head sizes, is in test_g3_head_sizes.py.

B20 and B22 run over the registered names, so a backend meets them when it arrives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_attn.backends.registry import registered_names
from omni_attn.errors import BackendImportError, BackendRejectedError
from omni_attn.facts import DeviceInfo, PackageRequirement
from omni_attn.layer import Attention
from omni_attn.models.wan.model import WanModel
from omni_attn.platforms.assumed import ASSUMED_NAMES
from omni_attn.selector import select, use_attention_config
from omni_attn.testing import fake_device, fake_package
from tests.faults.test_g1_selection import TINY
from tests.selection.fresh import run_fresh, write_metadata
from tests.selection.stubs import EVERY_PACKAGE, ask, choose, kernels_of, packages_for

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
    with pytest.raises(BackendRejectedError, match="none installed"):
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


def answer(config: object, device: DeviceInfo, mode: Any) -> tuple[str, str]:
    """("accepted", label) or ("refused", text)."""
    try:
        return "accepted", select(ask(sequence_parallel=mode), choose(config), device).label
    except BackendRejectedError as error:
        return "refused", str(error)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_b17_flash_runs_where_its_package_has_kernels_and_nowhere_else(name: str) -> None:
    capability = fake_device(name).capability
    assert capability is not None
    runs = {
        "fa2": (8, 0) <= capability < (10, 0),
        "fa3": (9, 0) <= capability < (10, 0),
        "fa4": capability >= (9, 0),
    }
    for installed in subsets():
        device = machine(name, installed)
        able = [variant for variant in ("fa3", "fa4", "fa2") if variant in installed and runs[variant]]
        state, said = answer("FLASH_ATTN", device, None)
        if able:
            assert (state, said) == ("accepted", f"FLASH_ATTN ({able[0]})"), installed
        else:
            assert state == "refused", installed
            if set(FLASH) & set(installed):
                assert str(capability) in said
                assert all(variant in said for variant in FLASH if variant in installed)
        for mode in MODES:
            _, default = answer({}, device, mode)
            if default.startswith("FLASH_ATTN"):
                assert capability >= (8, 0) and default[-4:-1] == able[0]


@pytest.mark.parametrize("name", CAPABILITIES)
def test_b17_ring_and_local_agree(name: str) -> None:
    for installed, config in product(subsets(), ("FLASH_ATTN", "CUDNN_ATTN", "TORCH_SDPA")):
        device = machine(name, installed)
        answers = {
            (state, said.split("Accepted here")[0])
            for state, said in (answer(config, device, mode) for mode in MODES)
        }
        assert len(answers) == 1, (installed, config)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_b17_a_default_differs_for_ring_only_where_the_local_one_cannot_split(name: str) -> None:
    for installed in subsets():
        device = machine(name, installed)
        local = select(ask(), None, device)
        for mode in MODES:
            split = select(ask(sequence_parallel=mode), None, device)
            if split.label != local.label:
                verdicts = {verdict.backend: str(verdict) for verdict in split.verdicts}
                assert f"needs sequence parallelism {mode}" in verdicts[local.backend], (installed, mode)


def test_b17_such_a_default_exists() -> None:
    """TRT-LLM's kernels give no LSE, which a ring merges by."""
    device = machine("sm_100", ("flashinfer",))
    chosen = {mode: select(ask(sequence_parallel=mode), None, device).backend for mode in MODES}
    assert chosen[None] == chosen["ulysses"] == "TRTLLM_ATTN" != chosen["ring"] == "FLASHINFER_ATTN"


# --- B20 a choice is accepted, and the kernel turns out missing in the first forward


WIDE = replace(TINY, num_attention_heads=1, attention_head_dim=128)  # a head size that every kernel takes


def needed_packages() -> Iterator[Any]:
    """Each package that a kernel needs, on the first machine that has the hardware for it."""
    for name in registered_names():
        seen = set()
        for device in ASSUMED_NAMES:
            for variant, kernel in kernels_of(name, device):
                machine = fake_device(device, packages=packages_for(kernel), cudnn=91900)
                spec = {"backend": name, "variant": variant}
                if variant in seen or answer({"default": spec}, machine, None)[0] != "accepted":
                    continue
                seen.add(variant)
                for package in kernel.packages:
                    identity = f"{name}-{variant}-{package.distribution}"
                    yield pytest.param(name, variant, package, machine, id=identity)


def faulty(package: PackageRequirement, fault: str) -> AbstractContextManager[Any]:
    if fault == "symbol is None":
        return fake_package(package.module, **{package.symbols[0]: None})
    return fake_package(package.module, raises=ImportError("libkernel.so: undefined symbol: _ZN2at"))


@pytest.mark.parametrize("fault", ["symbol is None", "import fails"])
@pytest.mark.parametrize(("name", "variant", "package", "device"), list(needed_packages()))
def test_b20_construction_finds_it_on_every_path(
    name: str, variant: str | None, package: PackageRequirement, device: DeviceInfo, fault: str
) -> None:
    spec = {"backend": name, "variant": variant}
    geometry = (WIDE.num_attention_heads, WIDE.attention_head_dim)
    with faulty(package, fault):
        with use_attention_config({"default": spec}, platform=device):
            with pytest.raises(BackendImportError) as one_layer:
                Attention(*geometry, role="self", mask_usage="never", video_grid=True)
            with pytest.raises(BackendImportError) as whole_model, torch.device("meta"):
                WanModel(WIDE)
        own = choose({"per_role": {"self": spec}})
        with use_attention_config(None, platform=device), pytest.raises(BackendImportError) as own_config:
            Attention(*geometry, role="self", video_grid=True, config=own)
    [text] = {str(caught.value) for caught in (one_layer, whole_model, own_config)}
    assert name in text and '"self"' in text and package.module in text
    assert (package.symbols[0] if fault == "symbol is None" else "undefined symbol: _ZN2at") in text


# --- B22 a machine without CUDA

IMPORT_EVERYTHING = """
import sys
sys.modules["triton"] = None
import importlib, pkgutil
import omni_attn
for module in pkgutil.walk_packages(omni_attn.__path__, "omni_attn."):
    # Files of kernels are imported where kernels run.
    kernels = module.name.startswith("omni_attn.ops.") and ".triton_" in module.name
    if not module.name.endswith("__main__") and not kernels:
        importlib.import_module(module.name)
for name in ("cpu", "mps"):
    with omni_attn.use_attention_config(None, platform=omni_attn.testing.fake_device(name)):
        print(omni_attn.Attention(2, 64, role="self").selection.backend)
"""
WITHOUT_CUDA = {
    "cpu": fake_device("cpu"),
    "mps": fake_device("mps"),
    "cpu with packages": fake_device("cpu", packages=EVERY_PACKAGE, cudnn=91900),
    "mps with packages": fake_device("mps", packages=EVERY_PACKAGE, cudnn=91900),
    "unknown": DeviceInfo(kind="tpu", name="tpu_v5", packages=EVERY_PACKAGE, cudnn=91900),
}


def test_b22_everything_imports_where_there_is_no_triton() -> None:
    assert run_fresh(IMPORT_EVERYTHING).split() == ["TORCH_SDPA", "TORCH_SDPA"]


@pytest.mark.parametrize("device", WITHOUT_CUDA.values(), ids=WITHOUT_CUDA)
@pytest.mark.parametrize("head_size", [40, 64, 128, 256])
def test_b22_the_default_is_plain_torch(device: DeviceInfo, head_size: int) -> None:
    for dtype, masks in product(("bfloat16", "float32", None), (None, "never", "arbitrary")):
        selection = select(ask(head_size=head_size, dtype=dtype, mask_usage=masks), None, device)
        assert (selection.backend, selection.source) == ("TORCH_SDPA", "platform default")


def test_b22_an_unknown_family_behaves_like_a_cpu() -> None:
    asked = [select(ask(), None, WITHOUT_CUDA[name]).verdicts for name in ("unknown", "cpu with packages")]
    assert asked[0] == asked[1]


def for_gpus_only() -> list[str]:
    return [
        name
        for name in registered_names()
        if all(kernel.device_kinds and "cpu" not in kernel.device_kinds for _, kernel in kernels_of(name))
    ]


@pytest.mark.parametrize("device", WITHOUT_CUDA.values(), ids=WITHOUT_CUDA)
@pytest.mark.parametrize("name", for_gpus_only())
def test_b22_a_gpu_kernel_by_name_is_refused_with_the_platform(device: DeviceInfo, name: str) -> None:
    state, said = answer(name, device, None)
    assert state == "refused" and name in said and device.kind in said and "TORCH_SDPA" in said


def test_b22_the_gpu_kernels_are_among_those_asked() -> None:
    assert {"CUDNN_ATTN", "FLASH_ATTN"} <= set(for_gpus_only())
