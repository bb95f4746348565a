"""What Wan transformers have in common: parts, weights and head. State-dict keys are those of diffusers.

Shape letters: B batch, S tokens, C channels; T is 1, or S where every token has its own timestep.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, nn

from omni_attn.calibration import read_calibration
from omni_attn.models.calibration import calibrate
from omni_attn.models.checkpoint import (
    assign_weights,
    read_json,
    read_safetensors,
    resolve_float,
    stored_dtype,
)
from omni_attn.models.folders import WEIGHTS
from omni_attn.models.gates import has_gates
from omni_attn.models.layers import modulated_layer_norm
from omni_attn.models.runtime import select_for
from omni_attn.models.wan.block import WanBlock
from omni_attn.models.wan.config import Grid, WanConfig
from omni_attn.models.wan.embeddings import ConditionEmbedder, PatchEmbedding
from omni_attn.models.wan.experts import ReadConfig
from omni_attn.models.wan.gates import check_gates
from omni_attn.models.wan.loading import convert_state_dict, is_ignored, keeps_float32
from omni_attn.models.wan.rope import RopeCache

Model = TypeVar("Model", bound="WanTransformer")


class WanTransformer(nn.Module):
    """The parameters of a Wan transformer, whatever its attention layers keep.

    Args:
        config: what it is made of.
        block: (config, name) -> one of its blocks.
        is_dmd: see the models.
    """

    def __init__(
        self, config: WanConfig, block: Callable[[WanConfig, str], WanBlock], *, is_dmd: bool
    ) -> None:
        super().__init__()
        self.config, self.is_dmd = config, is_dmd
        self.patch_embedding = PatchEmbedding(config)
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList(block(config, f"blocks.{index}") for index in range(config.num_layers))
        self.proj_out = nn.Linear(config.dim, config.out_channels * prod(config.patch_size))
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)
        self._rope = RopeCache(config.attention_head_dim)

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream: latents and text are cast to it, and the prediction comes in it."""
        return self.proj_out.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.proj_out.weight.device

    def _head(self, tokens_BSC: Tensor, time_BT1C: Tensor) -> Tensor:
        """The velocity of each token that leaves the last block: its patch, for `unpatchify`."""
        shift, scale = (self.scale_shift_table.float() + time_BT1C).unbind(2)
        patches: Tensor = self.proj_out(modulated_layer_norm(tokens_BSC, shift, scale, self.config.eps))
        return patches


def load_pretrained(
    build: Callable[[WanConfig], Model],
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | str | None,
    read: ReadConfig = WanConfig.from_dict,
) -> Model:
    """The model that `build` makes of the folder's config.json, with the folder's weights; for inference.

    Args:
        folder, device, dtype: see WanModel.from_pretrained.
        read: see load_folder.

    Raises:
        ConfigError: as there.
    """
    target = None if dtype is None else resolve_float(dtype)
    source, values = os.path.join(folder, "config.json"), read_json(folder, "config.json")
    config, calibration = read(values, source=source), read_calibration(values, source)
    state = convert_state_dict(read_safetensors(folder, WEIGHTS))
    check_gates(config, state, str(folder))
    if "gate_compress" not in values:
        config = replace(config, gate_compress=has_gates(state))
    with torch.device("meta"), select_for(device, target or stored_dtype(state, "proj_out.weight")):
        model = build(config)
    if calibration is not None:
        calibrate(model, {"": calibration})
    assign_weights(
        model,
        state,
        device=device,
        dtype=target,
        keeps_float32=keeps_float32,
        ignored=is_ignored,
        source=str(folder),
    )
    return model.eval()


def unpatchify(patches_BSC: Tensor, grid: Grid, patch_size: tuple[int, int, int]) -> Tensor:
    """Tokens to [B, C, F, H, W]. A leaving patch has its channel fastest, an entering one slowest."""
    (frames, height, width), (pt, ph, pw) = grid, patch_size
    patches = patches_BSC.reshape(
        -1, frames, height, width, pt, ph, pw, patches_BSC.shape[2] // (pt * ph * pw)
    )
    return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(
        -1, patches.shape[7], frames * pt, height * ph, width * pw
    )
