"""What block-sparse kernels compute: the rows of a query block over listed key rows, and nothing else is looked at."""

from __future__ import annotations

from collections.abc import Callable

import torch

from omni_attn.ops.reference import reference_attention

#: (batch, head, query block) -> numbers of the key rows it sees.
KeyRows = Callable[[int, int, int], torch.Tensor]


def attend_listed(
    query_BHRD: torch.Tensor,
    key_BGRD: torch.Tensor,
    value_BGRD: torch.Tensor,
    unit: int,
    key_rows: KeyRows,
    softmax_scale: float,
) -> torch.Tensor:
    """Output [B, H, R, Dv] in query's dtype; a query block without a key row gives zeros."""
    batch, heads, rows, _ = query_BHRD.shape
    assert rows % unit == 0, f"{rows} query rows are no whole number of blocks of {unit}"
    repeats = heads // key_BGRD.shape[1]
    output = query_BHRD.new_empty(batch, heads, rows, value_BGRD.shape[-1])
    if output.is_meta:  # shapes alone
        return output
    for b in range(batch):
        for h in range(heads):
            for block in range(rows // unit):
                listed = key_rows(b, h, block)
                assert len(set(listed.tolist())) == listed.numel(), "a key row is listed twice"
                own = slice(block * unit, (block + 1) * unit)
                output[b, h, own] = attend_rows(
                    query_BHRD[b, h, own],
                    key_BGRD[b, h // repeats, listed],
                    value_BGRD[b, h // repeats, listed],
                    softmax_scale,
                )
    return output


def attend_rows(
    query_RD: torch.Tensor, key_RD: torch.Tensor, value_RD: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Output [R, Dv] of one head in query's dtype."""
    tensors = (x[None, :, None] for x in (query_RD, key_RD, value_RD))
    return reference_attention(*tensors, softmax_scale=softmax_scale)[0][0, :, 0].to(query_RD.dtype)


def block_rows(
    indices: torch.Tensor, counts: torch.Tensor, sizes: torch.Tensor, unit: int, blocks: tuple[int, int]
) -> KeyRows:
    """Key rows of listed blocks of `unit` rows, of which block j holds sizes[j] tokens.

    Args:
        indices, counts: [B, H, query blocks, cap] and [B, H, query blocks], int32.
        blocks: how many query and key blocks there are.
    """
    for tensor in (indices, counts, sizes):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous(), "lists and sizes: contiguous int32"
    assert indices.shape[:3] == counts.shape and counts.shape[2] == blocks[0], "one list for each query block"
    assert sizes.shape == (blocks[1],), f"{blocks[1]} key blocks, {tuple(sizes.shape)} sizes"
    assert indices.shape[-1] >= 1, "an empty list"
    assert counts.is_meta or int(counts.max()) <= indices.shape[-1], "a count is beyond its list"

    def key_rows(b: int, h: int, block: int) -> torch.Tensor:
        listed = indices[b, h, block, : int(counts[b, h, block])].long()
        assert bool(((listed >= 0) & (listed < blocks[1])).all()), "a listed block is none"
        return torch.cat(
            [torch.arange(0), *(torch.arange(j * unit, j * unit + sizes[j]) for j in listed.tolist())]
        )

    return key_rows
