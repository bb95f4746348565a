"""Public faults that ask about each shipped model (B04, B08, B28), on MiniMax-H3. B07: tests/models/minimax_h3."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omni_attn import Attention, PackedPadding, VideoLayout
from omni_attn.facts import AttentionRequest
from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.models.minimax_h3.presets import MINIMAX_H3_PRESETS
from omni_attn.ops.reference import reference_attention
from omni_attn.selector import collect_attention_requests, select, use_attention_config
from omni_attn.testing import fake_device, fake_kernels
from tests.selection.fresh import run_fresh

ROLES = {"self", "minimax_h3.token_refiner"}
BLACKWELL = {"flashinfer-python": "0.6.14", "fa3-fwd": "0.0.3"}


def requests_of(config: MiniMaxH3Config) -> dict[str, AttentionRequest]:
    with (
        use_attention_config(None, device="cpu"),
        collect_attention_requests() as layers,
        torch.device("meta"),
    ):
        MiniMaxH3Model(replace(config, num_layers=1))
    return {layer.request.role: layer.request for layer in layers}


@pytest.mark.parametrize("device", ["sm_90", "sm_100", "sm_103"])
def test_b04_every_preset_states_its_masks_and_gets_one_default(device: str) -> None:
    machine = fake_device(device, packages=BLACKWELL, cudnn=91900)
    answers = set()
    for name, preset in MINIMAX_H3_PRESETS.items():
        requests = requests_of(preset.transformer)
        assert requests.keys() == ROLES, name
        assert {request.mask_usage for request in requests.values()} == {"never"}, name
        if preset.transformer.attention_head_dim == 128:
            answers |= {select(replace(r, dtype="bfloat16"), None, machine).label for r in requests.values()}
    assert len(answers) == 1


WITHOUT_KERNELS = """
import sys
for name in ("flash_attn", "flash_attn_interface", "fa3_fwd_interface", "flashinfer", "sageattention", "triton"):
    sys.modules[name] = None
import torch
from omni_attn.layer import Attention
from omni_attn.ops.reference import reference_attention
from omni_attn.selector import use_attention_config
from tests.models.minimax_h3.tiny_models import build_inputs, build_model
def exact(self, query, key, value, metadata=None):
    return reference_attention(query, key, value)[0].to(query.dtype)
with use_attention_config("TORCH_SDPA", device="cpu"):
    model = build_model()
inputs = build_inputs("fl2va")
with torch.no_grad():
    outputs = model(**inputs)
    Attention.forward = exact
    expected = model(**inputs)
for output, wanted in zip(outputs, expected, strict=True):
    assert output.isfinite().all() and output.abs().max() > 0.01
    torch.testing.assert_close(output, wanted, atol=1e-5, rtol=1e-5)
    print("equal")
"""


def test_b08_it_runs_without_any_kernel_package() -> None:
    assert run_fresh(WITHOUT_KERNELS).split() == ["equal", "equal"]


@pytest.mark.parametrize("device", ["sm_90", "sm_100", "cpu"])
def test_b28_its_default_takes_its_own_padding(device: str) -> None:
    """58 rows in 64, as native packing has them: what the model itself states of it."""
    preset = MINIMAX_H3_PRESETS["minimax-h3"].transformer
    machine = fake_device(device, packages=BLACKWELL, cudnn=91900)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    request = requests_of(preset)["self"]
    with torch.device("meta"):
        model = MiniMaxH3Model(replace(preset, num_layers=1))
    record = model.attention_records(VideoLayout((3, 0, 7), ((3, 4, 4),), 58), padded_len=64)["self"]
    assert record.packed_padding == PackedPadding(58, 58)
    generator = torch.Generator().manual_seed(0)
    call = [torch.randn(1, 64, 2, request.head_size, generator=generator).to(dtype) for _ in range(3)]
    expected = reference_attention(*(x[:, :58] for x in call))[0]
    for x in call:
        x[:, 58:] = float("nan")
    chosen = select(replace(request, num_heads=2, num_kv_heads=2, dtype=str(dtype)), None, machine)
    with (
        fake_kernels(chosen.backend, chosen.variant),
        use_attention_config({}, platform=machine, dtype=str(dtype)),
    ):
        layer = Attention(2, request.head_size, role="self", mask_usage="never", video_grid=True)
        output = layer(*call, record)
    assert layer.selection is not None and layer.selection.label == chosen.label
    torch.testing.assert_close(
        output[:, :58].float(), expected.float(), atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0
    )
    assert not output[:, 58:].any()
