"""Skip-softmax attention as its kernels define it, in float64: slow, and exact about which tiles are skipped.

BLASST (arXiv 2512.12087): streaming softmax over key tiles. After the scores of a tile are known, it is left out where
for every query row of the query tile exp(tile maximum - running maximum) < threshold. A tile that is left out adds
nothing to numerator or denominator and does not raise the running maximum. The first tile is always kept. The result
depends on the tile sizes and on the order of the tiles, which each kernel chooses for itself.

Legend: B batch, H heads, S query tokens, K key tokens, N query tiles, M query tile size, D value head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch.nn.functional import pad

from omni_attn.ops.masks import position_mask


def skip_softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    threshold: float,
    tile_queries: int,
    tile_keys: int,
    tile_order: Sequence[int] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without the tiles that matter little: (output [B, S, H, D] float64, skipped [B, H, N, tiles] bool).

    Args:
        query: [B, S, H, D]; key: [B, K, G, D]; value: [B, K, G, Dv] with H a multiple of G.
        threshold: lambda, what kernels make of a factor as factor / key tokens; 0 skips nothing.
        tile_queries, tile_keys: rows that vote together, and keys that are kept or skipped together.
        tile_order: numbers of the key tiles in the order in which they are visited, None = ascending.
        softmax_scale: default D ** -0.5.
        causal: aligned at the bottom right; a row that sees nothing of a tile votes for skipping it.

    A row without a key gives zeros.
    """
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    groups = query.shape[2] // key.shape[2]
    key, value = (x.double().repeat_interleave(groups, dim=2).transpose(1, 2) for x in (key, value))
    scores = query.double().transpose(1, 2) @ key.transpose(-1, -2) * scale
    if causal:
        keep = position_mask(*scores.shape[-2:], causal=True, window=None, device=scores.device)
        scores = scores.masked_fill(~keep, float("-inf"))
    rows = scores.shape[:-1]
    maximum = scores.new_full(rows, float("-inf"))
    denominator, numerator = scores.new_zeros(rows), scores.new_zeros(*rows, value.shape[-1])
    num_tiles = ceil(key.shape[2] / tile_keys)
    order = range(num_tiles) if tile_order is None else tile_order
    skipped = torch.zeros(*rows[:2], ceil(rows[2] / tile_queries), num_tiles, dtype=torch.bool)
    for visited, tile in enumerate(order):
        keys = slice(tile * tile_keys, (tile + 1) * tile_keys)
        tile_maximum = scores[..., keys].amax(-1)
        if visited:
            below = torch.exp(tile_maximum - maximum) < threshold
            skipped[..., tile] = _all_rows(below | (tile_maximum == float("-inf")), tile_queries)
        kept = ~skipped[..., tile].repeat_interleave(tile_queries, dim=-1)[..., : rows[2]]
        raised = torch.where(kept, torch.maximum(maximum, tile_maximum), maximum)
        base = raised.masked_fill(raised == float("-inf"), 0.0)
        weights = torch.exp(scores[..., keys] - base[..., None]).masked_fill(~kept[..., None], 0.0)
        shrink = torch.exp(maximum - base)
        numerator = numerator * shrink[..., None] + weights @ value[..., keys, :]
        denominator = denominator * shrink + weights.sum(-1)
        maximum = raised
    output = numerator / denominator.masked_fill(denominator == 0, 1.0)[..., None]
    return output.transpose(1, 2).contiguous(), skipped


def _all_rows(votes_BHS: torch.Tensor, tile_queries: int) -> torch.Tensor:
    """[B, H, N]: every row of a query tile votes for skipping; rows behind the last query do."""
    missing = -votes_BHS.shape[-1] % tile_queries
    votes = pad(votes_BHS, (0, missing), value=True)
    return votes.view(*votes.shape[:-1], -1, tile_queries).all(-1)
