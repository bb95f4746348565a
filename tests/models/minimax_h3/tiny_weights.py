"""Weights of a tiny MiniMax-H3, seeded, in diffusers' layout and in that of the first release."""

from __future__ import annotations

import re
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor

from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from tests.models.minimax_h3.tiny_models import BASE

CONFIG = MiniMaxH3Config(**BASE)
HEADS, HEAD_SIZE, INNER = CONFIG.num_attention_heads, CONFIG.attention_head_dim, CONFIG.inner_dim
HIDDEN, FFN, LAYERS = CONFIG.hidden_size, CONFIG.ffn_dim, CONFIG.num_layers
_NATIVE_KEYS = {
    "num_refiner_layers": "token_refiner_num_layers",
    "ffn_dim": "ffn_hidden_size",
    "in_channels": "latents_dim",
    "audio_in_channels": "audio_latents_dim",
    "freq_dim": "timestep_input_dim",
    "time_embed_hidden_dim": "time_embed_hidden_size",
    "rope_freq_dim": "rope_inv_freq_len",
}
# BASE as the first release's config.json has it.
NATIVE_VALUES: dict[str, Any] = {
    _NATIVE_KEYS.get(key, key): value for key, value in BASE.items() if key != "rope_theta"
} | {"adaln_out_features": 18 * HIDDEN, "final_adaln_out_features": 2 * HIDDEN}
_FLOAT32 = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")
_NATIVE_NAMES = (
    (r"^proj_in", "video_patch_proj"),
    (r"^audio_proj_in", "audio_patch_proj"),
    (r"^context_embedder", "condition_proj"),
    (r"^time_embedder\.linear_1", "time_embedder.proj_in"),
    (r"^time_embedder\.linear_2", "time_embedder.proj_out"),
    (r"^proj_out", "final_layer.video_out"),
    (r"^audio_proj_out", "final_layer.audio_out"),
    (r"^norm_out\.norm", "final_layer.norm"),
    (r"^norm_out\.linear", "final_layer.adaln_proj.linear"),
    (r"^transformer_blocks", "blocks"),
    (r"refiner_blocks", "blocks"),
    (r"norm_q", "q_norm"),
    (r"norm_k", "k_norm"),
    (r"attn\.to_out\.0", "attn.out_proj"),
    (r"ff\.net\.2", "mlp.fc2"),
)


def build_reference() -> MiniMaxH3Transformer3DModel:
    """diffusers' model in the mixed precision of the published checkpoints, weights far from zero."""
    reference = MiniMaxH3Transformer3DModel(**BASE).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in reference.named_parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
        if name.partition(".")[0] not in _FLOAT32:
            parameter.data = parameter.data.bfloat16()
    return reference


def gates(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"transformer_blocks.{block}.attn.to_gate_compress.weight": torch.randn(
            INNER, HIDDEN, generator=generator
        ).bfloat16()
        for block in range(LAYERS)
    }


def to_native(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first release's names and layouts, row by row as they are described."""
    native: dict[str, Tensor] = {"rope.inv_freq": 10000.0 ** -(torch.arange(4) / 4)}
    for name, tensor in state.items():
        key = name
        for pattern, replacement in _NATIVE_NAMES:
            key = re.sub(pattern, replacement, key)
        if key.endswith((".to_k.weight", ".to_v.weight")):
            continue
        if key.endswith(".to_q.weight"):
            rows = []
            for head in range(HEADS):
                for part in "qkv":
                    projection = state[name.replace("to_q", f"to_{part}")]
                    rows += [projection[head * HEAD_SIZE + row] for row in range(HEAD_SIZE)]
            key, tensor = key.replace("to_q", "qkv_proj"), torch.stack(rows)
        if key.endswith(".ff.net.0.proj.weight"):
            value, gate = tensor[:FFN], tensor[FFN:]
            key, tensor = key.replace("ff.net.0.proj", "mlp.fc1"), torch.cat([gate, value])
        native[key] = tensor
    return native


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
