"""Public faults, group G3, B19: head sizes that a kernel does not have.

A backend is held against its rows of SERVED, and a new one without a row fails.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from omni_attn.backends.registry import DiffusionAttentionBackendEnum, default_path, load_backend
from omni_attn.errors import BackendRejectedError
from omni_attn.facts import DeviceInfo
from omni_attn.layer import Attention
from omni_attn.ops.reference import reference_attention
from omni_attn.selector import select, use_attention_config
from omni_attn.testing import fake_device, fake_kernels
from omni_attn.testing.harness import with_grid
from tests.selection.stubs import EVERY_PACKAGE, ask, choose, kernels_of, packages_for

HEAD_SIZES = (32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512)
UP_TO_256 = HEAD_SIZES[:11]
H100 = fake_device("sm_90", packages=EVERY_PACKAGE, cudnn=91900)
B200 = fake_device("sm_100", packages=EVERY_PACKAGE, cudnn=91900)
RTX_5090 = fake_device("sm_120", packages=EVERY_PACKAGE, cudnn=91900)
MI300 = fake_device("gfx942", packages=EVERY_PACKAGE)
MACHINES = (H100, B200, RTX_5090, MI300)
# What the kernels' own pages promise, by machine; none there = the backend does not run on it at any size.
SERVED: dict[str, dict[DeviceInfo, tuple[int, ...]]] = {
    "TORCH_SDPA": dict.fromkeys(MACHINES, HEAD_SIZES),
    "CUDNN_ATTN": dict.fromkeys((H100, B200, RTX_5090), UP_TO_256),
    "FLASH_ATTN": {
        H100: UP_TO_256,
        B200: (*HEAD_SIZES[:8], 256),
        RTX_5090: HEAD_SIZES[:8],
        MI300: UP_TO_256,
    },
    "FLEX_ATTN": dict.fromkeys(MACHINES, UP_TO_256),
    "FLASHINFER_ATTN": dict.fromkeys((H100, B200, RTX_5090), (64, 128, 256)),
    "TRTLLM_ATTN": dict.fromkeys((H100, B200), (128,)),
    "SAGE_ATTN": dict.fromkeys((H100, RTX_5090), HEAD_SIZES[:8]),
    "SAGE_ATTN_3": {RTX_5090: (64, 128)},
    "AITER_QUANT_ATTN": {MI300: (128,)},
    "FASTVIDEO_VSA": dict.fromkeys(MACHINES, HEAD_SIZES),  # torch's executor takes what Triton's does not
    "RAINFUSION_ATTN": dict.fromkeys(MACHINES, HEAD_SIZES),
    "BLOCK_SUMMARY_ATTN": dict.fromkeys(MACHINES, HEAD_SIZES),
}


def answer(config: object, head_size: int, device: DeviceInfo) -> tuple[str, str]:
    try:
        return "accepted", select(ask(head_size=head_size, video_grid=True), choose(config), device).label
    except BackendRejectedError as error:
        return "refused", str(error)


def test_b19_every_built_in_backend_has_its_row() -> None:
    names = DiffusionAttentionBackendEnum.__members__
    stateless = {name for name in names if load_backend(default_path(name), name).facts.stateless}
    assert SERVED.keys() == stateless


@pytest.mark.parametrize("device", MACHINES, ids=str)
@pytest.mark.parametrize(("name", "head_size"), list(product(SERVED, HEAD_SIZES)))
def test_b19_unsupported_sizes_are_refused_by_number(name: str, head_size: int, device: DeviceInfo) -> None:
    state, said = answer({"default": name}, head_size, device)
    served = SERVED[name].get(device)
    if served is None:
        assert state == "refused" and name in said
    elif head_size in served:
        assert state == "accepted"
    else:
        assert state == "refused" and name in said and f"head_size={head_size}" in said
    default = select(ask(head_size=head_size), None, device).backend
    assert head_size in SERVED[default][device]


@pytest.mark.parametrize("device", MACHINES, ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_b19_accepted_sizes_are_computed_at_their_own_size(name: str, device: DeviceInfo) -> None:
    if device not in SERVED[name]:
        return
    dtype, tolerance = (torch.float32, 1e-5) if name == "TORCH_SDPA" else (torch.bfloat16, 2e-2)
    generator = torch.Generator().manual_seed(0)
    ran = set()
    for head_size, (variant, kernel) in product(SERVED[name][device], kernels_of(name, device.name)):
        tokens = 5 if kernel.min_key_tokens == kernel.key_tile == 1 else 128
        shape = (1, tokens, 2, head_size)
        query, key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
        spec = {"backend": name, "variant": variant}
        machine = fake_device(device.name, packages=packages_for(kernel), cudnn=device.cudnn)
        if answer({"default": spec}, head_size, machine)[0] != "accepted":
            continue  # another variant has this size here
        ran.add(head_size)
        with (
            fake_kernels(name, variant),
            use_attention_config({"default": spec}, platform=machine, dtype=dtype),
        ):
            record = with_grid(None, (tokens, tokens)) if kernel.needs_video_grid else None
            output = Attention(2, head_size, role="self", video_grid=True)(query, key, value, record)
        assert output.shape == query.shape and output.is_contiguous()
        expected = reference_attention(query, key, value)[0]
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=0)
    assert ran == set(SERVED[name][device])
