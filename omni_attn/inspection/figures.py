"""What was found about one call, per head and for all heads together, as plain numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from omni_attn.inspection.mass import Comparison
from omni_attn.ops.block_sparse.selection import BlockSelection, token_pairs


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one head, or of all.

    Attributes:
        head: its number, None = all of them.
        tiles: share of the key tiles that are selected, mean over query tiles.
        pairs: share of all (query token, key token) pairs that are computed; 1 - pairs is the effective sparsity.
        mass_kept: share of the dense softmax mass that falls on selected tiles, mean over query tokens.
        least_mass_kept: the same of the query tile that keeps least, and least_tile its number.
        error: norm of (output - dense output) / norm of the dense output.
        error_without_coarse: the same of exact attention over the selected tiles alone; equal in meaning to `error`
            where there are no summaries and no coarse term.
        kernel_error: norm of (output - what the selection says should come out) / norm of the latter.
    """

    head: int | None
    tiles: float
    pairs: float
    mass_kept: float
    least_mass_kept: float
    least_tile: int
    error: float
    error_without_coarse: float
    kernel_error: float

    @property
    def effective_sparsity(self) -> float:
        """Share of the pairs that are left out."""
        return 1 - self.pairs

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "effective_sparsity": self.effective_sparsity}


def figures_of_heads(selection: BlockSelection, compared: Comparison) -> tuple[Figures, ...]:
    """One entry per head; items of a batch count together."""
    return tuple(_figures(selection, compared, head) for head in range(compared.kept.shape[1]))


def figures_of_all(selection: BlockSelection, compared: Comparison) -> Figures:
    """All heads together: sums are over all of them, the least is the least of any."""
    return _figures(selection, compared, None)


def relative_error(squares: torch.Tensor, norm: torch.Tensor, head: int | None = None) -> float:
    """The root of squares [B, H] over those of the norm, of one head or of all."""
    heads = slice(None) if head is None else slice(head, head + 1)
    return float((squares[:, heads].sum() / norm[:, heads].sum()).sqrt())


def _figures(selection: BlockSelection, compared: Comparison, head: int | None) -> Figures:
    heads = slice(None) if head is None else slice(head, head + 1)
    queries, keys = selection.query_blocks, selection.key_blocks
    kept = compared.kept[:, heads]
    sizes = queries.block_sizes.cpu().double()
    pairs = token_pairs(selection)[:, heads]
    least = int(kept.argmin())
    return Figures(
        head=head,
        tiles=float(selection.selected.counts[:, heads].double().mean()) / keys.num_blocks,
        pairs=int(pairs.sum()) / (queries.tokens * keys.tokens * pairs.numel()),
        mass_kept=float((kept * sizes).sum() / (sizes.sum() * pairs.numel())),
        least_mass_kept=float(kept.min()),
        least_tile=least % queries.num_blocks,
        error=relative_error(compared.deviations["output"], compared.dense, head),
        error_without_coarse=relative_error(compared.sparse_alone, compared.dense, head),
        kernel_error=relative_error(compared.kernel, compared.kernel_norm, head),
    )
