"""What enters the blocks of a Wan transformer: patches, time, text and images.

Shape letters: B batch, F frames, H height and W width of the latent, S tokens, C channels; T is 1, or S where
every token has its own timestep.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_attn.models.layers import EmbeddingMLP, FeedForward, Float32LayerNorm, timestep_sinusoid
from omni_attn.models.wan.config import WanConfig
from omni_attn.parallel.shards import Span


class PatchEmbedding(nn.Conv3d):
    """Patches of a latent to tokens.

    The parameters are those of a convolution whose kernel equals its stride; it runs as the equal Linear on
    features ordered (channel, pt, ph, pw), which needs no copy afterwards to put the channels last.
    """

    def __init__(self, config: WanConfig) -> None:
        super().__init__(
            config.in_channels, config.dim, kernel_size=config.patch_size, stride=config.patch_size
        )

    def forward(self, input: Tensor, span: Span | None = None) -> Tensor:
        """[B, C, F, H, W] to [B, S, dim], raster order; with a span only its tokens."""
        pt, ph, pw = self.weight.shape[2:]
        batch, channels, frames, height, width = input.shape
        patches = input.reshape(batch, channels, frames // pt, pt, height // ph, ph, width // pw, pw)
        patches_BSC = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)
        if span is not None:
            patches_BSC = patches_BSC[:, span[0] : span[1]]
        assert self.bias is not None
        # A Linear with a bias gives a view: the first block would get another kind of tensor than the others, and
        # torch.compile would trace it apart.
        weight = self.weight.flatten(1).t().expand(batch, -1, -1)
        return torch.baddbmm(self.bias, patches_BSC, weight)


class ImageEmbedding(nn.Module):
    """CLIP tokens to the width of the text context; of two pictures, with learned positions added first."""

    def __init__(self, image_dim: int, dim: int, num_positions: int | None) -> None:
        super().__init__()
        self.norm1 = Float32LayerNorm(image_dim)
        self.ff = FeedForward(image_dim, image_dim, dim, gelu="none")
        self.norm2 = Float32LayerNorm(dim)
        self.pos_embed = (
            None if num_positions is None else nn.Parameter(torch.zeros(1, num_positions, image_dim))
        )

    def forward(self, image_BSC: Tensor) -> Tensor:
        if self.pos_embed is not None:
            # Each picture may come as a batch entry of its own: [2B, 257, C] is [B, 514, C].
            image_BSC = image_BSC.reshape(-1, *self.pos_embed.shape[1:]) + self.pos_embed
        output: Tensor = self.norm2(self.ff(self.norm1(image_BSC)))
        return output


class ConditionEmbedder(nn.Module):
    """Time, text and image embeddings, and the modulation that time gives to every block."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.freq_dim = config.freq_dim
        self.time_embedder = EmbeddingMLP(config.freq_dim, config.dim, nn.SiLU())
        self.time_proj = nn.Linear(config.dim, 6 * config.dim)
        self.text_embedder = EmbeddingMLP(config.text_dim, config.dim, nn.GELU(approximate="tanh"))
        self.image_embedder = (
            None
            if config.image_dim is None
            else ImageEmbedding(config.image_dim, config.dim, config.pos_embed_seq_len)
        )

    def embed_time(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Time as [B, T, 1, dim] for the head and as [B, T, 6, dim] for the blocks, in the model's dtype.

        The sinusoid and the embedder work in the embedder's own dtype, which loading keeps at float32.

        Args:
            timestep: [B] or [B, S].
        """
        if timestep.ndim == 1:
            timestep = timestep[:, None]
        sinusoid = timestep_sinusoid(timestep, self.freq_dim).to(self.time_embedder.linear_1.weight.dtype)
        time_BTC = self.time_embedder(sinusoid).to(self.time_proj.weight.dtype)
        return time_BTC.unsqueeze(2), self.time_proj(F.silu(time_BTC)).unflatten(2, (6, -1))
