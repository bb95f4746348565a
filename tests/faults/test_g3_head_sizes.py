"""Public faults, group G3, B19: head sizes that a kernel does not have.

A backend is held against its row of SERVED, and a new one without a row fails. Padding of head sizes waits for a kernel
that does it: none of the present ones does.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from omni_attn.backends.registry import DiffusionAttentionBackendEnum
from omni_attn.errors import BackendRejectedError
from omni_attn.facts import DeviceInfo
from omni_attn.layer import Attention
from omni_attn.ops.reference import reference_attention
from omni_attn.selector import select, use_attention_config
from omni_attn.testing import fake_device, fake_kernels
from tests.selection.stubs import EVERY_PACKAGE, ask, choose, kernels_of

HEAD_SIZES = (32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512)
# What the kernels' own pages promise.
SERVED = {
    "TORCH_SDPA": HEAD_SIZES,
    "CUDNN_ATTN": HEAD_SIZES[:11],
    "FLASH_ATTN": HEAD_SIZES[:11],
}
H100 = fake_device("sm_90", packages={"fa3-fwd": "0.0.3", "flash-attn": "2.8.3"}, cudnn=91900)
B200 = fake_device("sm_100", packages=EVERY_PACKAGE, cudnn=91900)


def answer(config: object, head_size: int, device: DeviceInfo) -> tuple[str, str]:
    try:
        return "accepted", select(ask(head_size=head_size), choose(config), device).label
    except BackendRejectedError as error:
        return "refused", str(error)


def test_b19_every_built_in_backend_has_its_row() -> None:
    assert SERVED.keys() == DiffusionAttentionBackendEnum.__members__.keys()


@pytest.mark.parametrize("device", [H100, B200], ids=str)
@pytest.mark.parametrize(("name", "head_size"), list(product(SERVED, HEAD_SIZES)))
def test_b19_unsupported_sizes_are_refused_by_number(name: str, head_size: int, device: DeviceInfo) -> None:
    state, said = answer({"default": name}, head_size, device)
    if head_size not in SERVED[name]:
        assert state == "refused" and name in said and f"head_size={head_size}" in said
    else:
        assert f"head_size={head_size}" not in said
        assert (state == "accepted") == (name != "FLASH_ATTN" or device is H100)
    default = select(ask(head_size=head_size), None, device).backend
    assert head_size in SERVED[default]


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
