"""RAINFUSION_ATTN on MindIE-SD, through a stand-in that has the package's signature."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, VideoLayout, use_attention_config
from omni_attn.errors import BackendImportError
from omni_attn.testing import fake_device, fake_kernels, fake_package
from tests.backends.rainfusion_layers import blocks_of, config, layer
from tests.ops.block_inputs import HEADS


def on_npu(**block_sparse: Any) -> Attention:
    npu = fake_device("npu", packages={"mindiesd": "3.1.0"})
    with use_attention_config(config(**block_sparse), platform=npu):
        return Attention(HEADS, 64, role="self", video_grid=True)


def joint_call(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, tokens, HEADS, 64, generator=generator).half() for _ in range(3))
    return query, key, value


@pytest.mark.parametrize(
    ("precision", "call"), [("bf16", "rf_v2 bf16"), ("fp8", "rf_v3 fp8"), ("mix", "rf_v3 mix")]
)
@pytest.mark.parametrize(
    "stated",
    [VideoLayout((30, 10), ((5, 8, 16),), 680), VideoLayout((90,), ((2, 8, 16), (3, 8, 16)), 730)],
    ids=["one video", "two videos"],
)
def test_mindiesd_orders_selects_and_attends_in_one_call(
    stated: VideoLayout, precision: str, call: str
) -> None:
    with blocks_of(128), fake_kernels("RAINFUSION_ATTN", "mindiesd") as log:
        attention = on_npu(sparsity=0.5, precision=precision)
        assert attention.selection is not None and attention.selection.variant == "mindiesd"
        calls = joint_call(stated.used_len + 6)
        output = attention(*calls, AttentionMetadata(video_layout=stated))
        assert log.calls == [f"sparse_attention {call}"]
        compiled = torch.compile(Attention.forward, fullgraph=True, backend="eager")
        record = AttentionMetadata(video_layout=stated)
        attention.prepare(record, (stated.used_len + 6,) * 2)
        assert torch.equal(compiled(attention, *calls, record), output)
        ours = layer(size=64, sparsity=0.5)(*calls, AttentionMetadata(video_layout=stated))
    torch.testing.assert_close(output, ours, atol=2e-3, rtol=0)
    assert not output[:, stated.used_len :].any()


def test_mindiesd_without_what_it_is_asked_for() -> None:
    """The package swallows keywords that it does not know, so they are looked for when the layer is built."""

    def older(q: Any, k: Any, v: Any, video_spans: Any = None, **kwargs: Any) -> None: ...
    def oldest(q: Any, k: Any, v: Any, **kwargs: Any) -> None: ...

    with fake_package("mindiesd", sparse_attention=older):
        assert on_npu().impl is not None
        with pytest.raises(BackendImportError, match=r"takes no precision; needs a newer mindiesd"):
            on_npu(precision="fp8")
    with (
        fake_package("mindiesd", sparse_attention=oldest),
        pytest.raises(BackendImportError, match="takes no video_spans"),
    ):
        on_npu()
