"""What enters the blocks of a MiniMax-H3 transformer beside its rows: refined text, and time.

Shape letters: B batch, N rows of text, C channels; M distinct timesteps.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.models.layers import EmbeddingMLP, timestep_sinusoid
from omni_attn.models.minimax_h3.block import RefinerBlock
from omni_attn.models.minimax_h3.config import MiniMaxH3Config


class TokenRefiner(nn.Module):
    """Text before it meets the rest: plain blocks and a norm. The same at every step of a denoising loop."""

    def __init__(self, config: MiniMaxH3Config) -> None:
        super().__init__()
        self.refiner_blocks = nn.ModuleList(
            RefinerBlock(config, f"token_refiner.refiner_blocks.{index}")
            for index in range(config.num_refiner_layers)
        )
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.final_norm_eps)

    def forward(self, text_BNC: Tensor, record: AttentionMetadata | None) -> Tensor:
        for block in self.refiner_blocks:
            text_BNC = block(text_BNC, record)
        output: Tensor = self.final_norm(text_BNC)
        return output


def embed_time(timestep: Tensor, freq_dim: int, embedder: EmbeddingMLP, basis: nn.Linear | None) -> Tensor:
    """Timesteps [M] in 0..1 as what every modulation is projected from, [M, adaln_dim].

    In the embedder's own dtype, which loading keeps at float32, activation included: rounded before it, every block's
    modulation would be off in the same direction at every step. The basis of a factorised checkpoint comes last.
    """
    sinusoid = timestep_sinusoid(timestep, freq_dim).to(embedder.linear_1.weight.dtype)
    time_MC = F.silu(embedder(sinusoid))
    return time_MC if basis is None else basis(time_MC.to(basis.weight.dtype))
