"""The Wan video diffusion transformer. State-dict keys are those of diffusers.

Shape letters: B batch, S tokens, C channels; T is 1, or S where every token has its own timestep.
"""

from __future__ import annotations

import os
from functools import partial
from math import prod

import torch
from torch import Tensor

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.models.wan.block import Records, WanBlock
from omni_attn.models.wan.config import TEXT_TOKENS, Grid, WanConfig
from omni_attn.models.wan.inputs import check_inputs
from omni_attn.models.wan.transformer import WanTransformer, load_pretrained, unpatchify
from omni_attn.parallel.context import current_parallel
from omni_attn.parallel.shards import Span
from omni_attn.preparation import prepare_attention


class WanModel(WanTransformer):
    """Predicts the flow velocity of a noisy video latent.

    Built inside `use_attention_config(...)`, each attention layer takes the backend that is configured for
    its role.

    Built inside `use_parallel(...)`, each rank computes its piece of the video's tokens in all that follows the latent:
    patches, blocks and head. Latents, text and pictures come whole to every rank, and each gets the whole velocity.

    Args:
        config: what it is made of.
        is_dmd: its weights are distilled to a few steps (FastWan). Its pipeline then takes the steps of
            `omni_attn.models.wan.dmd`, and video sparse attention keeps its coarse output even where all blocks are
            selected.
    """

    def __init__(self, config: WanConfig, *, is_dmd: bool = False) -> None:
        super().__init__(config, WanBlock, is_dmd=is_dmd)
        self.parallel = current_parallel()

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
        return load_pretrained(partial(cls, is_dmd=is_dmd), folder, device=device, dtype=dtype)

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

    def attention_lengths(
        self, grid: Grid, *, text_tokens: int = TEXT_TOKENS, image_tokens: int | None = None
    ) -> dict[str, tuple[int, int]]:
        """(query tokens, key tokens) of each role for `prepare_attention`, on this rank; see WanConfig."""
        own = None if (span := self._span(prod(grid))) is None else span[1] - span[0]
        return self.config.attention_lengths(
            grid, text_tokens=text_tokens, image_tokens=image_tokens, own_tokens=own
        )

    def _span(self, tokens: int) -> Span | None:
        """Which of a video's tokens this rank has; None = all."""
        if self.parallel is None:
            return None
        return self.parallel.shards(tokens).spans[self.parallel.rank]

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
            [B, out_channels, F, H, W] in the model's dtype. Among ranks, each gets all of it: where each takes the loss
            of all of it, the mean of the ranks' gradients is the gradient.

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
        span = self._span(prod(grid))
        if span is not None and timestep.shape[1:].numel() > 1:
            timestep = timestep[:, span[0] : span[1]]
        time_BT1C, modulation_BT6C = embedder.embed_time(timestep)

        if attention_records is None:
            attention_records = self.attention_records(grid)
            image_tokens = 0 if image_BSC is None else image_BSC.shape[1]
            lengths = self.attention_lengths(grid, text_tokens=text_BSC.shape[1], image_tokens=image_tokens)
            prepare_attention(self, attention_records, lengths=lengths)
        rope = self._rope.get(grid, hidden_states.device, span=span)

        tokens_BSC = self.patch_embedding(hidden_states.to(self.dtype), span)
        for block in self.blocks:
            tokens_BSC = block(tokens_BSC, text_BSC, modulation_BT6C, rope, attention_records, image_BSC)

        patches_BSC = self._head(tokens_BSC, time_BT1C)
        if self.parallel is not None:
            patches_BSC = self.parallel.gather(patches_BSC, prod(grid))
        return unpatchify(patches_BSC, grid, self.config.patch_size)
