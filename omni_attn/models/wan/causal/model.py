"""The causal Wan transformer: the weights of WanModel, a chunk of latent frames in a forward.

Shape letters: B streams, f latent frames of a chunk, S their tokens, C channels.
"""

from __future__ import annotations

import os
from functools import partial
from typing import cast

import torch
from torch import Tensor

from omni_attn.errors import ConfigError, MetadataError
from omni_attn.kv_cache import PagedStep
from omni_attn.models.wan.causal.block import BlockCalls, CausalCrossAttention, CausalWanBlock
from omni_attn.models.wan.causal.config import check_causal, read_causal_config
from omni_attn.models.wan.causal.plan import CachePlan
from omni_attn.models.wan.config import Grid, WanConfig
from omni_attn.models.wan.inputs import check_latent_inputs
from omni_attn.models.wan.rope import RopeTable
from omni_attn.models.wan.transformer import WanTransformer, load_pretrained, unpatchify
from omni_attn.parallel.context import current_parallel


class CausalWanModel(WanTransformer):
    """Predicts the flow velocity of the next chunk of a video, which sees itself and the pages of earlier chunks.

    Every forward writes the chunk's keys and values into the same slots, so that a later one replaces an earlier one;
    after the last denoising step, a forward with the clean chunk leaves what later chunks see. `CausalCache` makes the
    steps. With one chunk, the result is that of WanModel. Built inside `use_attention_config(...)`, as WanModel is.

    Args:
        config: of a text-to-video transformer.
        plan: chunks, window and pages.
        is_dmd: its weights are distilled to a few steps.

    Raises:
        ConfigError: the transformer reads pictures, patches span several latent frames, or it would be built among
            ranks that split a sequence.
    """

    def __init__(self, config: WanConfig, plan: CachePlan, *, is_dmd: bool = False) -> None:
        check_causal(config)
        if (parallel := current_parallel()) is not None:
            raise ConfigError(
                f"parallel: {parallel.config.describe()} splits a sequence over {parallel.config.size} ranks, and "
                "CausalWanModel makes a video chunk by chunk from pages that lie on one device. Leave out parallel, or "
                "run WanModel (pipeline: wan), which splits"
            )
        super().__init__(config, partial(CausalWanBlock, plan=plan), is_dmd=is_dmd)
        self.plan = plan
        self._layers = [
            (f"blocks.{index}.attn1", f"blocks.{index}.attn2") for index in range(config.num_layers)
        ]

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        plan: CachePlan,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        is_dmd: bool = False,
    ) -> CausalWanModel:
        """The model in a transformer's own folder; see WanModel.from_pretrained.

        Raises:
            ConfigError: as there; or the transformer is none that can be causal.
        """
        build = partial(cls, plan=plan, is_dmd=is_dmd)
        return load_pretrained(build, folder, device=device, dtype=dtype, read=read_causal_config)

    def write_text(self, encoder_hidden_states: Tensor, step: PagedStep) -> None:
        """Puts keys and values of the text into the pages that cross-attention reads from then on.

        Args:
            encoder_hidden_states: text embedding [B, L, text_dim]; zero rows of padding are attended.
            step: of the text's pages, with slots for B * L tokens.

        Raises:
            MetadataError: the shape does not fit.
        """
        if encoder_hidden_states.ndim != 3 or encoder_hidden_states.shape[2] != self.config.text_dim:
            raise MetadataError(
                f"encoder_hidden_states has shape {list(encoder_hidden_states.shape)}; this model needs [streams, text "
                f"tokens, {self.config.text_dim}]."
            )
        text_BSC = self.condition_embedder.text_embedder(encoder_hidden_states.to(self.dtype))
        for block, (_, text) in zip(self.blocks, self._layers, strict=True):
            cast(CausalCrossAttention, block.attn2).write(text_BSC, step[text])

    def rope(self, grid: Grid, first_frame: int) -> RopeTable:
        """Positions of a chunk's tokens, whose first frame is so many latent frames behind the beginning.

        Raises:
            MetadataError: the chunk ends behind the last position that the model knows.
        """
        end, limit = first_frame + grid[0], self.config.rope_max_seq_len
        if end > limit:
            raise MetadataError(
                f"latent frames {first_frame} to {end - 1} were asked for, and rope_max_seq_len is {limit}: begin a "
                "new stream, with the last latents as its first ones."
            )
        return self._rope.get(grid, self.device, first_frame)

    def forward(self, hidden_states: Tensor, timestep: Tensor, step: PagedStep, rope: RopeTable) -> Tensor:
        """The velocity of a chunk at this timestep.

        Args:
            hidden_states: noisy latents of the chunk [B, in_channels, f, H, W].
            timestep: [B], or [B, S] with one timestep per token in raster order; 0..1000, any dtype.
            step: of CausalCache, for this chunk.
            rope: of this chunk.

        Returns:
            [B, out_channels, f, H, W] in the model's dtype.

        Raises:
            MetadataError: shapes do not fit the model or the step; both numbers are named.
        """
        grid = check_latent_inputs(self.config, hidden_states, timestep)
        time_BT1C, modulation_BT6C = self.condition_embedder.embed_time(timestep)
        tokens_BSC = self.patch_embedding(hidden_states.to(self.dtype))
        for block, (frames, text) in zip(self.blocks, self._layers, strict=True):
            calls = BlockCalls(step[frames], step[text])
            tokens_BSC = block(tokens_BSC, None, modulation_BT6C, rope, calls)
        return unpatchify(self._head(tokens_BSC, time_BT1C), grid, self.config.patch_size)
