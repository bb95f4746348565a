"""Dense attention beside a sparse call, in chunks of queries: what the selected blocks keep of it, and the errors.

Legend: B batch, H heads, Q query blocks, K key blocks, N rows of a chunk, E slots of a key block, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from omni_attn.ops.block_sparse.selection import BlockSelection, block_map

#: Scores of one chunk: 128 MiB in float32. About six such tensors live at once.
CHUNK_SCORES = 2**25


@dataclass(frozen=True, eq=False)
class Comparison:
    """A sparse call against dense attention over the same tensors. All tensors are on the CPU, in float64 but for mass.

    Attributes:
        mass: [B, H, Q, K] float32, share of the dense softmax on a key block, mean of a query block's tokens.
        kept: [B, H, Q], share that falls on the selected blocks.
        dense: [B, H], squared norm of the dense output.
        deviations: by name of the output, [B, H], squared norm of its difference from the dense output.
        sparse_alone: the same for exact attention over the selected blocks, without summaries or a coarse term.
        kernel: squared norm of the difference between the call's own output and exact attention over the selected
            blocks, with the summaries or the coarse term that belong to it; kernel_norm: that of the latter.
    """

    mass: torch.Tensor
    kept: torch.Tensor
    dense: torch.Tensor
    deviations: Mapping[str, torch.Tensor]
    sparse_alone: torch.Tensor
    kernel: torch.Tensor
    kernel_norm: torch.Tensor


def compare_with_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    selection: BlockSelection,
    softmax_scale: float,
    *,
    others: Mapping[str, torch.Tensor] | None = None,
    chunk_scores: int = CHUNK_SCORES,
) -> Comparison:
    """Computes all scores once, one head and some queries at a time; in float64 on a CPU, in float32 elsewhere.

    Memory beyond the arguments: about six times `chunk_scores` numbers, and B H Q K floats of result on the CPU.

    Args:
        query, key, value: [B, Sq, H, D], [B, Sk, G, D], [B, Sk, G, Dv].
        output: [B, Sq, H, Dv], what the sparse call gave.
        selection: what it computed.
        others: outputs of other kernels, by name, that are compared with dense attention as well.
        chunk_scores: most scores at a time.
    """
    run = _Run(query, key, value, selection, softmax_scale, {"output": output, **(others or {})})
    rows = max(1, chunk_scores // (run.keys.num_blocks * run.keys.capacity))
    for item in range(query.shape[0]):
        for head in range(query.shape[2]):
            run.head(item, head, rows)
    return run.result()


class _Run:
    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        selection: BlockSelection,
        scale: float,
        outputs: Mapping[str, torch.Tensor],
    ) -> None:
        self.query, self.key, self.value, self.outputs, self.scale = query, key, value, outputs, scale
        self.selection = selection
        self.queries, self.keys = selection.query_blocks, selection.key_blocks
        self.chosen = block_map(selection.selected, self.keys.num_blocks)
        self.wide = torch.float64 if query.device.type == "cpu" else torch.float32
        slots = torch.arange(self.keys.capacity, device=query.device)
        self.is_pad = (slots >= self.keys.block_sizes[:, None]).flatten()  # [K * E]
        heads = (query.shape[0], query.shape[2])
        self.mass = torch.zeros(*heads, self.queries.num_blocks, self.keys.num_blocks)
        self.kept = torch.zeros(*heads, self.queries.num_blocks, dtype=torch.float64)
        names = ("dense", "sparse_alone", "kernel", "kernel_norm", *outputs)
        self.squares = {name: torch.zeros(heads, dtype=torch.float64) for name in names}

    def head(self, item: int, head: int, rows: int) -> None:
        """One head of one item, `rows` queries at a time, in block order."""
        group = head // (self.query.shape[2] // self.key.shape[2])
        keys, values = (
            self.keys.pack(tensor[item : item + 1, : self.keys.tokens, group].to(self.wide))[0]
            for tensor in (self.key, self.value)
        )
        means = [x.view(self.keys.num_blocks, self.keys.capacity, -1).sum(1) for x in (keys, values)]
        mean_keys, mean_values = (x / self.keys.block_sizes[:, None] for x in means)
        bias = self.keys.block_sizes.to(self.wide).log()
        blocks = self.queries.num_blocks
        mass = keys.new_zeros(blocks, self.keys.num_blocks)
        kept = keys.new_zeros(blocks)
        squares = dict.fromkeys(self.squares, keys.new_zeros(()))
        for tokens in torch.split(self.queries.order.long(), rows):
            block = self.queries.block_of[tokens]
            query = self.query[item, tokens, head].to(self.wide)
            scores = query @ keys.mT * self.scale
            scores = scores.masked_fill(self.is_pad, float("-inf"))
            dense = scores.softmax(-1)
            on_blocks = dense.view(len(tokens), -1, self.keys.capacity).sum(-1)  # [N, K]
            chosen = self.chosen[item, head][block]
            mass.index_add_(0, block, on_blocks)
            kept.index_add_(0, block, (on_blocks * chosen).sum(-1))
            left_out = ~chosen.repeat_interleave(self.keys.capacity, -1)
            scores = scores.masked_fill(left_out, float("-inf"))
            alone = exact = _weights(scores) @ values
            if self.selection.summaries:
                of_means = (query @ mean_keys.mT * self.scale + bias).masked_fill(chosen, float("-inf"))
                exact = _weights(torch.cat([scores, of_means], -1)) @ torch.cat([values, mean_values])
            parts = self._parts(item, head, tokens, block, dense @ values, alone, exact)
            for name, part in parts.items():
                squares[name] = squares[name] + part.square().sum()
        sizes = self.queries.block_sizes
        self.mass[item, head] = (mass / sizes[:, None]).float().cpu()
        self.kept[item, head] = (kept / sizes).double().cpu()
        for name, square in squares.items():
            self.squares[name][item, head] = square.double().cpu()

    def _parts(
        self,
        item: int,
        head: int,
        tokens: torch.Tensor,
        block: torch.Tensor,
        dense: torch.Tensor,
        alone: torch.Tensor,
        exact: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Differences whose squares are summed, each [N, Dv]."""
        outputs = {name: x[item, tokens, head].to(self.wide) for name, x in self.outputs.items()}
        coarse = self.selection.coarse
        if coarse is not None:
            added = coarse.output[item, head, block].to(self.wide)
            if coarse.gate is not None:
                added = added * coarse.gate[item, tokens, head].to(self.wide)
            exact = exact + added
        return {
            "dense": dense,
            "sparse_alone": alone - dense,
            "kernel": outputs["output"] - exact,
            "kernel_norm": exact,
            **{name: found - dense for name, found in outputs.items()},
        }

    def result(self) -> Comparison:
        own = {name: self.squares[name] for name in ("dense", "sparse_alone", "kernel", "kernel_norm")}
        deviations = {name: self.squares[name] for name in self.outputs}
        return Comparison(mass=self.mass, kept=self.kept, deviations=deviations, **own)


def _weights(scores: torch.Tensor) -> torch.Tensor:
    """Softmax; a row without a key is zeros."""
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
