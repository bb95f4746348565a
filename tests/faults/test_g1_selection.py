"""Public faults, group G1: the wrong backend runs, and nothing says so.

B01, B02 and B05 ask about every registered name or every default. B04, B07 and B08 are on Wan here, where
FASTVIDEO_VSA is stood in for by a sparse backend that these tests register; on MiniMax-H3 in test_minimax_h3.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from omni_attn.backends.registry import default_path, load_backend, registered_names
from omni_attn.config import AttentionConfig
from omni_attn.errors import BackendRejectedError
from omni_attn.facts import FullAttentionSpec, KernelFacts, evaluate
from omni_attn.layer import Attention
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.presets import WAN_PRESETS
from omni_attn.selector import collect_attention_requests, select, use_attention_config
from omni_attn.testing import fake_device, fake_kernels
from tests.selection.fresh import run_fresh
from tests.selection.stubs import EVERY_PACKAGE, SparseBackend, ask, choose, kernels_of, registered

CUDA = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
EVERYWHERE = (*CUDA, "gfx942", "gfx950", "npu", "xpu", "musa")
TINY = replace(WAN_PRESETS["wan-tiny"].transformer, num_layers=2)
TINY_IMAGE = replace(TINY, in_channels=36, image_dim=48, added_kv_proj_dim=TINY.dim)


# --- B01 the log names a backend that is not there


@pytest.mark.parametrize(
    ("packages", "cudnn", "backend"),
    [({}, None, "TORCH_SDPA"), ({}, 91900, "CUDNN_ATTN"), ({"fa3-fwd": "0.0.3"}, 91900, "FLASH_ATTN")],
)
def test_b01_selected_logged_and_running_are_one(
    packages: dict[str, str], cudnn: int | None, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    role, device = f"b01.{backend}", fake_device("sm_90", packages=packages, cudnn=cudnn)
    with caplog.at_level(logging.INFO, "omni_attn"), fake_kernels(backend) as kernel:
        with use_attention_config({}, platform=device, dtype="bfloat16"):
            layer = Attention(2, 128, role=role, mask_usage="never")
        output = layer(*(torch.randn(1, 8, 2, 128, dtype=torch.bfloat16) for _ in range(3)))
    assert layer.selection is not None and type(layer.impl) is layer.selection.backend_cls.get_impl_cls()
    [line] = [record.getMessage() for record in caplog.records if role in record.getMessage()]
    names = [name for name in registered_names() if name in line]
    assert names == [layer.selection.backend_cls.get_name()] == [backend]
    assert len(kernel) == (backend != "TORCH_SDPA") and output.isfinite().all()


def test_b01_the_choice_of_a_missing_package_is_an_error_with_a_way_out() -> None:
    device = fake_device("sm_90", cudnn=91900)
    scope = use_attention_config({"default": {"backend": "FLASH_ATTN"}}, platform=device, dtype="bfloat16")
    with scope, pytest.raises(BackendRejectedError) as caught:
        Attention(2, 128, role="self")
    parts = ("FLASH_ATTN", "fa3-fwd", "flash-attn", "pip install", "per_role: {self: {backend: CUDNN_ATTN}}")
    assert all(part in str(caught.value) for part in parts)


# --- B02 a named optional kernel is missing, and another one runs


def _absent_packages() -> Iterator[Any]:
    """Each kernel that needs a package, on each device that has the hardware for it."""
    for name in registered_names():
        for device in EVERYWHERE:
            for variant, kernel in kernels_of(name, device):
                hardware = replace(kernel, packages=())
                if kernel.packages and not evaluate(
                    hardware, ask(video_grid=True), fake_device(device, cudnn=91900)
                ):
                    yield pytest.param(name, variant, kernel, device, id=f"{name}-{variant}-{device}")


@pytest.mark.parametrize("config", ["default", "per_role"])
@pytest.mark.parametrize(("name", "variant", "kernel", "device"), list(_absent_packages()))
def test_b02_a_missing_package_is_named_and_never_replaced(
    name: str, variant: str | None, kernel: KernelFacts, device: str, config: str
) -> None:
    own = {package.distribution for package in kernel.packages}
    others = {key: value for key, value in EVERY_PACKAGE.items() if key not in own}
    machine = fake_device(device, packages=others, cudnn=91900)
    spec = {"backend": name, "variant": variant}
    chosen = choose({"default": spec} if config == "default" else {"per_role": {"self": spec}})
    over_pages = not load_backend(default_path(name), name).facts.stateless
    cache = FullAttentionSpec(block_size=16, num_kv_heads=12, head_size=128, dtype="bfloat16")
    with pytest.raises(BackendRejectedError) as caught:
        select(ask(video_grid=True, kv_cache=cache if over_pages else None), chosen, machine)
    assert name in str(caught.value) and all(package in str(caught.value) for package in own)
    assert select(ask(), None, machine).backend in registered_names()


def test_b02_has_kernels_to_ask_about() -> None:
    assert {case.values[0] for case in _absent_packages()} == {
        name for name in registered_names() if any(kernel.packages for _, kernel in kernels_of(name))
    }


# --- B04 one name of a model gets another default than the next


def _requests(config: WanConfig) -> dict[str, Any]:
    with (
        use_attention_config(None, device="cpu"),
        collect_attention_requests() as layers,
        torch.device("meta"),
    ):
        WanModel(replace(config, num_layers=1))
    return {layer.request.role: layer.request for layer in layers}


@pytest.mark.parametrize("device", ["sm_90", "sm_100", "sm_103"])
def test_b04_every_wan_states_its_masks_and_gets_one_default(device: str) -> None:
    machine = fake_device(device, packages={"fa3-fwd": "0.0.3"}, cudnn=91900)
    answers = set()
    for name, preset in WAN_PRESETS.items():
        requests = _requests(preset.transformer)
        assert {"self", "cross"} <= requests.keys(), name
        assert {request.mask_usage for request in requests.values()} == {"never"}, name
        if preset.transformer.attention_head_dim == 128:
            answers |= {select(replace(r, dtype="bfloat16"), None, machine).label for r in requests.values()}
    assert answers == {"FLASH_ATTN (fa3)" if device == "sm_90" else "CUDNN_ATTN"}


@pytest.mark.parametrize("device", CUDA)
def test_b04_a_model_that_states_nothing_gets_a_default_that_takes_masks(device: str) -> None:
    machine = fake_device(device, packages=EVERY_PACKAGE, cudnn=91900)
    selection = select(ask(mask_usage=None), None, machine)
    assert "arbitrary" in selection.backend_cls.facts.mask_kinds
    passed_over = [verdict for verdict in selection.verdicts if not verdict.accepted]
    assert all("needs" in reason for verdict in passed_over for reason in verdict.reasons)


# --- B05 an installed package overrules a person


@pytest.mark.parametrize(
    ("device", "role", "promise"),
    list(product(CUDA, ["self", "cross", "minimax_h3.token_refiner"], [None, "never"])),
)
def test_b05_plain_torch_stays_what_was_chosen(device: str, role: str, promise: Any) -> None:
    machine = fake_device(device, packages=EVERY_PACKAGE, cudnn=91900)
    request = ask(role, mask_usage=promise, max_seqlen_k=32760)
    selection = select(request, choose({"default": {"backend": "TORCH_SDPA"}}), machine)
    assert (selection.backend, selection.source) == ("TORCH_SDPA", "default")


# --- B07 a layer that does not say its role


def test_b07_a_role_has_no_default() -> None:
    with pytest.raises(TypeError, match="role"):
        Attention(2, 128)  # type: ignore[call-arg]


@pytest.mark.parametrize("config", [TINY, TINY_IMAGE], ids=["t2v", "i2v"])
def test_b07_text_and_image_layers_of_wan_answer_to_cross(config: WanConfig) -> None:
    choice = {"default": "TORCH_SDPA", "per_role": {"self": "SPARSE_TEST"}}
    sparse = registered(("SPARSE_TEST", SparseBackend))
    with sparse, use_attention_config(choice, device="cpu"), torch.device("meta"):
        model = WanModel(config)
    found = [
        (name.split(".")[2], layer.role, layer.role_category, layer.selection and layer.selection.backend)
        for name, layer in model.named_modules()
        if isinstance(layer, Attention)
    ]
    expected = [("attn1", "self", "self", "SPARSE_TEST"), ("attn2", "cross", "cross", "TORCH_SDPA")]
    if config.image_dim is not None:
        expected.append(("attn2", "cross.image", "cross", "TORCH_SDPA"))
    assert sorted(found) == sorted(expected * config.num_layers)


# --- B08 a model that calls a kernel behind the selector's back (its static half: tests/models/wan)

WITHOUT_KERNELS = """
import sys
for name in ("flash_attn", "flash_attn_interface", "fa3_fwd_interface", "flashinfer", "sageattention", "triton"):
    sys.modules[name] = None
