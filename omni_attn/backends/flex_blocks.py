"""Masks as flex_attention takes them: a rule per token pair, and which tiles of the scores it touches.

The tiles are worked out from lengths, boundaries or one reduction of a given mask, never by asking the rule about each
pair: torch's create_block_mask does that, and needs a compiler or the whole [Sq, Sk] matrix in memory. What is left
out here is only speed: a tile that is called touched is judged pair by pair in the kernel.

Legend: B batch, H heads, S sequence (q query, k key), N tiles of 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks

from omni_attn.ops.masks import sequence_of

TILE = 128
#: (batch, head, query, key) as integer tensors -> True where the query sees the key.
Keep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Rule:
    """One reason not to see a key.

    Attributes:
        name: which of the functions below made it.
        keep: the rule; None where scores are hidden by what is added to them.
        touched: bool [B|1, H|1, Nq, Nk], False for tiles in which nothing is seen.
        full: the same, True for tiles in which all pairs are seen.
    """

    name: str
    keep: Keep | None
    touched: torch.Tensor
    full: torch.Tensor


def position_rule(
    lengths: tuple[int, int], *, causal: bool, window: tuple[int, int] | None, device: torch.device
) -> Rule:
    """Causal and windowed attention, aligned at the bottom right; see ops.masks.position_mask."""
    shift = lengths[1] - lengths[0]
    left, right = _reach(causal, window)

    def keep(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return _near(q + shift, k, left, right)

    positions = torch.arange(lengths[0], device=device) + shift
    tiles = (_tiles(positions), _tiles(torch.arange(lengths[1], device=device)))
    touched, full = _near_tiles(*tiles, left, right)
    return Rule("positions", keep, touched[None, None], full[None, None])


def padding_rule(mask: torch.Tensor, lengths: tuple[int, int]) -> Rule:
    """A bool key-padding mask [B, Sk]."""

    def keep(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return mask[b, k]

    tiles = _tiles(mask)[:, None, None]
    rows = (-1, -1, _count(lengths[0]), -1)
    return Rule("padding", keep, tiles.any(-1).expand(rows), tiles.all(-1).expand(rows))


def mask_rule(mask: torch.Tensor) -> Rule:
    """A bool mask [B|1, H|1, Sq, Sk]."""
    steps = index_steps(mask)

    def keep(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return mask[b * steps[0], h * steps[1], q, k]

    return Rule(
        "mask", keep, _over_rows(_tiles(mask).any(-1), torch.any), _over_rows(_tiles(mask).all(-1), torch.all)
    )


def bias_rule(bias: torch.Tensor, lengths: tuple[int, int]) -> Rule:
    """A float mask [B|1, H|1, Sq|1, Sk]: it is added, and -inf hides, so that there is nothing left to keep."""
    touched = _over_rows(_tiles(bias > float("-inf")).any(-1), torch.any)
    touched = touched.expand(-1, -1, _count(lengths[0]), -1)
    return Rule("bias", None, touched, touched)


def document_rule(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    lengths: tuple[int, int],
    *,
    causal: bool,
    window: tuple[int, int] | None,
) -> Rule:
    """Packed sequences with int32 boundaries [N + 1] on the device; see ops.masks.document_mask."""
    ends_q, ends_k = cu_seqlens_q[1:], cu_seqlens_k[1:]
    count = ends_q.numel()
    token_q = torch.arange(lengths[0], device=ends_q.device)
    token_k = torch.arange(lengths[1], device=ends_q.device)
    document_q, document_k = sequence_of(cu_seqlens_q, token_q), sequence_of(cu_seqlens_k, token_k)
    # Counted from the end of its own sequence, so that the last query stands at the last key.
    position_q = token_q - ends_q[document_q.clamp(max=count - 1)]
    position_k = token_k - ends_k[document_k.clamp(max=count - 1)]
    left, right = _reach(causal, window)

    def keep(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        same = (document_q[q] == document_k[k]) & (document_k[k] < count)
        if left < 0 and right < 0:
            return same
        return same & _near(position_q[q], position_k[k], left, right)

    first_q, last_q = (x[:, None] for x in _tiles(document_q).aminmax(dim=-1))
    first_k, last_k = (x[None, :] for x in _tiles(document_k).aminmax(dim=-1))
    near, all_near = _near_tiles(_tiles(position_q), _tiles(position_k), left, right)
    touched = (first_k <= last_q) & (first_q <= last_k) & (first_k < count) & near
    full = (first_q == last_q) & (first_k == last_k) & (first_q == first_k) & (first_k < count) & all_near
    return Rule("documents", keep, touched[None, None], full[None, None])


def build_block_mask(rules: tuple[Rule, ...], lengths: tuple[int, int]) -> BlockMask:
    """What all rules together let through, for flex_attention; batch and heads are those of the rules."""
    keeps = [rule.keep for rule in rules if rule.keep is not None]
    touched, full = rules[0].touched, rules[0].full
    for rule in rules[1:]:
        touched, full = touched & rule.touched, full & rule.full
    for dim, length in ((-2, lengths[0]), (-1, lengths[1])):
        if keeps and length % TILE:  # the kernel judges tiles that hang over an end pair by pair
            inside = torch.arange(full.shape[dim], device=full.device) < length // TILE
            full = full & (inside[:, None] if dim == -2 else inside)
    partial = touched & ~full
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(touched & full),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=and_masks(*keeps) if len(keeps) > 1 else keeps[0] if keeps else None,
        seq_lengths=lengths,
    )


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row of tiles, how many are True [..., Nq], and the numbers of those, then of the rest [..., Nq, Nk]."""
    order = torch.argsort(tiles.to(torch.uint8), dim=-1, descending=True, stable=True)
    dense = torch.contiguous_format  # the kernel reads both by offset
    return tiles.sum(-1).to(torch.int32, memory_format=dense), order.to(torch.int32, memory_format=dense)


