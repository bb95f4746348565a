"""Names of Wan weights: from other repositories' spellings to the model's, which are diffusers'."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from omni_attn.errors import ConfigError
from omni_attn.models.gates import is_gate

# Parts of a name whose parameters stay in float32, as diffusers' `_keep_in_fp32_modules` has it.
_FLOAT32_PARTS = frozenset({"time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"})

# (what a name begins with, what it begins with here); the first that fits applies.
_ALIASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # The original Wan repository.
        (r"time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
        (r"time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
        (r"text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
        (r"text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
        (r"time_projection\.1\.", "condition_embedder.time_proj."),
        (r"img_emb\.proj\.0\.", "condition_embedder.image_embedder.norm1."),
        (r"img_emb\.proj\.1\.", "condition_embedder.image_embedder.ff.net.0.proj."),
        (r"img_emb\.proj\.3\.", "condition_embedder.image_embedder.ff.net.2."),
        (r"img_emb\.proj\.4\.", "condition_embedder.image_embedder.norm2."),
        (r"img_emb\.emb_pos$", "condition_embedder.image_embedder.pos_embed"),
        (r"head\.head\.", "proj_out."),
        (r"head\.modulation$", "scale_shift_table"),
        (r"(blocks\.\d+)\.modulation$", r"\1.scale_shift_table"),
        (r"(blocks\.\d+)\.self_attn\.([qkv])\.", r"\1.attn1.to_\2."),
        (r"(blocks\.\d+)\.self_attn\.o\.", r"\1.attn1.to_out.0."),
        (r"(blocks\.\d+)\.self_attn\.(norm_[qk])\.", r"\1.attn1.\2."),
        (r"(blocks\.\d+)\.cross_attn\.([qkv])\.", r"\1.attn2.to_\2."),
        (r"(blocks\.\d+)\.cross_attn\.o\.", r"\1.attn2.to_out.0."),
        (r"(blocks\.\d+)\.cross_attn\.(norm_[qk])\.", r"\1.attn2.\2."),
        (r"(blocks\.\d+)\.cross_attn\.([kv])_img\.", r"\1.attn2.add_\2_proj."),
        (r"(blocks\.\d+)\.cross_attn\.norm_k_img\.", r"\1.attn2.norm_added_k."),
        (r"(blocks\.\d+)\.ffn\.0\.", r"\1.ffn.net.0.proj."),
        (r"(blocks\.\d+)\.ffn\.2\.", r"\1.ffn.net.2."),
        # FastVideo's names in memory.
        (r"patch_embedding\.proj\.", "patch_embedding."),
        (r"(condition_embedder\.text_embedder)\.fc_in\.", r"\1.linear_1."),
        (r"(condition_embedder\.text_embedder)\.fc_out\.", r"\1.linear_2."),
        (r"(condition_embedder\.time_embedder)\.mlp\.fc_in\.", r"\1.linear_1."),
        (r"(condition_embedder\.time_embedder)\.mlp\.fc_out\.", r"\1.linear_2."),
        (r"condition_embedder\.time_modulation\.linear\.", "condition_embedder.time_proj."),
        (r"(condition_embedder\.image_embedder\.ff)\.fc_in\.", r"\1.net.0.proj."),
        (r"(condition_embedder\.image_embedder\.ff)\.fc_out\.", r"\1.net.2."),
        (r"(blocks\.\d+)\.(to_[qkv]|norm_[qk])\.", r"\1.attn1.\2."),
        (r"(blocks\.\d+)\.to_out\.(?!0\.)", r"\1.attn1.to_out.0."),
        (r"(blocks\.\d+\.attn2)\.to_out\.(?!0\.)", r"\1.to_out.0."),
        (r"(blocks\.\d+)\.self_attn_residual_norm\.norm\.", r"\1.norm2."),
        (r"(blocks\.\d+)\.ffn\.fc_in\.", r"\1.ffn.net.0.proj."),
        (r"(blocks\.\d+)\.ffn\.fc_out\.", r"\1.ffn.net.2."),
        (r"(blocks\.\d+)\.to_gate_compress\.", r"\1.attn1.to_gate_compress."),  # FastWan's, on disk as well
    )
)
# Original Wan calls cross-attention's norm norm3 and the feed-forward's norm2; diffusers swaps them.
_SWAPPED_NORM = re.compile(r"(blocks\.\d+)\.norm([23])\.")
_ORIGINAL_ONLY = re.compile(r"blocks\.\d+\.(norm3|self_attn|cross_attn)\.")

# Projections that diffusers' `fuse_projections` joins along the rows.
_FUSED: Mapping[str, tuple[str, ...]] = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}
_FUSED_NAME = re.compile(r"(blocks\.\d+\.attn[12])\.(to_qkv|to_kv|to_added_kv)\.(weight|bias)$")


def keeps_float32(name: str) -> bool:
    """Whether the parameter of this name is float32 whatever dtype the model has."""
    return not _FLOAT32_PARTS.isdisjoint(name.split("."))


def is_ignored(name: str) -> bool:
    """Whether a checkpoint may hold this weight without a layer for it: a norm some image models carry."""
    return ".attn2.norm_added_q." in name


def convert_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the model's names; fused projections are split by rows.

    Names of diffusers pass unchanged; original Wan's and FastVideo's are translated; unknown ones pass, for
    the loader to refuse.

    Raises:
        ConfigError: two keys give one weight different values, or one gate twice; or a fused projection cannot be
            split.
    """
    is_original = any(_ORIGINAL_ONLY.match(name) for name in state)
    converted: dict[str, Tensor] = {}
    for key, tensor in state.items():
        for name, part in _split_fused(_rename(key, is_original), tensor):
            if name in converted and is_gate(name):
                raise ConfigError(
                    f"two keys of the checkpoint give {name}, the second is {key}. Keep one: it is unclear which of "
                    "the two was trained."
                )
            if name in converted and not torch.equal(converted[name], part):
                raise ConfigError(
                    f"two keys of the checkpoint give {name} different values, the second is {key}. Keep "
                    "one: unfuse the projections before saving."
                )
            converted[name] = part
    return converted


def _rename(key: str, is_original: bool) -> str:
    if is_original and (norm := _SWAPPED_NORM.match(key)):
        return f"{norm[1]}.norm{5 - int(norm[2])}.{key[norm.end() :]}"
    for pattern, replacement in _ALIASES:
        if match := pattern.match(key):
            return match.expand(replacement) + key[match.end() :]
    return key


def _split_fused(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    fused = _FUSED_NAME.match(name)
    if fused is None:
        return [(name, tensor)]
    parts = _FUSED[fused[2]]
    if tensor.shape[0] % len(parts):
        raise ConfigError(
            f"{name} has {tensor.shape[0]} rows, which {len(parts)} projections cannot share equally."
        )
    return [
        (f"{fused[1]}.{part}.{fused[3]}", rows.clone())
        for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True)
    ]
