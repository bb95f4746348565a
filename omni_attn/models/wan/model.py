"""The Wan video diffusion transformer. State-dict keys are those of diffusers.

Shape letters: B batch, S tokens, C channels; T is 1, or S where every token has its own timestep.
"""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.calibration import read_calibration
from omni_attn.layer import prepare_attention
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
from omni_attn.models.wan.block import Records, WanBlock
from omni_attn.models.wan.config import Grid, WanConfig
from omni_attn.models.wan.embeddings import ConditionEmbedder, PatchEmbedding
from omni_attn.models.wan.gates import check_gates
from omni_attn.models.wan.inputs import check_inputs
from omni_attn.models.wan.loading import convert_state_dict, is_ignored, keeps_float32
from omni_attn.models.wan.rope import RopeCache


class WanModel(nn.Module):
    """Predicts the flow velocity of a noisy video latent.

    Built inside `use_attention_config(...)`, each attention layer takes the backend that is configured for
    its role.

    Args:
        config: what it is made of.
        is_dmd: its weights are distilled to a few steps (FastWan). Its pipeline then takes the steps of
            `omni_attn.models.wan.dmd`, and video sparse attention keeps its coarse output even where all blocks are
            selected.
    """

    def __init__(self, config: WanConfig, *, is_dmd: bool = False) -> None:
        super().__init__()
        self.config, self.is_dmd = config, is_dmd
        self.patch_embedding = PatchEmbedding(config)
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList(WanBlock(config, f"blocks.{index}") for index in range(config.num_layers))
        self.proj_out = nn.Linear(config.dim, config.out_channels * prod(config.patch_size))
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)
        self._rope = RopeCache(config.attention_head_dim)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        is_dmd: bool = False,
    ) -> WanModel:
        """The model in a transformer's own folder: config.json beside safetensors, whole or sharded.

        Weights are read one at a time into a model without storage, so nothing is held twice. The time
        embedder, norms and modulation tables stay in float32, as the published models were trained. The model has
        gates of video sparse attention where the weights have them.

        Args:
            folder: as diffusers' `save_pretrained` writes it; original Wan names are understood as well.
            device: where the weights go, and what attention backends are selected for. None: to the CPU, and
                backends are selected for the device of `use_attention_config`, or this machine's best one.
            dtype: of all other weights, a torch dtype or its name; as stored if None.
            is_dmd: see the class; only model_index.json, in the folder above, tells.

        Raises:
            ConfigError: files are missing or broken, or the weights do not fit config.json; all problems at
                once.
        """
        target = None if dtype is None else resolve_float(dtype)
        source, values = os.path.join(folder, "config.json"), read_json(folder, "config.json")
        config, calibration = WanConfig.from_dict(values, source=source), read_calibration(values, source)
        state = convert_state_dict(read_safetensors(folder, WEIGHTS))
        check_gates(config, state, str(folder))
        if "gate_compress" not in values:
            config = replace(config, gate_compress=has_gates(state))
        with torch.device("meta"), select_for(device, target or stored_dtype(state, "proj_out.weight")):
            model = cls(config, is_dmd=is_dmd)
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

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream: latents and text are cast to it, and the prediction comes in it."""
        return self.proj_out.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.proj_out.weight.device

    def attention_records(self, grid: Grid) -> dict[str, AttentionMetadata]:
        """A record for each role of this model. The grid is published whatever backend reads it.

        A denoising loop makes them once, and per step hands `record.at_step(...)` to `prepare_attention` and
        `forward`.
        """
        video = AttentionMetadata(vsa_dit_seq_shape=grid, preserve_vsa_all_blocks=self.is_dmd)
        records = {"self": video, "cross": AttentionMetadata()}
        if self.config.image_dim is not None:
            records["cross.image"] = AttentionMetadata()
        return records

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        *,
        attention_records: Records | None = None,
    ) -> Tensor:
        """The velocity at this timestep.

        Args:
            hidden_states: noisy latent [B, in_channels, F, H, W]; image-conditioned models read noise, mask
                and condition latent one after the other on the channels.
            timestep: [B], or [B, S] with one timestep per token in raster order; 0..1000, any dtype.
            encoder_hidden_states: text embedding [B, 512, text_dim]; zero rows of padding are attended.
            encoder_hidden_states_image: CLIP tokens [B, 257, image_dim] ([2B, 257, image_dim] or
                [B, 514, image_dim] for first and last frame), exactly for models with an image branch.
            attention_records: this step's records, already given to `prepare_attention`; made and prepared
                here if None.

        Returns:
            [B, out_channels, F, H, W] in the model's dtype.

        Raises:
            MetadataError: shapes do not fit the model or one another; both numbers are named.
        """
        grid = check_inputs(
            self.config, hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image
        )
        embedder = self.condition_embedder
        text_BSC = embedder.text_embedder(encoder_hidden_states.to(self.dtype))
        image_BSC = None
        if embedder.image_embedder is not None and encoder_hidden_states_image is not None:
            image_BSC = embedder.image_embedder(encoder_hidden_states_image.to(self.dtype))
        time_BT1C, modulation_BT6C = embedder.embed_time(timestep)

        if attention_records is None:
            attention_records = self.attention_records(grid)
            image_tokens = 0 if image_BSC is None else image_BSC.shape[1]
            lengths = self.config.attention_lengths(
                grid, text_tokens=text_BSC.shape[1], image_tokens=image_tokens
            )
            prepare_attention(self, attention_records, lengths=lengths)
        rope = self._rope.get(grid, hidden_states.device)

        tokens_BSC = self.patch_embedding(hidden_states.to(self.dtype))
        for block in self.blocks:
            tokens_BSC = block(tokens_BSC, text_BSC, modulation_BT6C, rope, attention_records, image_BSC)

        shift, scale = (self.scale_shift_table.float() + time_BT1C).unbind(2)
        patches = self.proj_out(modulated_layer_norm(tokens_BSC, shift, scale, self.config.eps))
        return unpatchify(patches, grid, self.config.patch_size)


def unpatchify(patches_BSC: Tensor, grid: Grid, patch_size: tuple[int, int, int]) -> Tensor:
    """Tokens to [B, C, F, H, W]. A leaving patch has its channel fastest, an entering one slowest."""
    (frames, height, width), (pt, ph, pw) = grid, patch_size
    patches = patches_BSC.reshape(
        -1, frames, height, width, pt, ph, pw, patches_BSC.shape[2] // (pt * ph * pw)
    )
    return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(
        -1, patches.shape[7], frames * pt, height * ph, width * pw
    )