import torch
from omni_attn.layer import Attention
from omni_attn.models.wan.model import WanModel
from omni_attn.ops.reference import reference_attention
from omni_attn.selector import use_attention_config
from tests.faults.test_g1_selection import TINY, TINY_IMAGE
def exact(self, query, key, value, metadata=None):
    return reference_attention(query, key, value)[0].to(query.dtype)
for config in (TINY, TINY_IMAGE):
    torch.manual_seed(0)
    with use_attention_config("TORCH_SDPA", device="cpu"):
        model = WanModel(config)
    image = None if config.image_dim is None else torch.randn(1, 257, config.image_dim)
    inputs = (torch.randn(1, config.in_channels, 2, 4, 4), torch.tensor([500]), torch.randn(1, 512, 64), image)
    with torch.no_grad():
        output = model(*inputs)
        Attention.forward, dispatched = exact, Attention.forward
        expected = model(*inputs)
        Attention.forward = dispatched
    assert output.isfinite().all() and output.abs().max() > 0.01
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    print("equal")
"""


def test_b08_wan_runs_without_any_kernel_package() -> None:
    assert run_fresh(WITHOUT_KERNELS).split() == ["equal", "equal"]


def test_b08_every_attention_of_wan_is_selected() -> None:
    """No config at all: each layer still carries the record of what it runs and why."""
    with use_attention_config(AttentionConfig(), device="cpu"), torch.device("meta"):
        layers = [m for m in WanModel(TINY_IMAGE).modules() if isinstance(m, Attention)]
    assert len(layers) == 3 * TINY_IMAGE.num_layers
    assert all(layer.selection is not None and layer.selection.verdicts for layer in layers)
