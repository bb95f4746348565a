"""Float64 attention of some query rows, over the blocks that a candidate itself chose: what benchmarks judge by.

In torch alone: the library's own means, top-k and executors are among what is judged.
Legend: B batch, S tokens, H heads, D head size, N blocks, R sampled query rows.
"""

from __future__ import annotations

from functools import cached_property

import torch

from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.reference import reference_attention

SAMPLED_ROWS = 64


class SampledRows:
    """Query, key and value of one call, [B, S, H, D] each, and some of the rows.

    Attributes:
        rows: int64 [R], ascending.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        rows: int = SAMPLED_ROWS,
    ) -> None:
        self._query, self._key, self._value, self._scale = query, key, value, scale
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randperm(query.shape[1], generator=generator)[:rows].sort().values.to(query.device)

    @cached_property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, R, H, D] and lse [B, H, R] over all keys."""
        return self._by_head(None, None, summaries=False)

    def over(
        self, selected: torch.Tensor, blocks: BlockPartition, *, summaries: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, R, H, D] and lse [B, H, R] over the key blocks chosen for each row's block.

        Args:
            selected: bool [B, H, N, N].
            summaries: each block that is not chosen stands in the same softmax as one key: its mean, weighted with the
                number of its tokens.
        """
        return self._by_head(selected, blocks, summaries=summaries)

    def scores(self, blocks: BlockPartition) -> torch.Tensor:
        """Between block means, [B, H, N, N]."""
        return exact_means(self._query, blocks) @ exact_means(self._key, blocks).mT * self._scale

    def coarse(self, blocks: BlockPartition) -> torch.Tensor:
        """Attention between block means, for the sampled rows: [B, R, H, D]."""
        attended = self.scores(blocks).softmax(-1) @ exact_means(self._value, blocks)
        return attended[:, :, blocks.block_of[self.rows]].transpose(1, 2)

    def error(self, output: torch.Tensor, expected: torch.Tensor) -> float:
        """Relative Frobenius error of an output [B, S, H, D] on the sampled rows."""
        difference = output[:, self.rows].double() - expected
        return float(difference.norm() / expected.norm())

    def _by_head(
        self, selected: torch.Tensor | None, blocks: BlockPartition | None, *, summaries: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One head after the other, to bound memory."""
        outputs, lses = [], []
        for head in range(self._query.shape[2]):
            one = slice(head, head + 1)
            query, key, value = self._query[:, self.rows, one], self._key[:, :, one], self._value[:, :, one]
            mask = None
            if selected is not None and blocks is not None:
                chosen = selected[:, one, blocks.block_of[self.rows]]
                mask = chosen.index_select(-1, blocks.block_of)
                if summaries:
                    weights = blocks.block_sizes.double().log().expand(chosen.shape)
                    mask = torch.cat([_bias(mask), weights.masked_fill(chosen, float("-inf"))], -1)
                    key, value = (
                        torch.cat([x.double(), exact_means(x, blocks).transpose(1, 2)], 1)
                        for x in (key, value)
                    )
            output, lse = reference_attention(query, key, value, softmax_scale=self._scale, attn_mask=mask)
            outputs.append(output)
            lses.append(lse)
        return torch.cat(outputs, 2), torch.cat(lses, 1)


def exact_means(tensor: torch.Tensor, blocks: BlockPartition) -> torch.Tensor:
    """[B, S, H, D] -> float64 [B, H, N, D]."""
    batch, _, heads, size = tensor.shape
    sums = torch.zeros(batch, blocks.num_blocks, heads, size, dtype=torch.float64, device=tensor.device)
    sums.index_add_(1, blocks.block_of, tensor.double())
    return (sums / blocks.block_sizes[:, None, None]).transpose(1, 2)


def best_blocks(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """bool [..., N]: the topk best of each row; among equals the lowest."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def _bias(keep: torch.Tensor) -> torch.Tensor:
    return torch.zeros(keep.shape, dtype=torch.float64, device=keep.device).masked_fill(~keep, float("-inf"))