def _count(length: int) -> int:
    return (length + TILE - 1) // TILE


def _tiles(per_token: torch.Tensor) -> torch.Tensor:
    """[..., S] as [..., N, 128]; a tile that hangs over repeats the last token, which changes no any, all or min."""
    length = per_token.shape[-1]
    if length % TILE:
        index = torch.arange(_count(length) * TILE, device=per_token.device).clamp(max=length - 1)
        per_token = per_token[..., index]
    return per_token.reshape(*per_token.shape[:-1], _count(length), TILE)


def _over_rows(per_row: torch.Tensor, over: Callable[..., torch.Tensor]) -> torch.Tensor:
    """[..., Sq, Nk] as [..., Nq, Nk], joined by torch.any or torch.all."""
    return over(_tiles(per_row.transpose(-2, -1)), dim=-1).transpose(-2, -1)


def index_steps(mask: torch.Tensor) -> tuple[int, ...]:
    """Per dimension 1, or 0 where one entry serves all indices."""
    return tuple(int(size > 1) for size in mask.shape)


def _reach(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """(left, right) tokens in sight of a position, -1 = all."""
    left, right = window or (-1, -1)
    return left, 0 if causal else right


def _near(position: torch.Tensor, key: torch.Tensor, left: int, right: int) -> torch.Tensor:
    near = key == key
    if right >= 0:
        near = near & (key <= position + right)
    if left >= 0:
        near = near & (key >= position - left)
    return near


def _near_tiles(
    query: torch.Tensor, key: torch.Tensor, left: int, right: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For tiles of positions [Nq, 128] and [Nk, 128]: where some, and where all pairs are near, [Nq, Nk]."""
    first_q, last_q = (x[:, None] for x in query.aminmax(dim=-1))
    first_k, last_k = (x[None, :] for x in key.aminmax(dim=-1))
    some = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device)
    every = some
    if right >= 0:
        some, every = some & (first_k <= last_q + right), every & (last_k <= first_q + right)
    if left >= 0:
        some, every = some & (last_k >= first_q - left), every & (first_k >= last_q - left)
    return some, every
