"""MiniMax-H3's layers on backends that it does not override, with the record that its own attention takes."""

from __future__ import annotations

import pytest
import torch

from omni_attn import Attention, use_attention_config
from omni_attn.config import load_config
from omni_attn.errors import MetadataError
from omni_attn.models.minimax_h3.attention.fastvideo_h3 import MiniMaxH3VSAImpl
from omni_attn.ops.reference import reference_attention
from tests.backends.rainfusion_layers import SPARSE, blocks_of
from tests.models.minimax_h3.attention.h3_layers import Sequence3D, h3_layer, random_call

JOINT = Sequence3D((30, 0, 11), (3, 8, 9))


def layer_on(backend: str, **options: object) -> Attention:
    config = load_config({"per_role": {"self": {"backend": backend, **options}}})
    needs = {"role": "self", "mask_usage": "never", "video_grid": True, "dtype": "float64"}
    with use_attention_config(config, device="cpu"):
        return Attention(2, 8, impl_overrides={"FASTVIDEO_VSA": MiniMaxH3VSAImpl}, **needs)  # type: ignore[arg-type]


def test_rainfusion_reads_the_same_record() -> None:
    """Segments are dense context to it, and the gate is none of its inputs."""
    call, record = random_call(JOINT.tokens), JOINT.record()
    with blocks_of(32):
        rainfusion = layer_on("RAINFUSION_ATTN", block_sparse={"sparsity": 0.8})
        output = rainfusion(*call[:3], record)
    assert rainfusion.route == SPARSE and not rainfusion.reads("gate_compress")
    dense = reference_attention(*call[:3])[0]
    torch.testing.assert_close(output[:, : JOINT.before], dense[:, : JOINT.before])
    assert (output[:, JOINT.before :] - dense[:, JOINT.before :]).abs().max() > 0.05
    with pytest.raises(MetadataError, match="gate_compress"):
        rainfusion(*call[:3], record.with_layer_inputs(gate_compress=call[3]))


def test_one_record_serves_both_and_dense_attention() -> None:
    call, record = random_call(JOINT.tokens), JOINT.record()
    vsa = h3_layer(topk=2, needs={"dtype": "float64"})
    expected = vsa(*call[:3], JOINT.record())
    with blocks_of(32):
        rainfusion, dense = layer_on("RAINFUSION_ATTN"), layer_on("TORCH_SDPA")
        for layer in (rainfusion, vsa, dense):
            layer(*call[:3], record)
    assert len(record.memo) == 3
    assert torch.equal(vsa(*call[:3], record), expected)
    torch.testing.assert_close(dense(*call[:3], record), reference_attention(*call[:3])[0])
