"""Where tokens go: slot = page * tokens of a page + place in it."""

from __future__ import annotations

import torch

from omni_attn.backends.paged import PAD_SLOT
from omni_attn.errors import MetadataError


def slots_of(
    block_table: torch.Tensor, first: torch.Tensor, count: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Slots of the tokens [first, first + count) of each row, one row behind the other.

    Args:
        block_table: [R, W] on the host, pages of each row in order.
        first, count: int64 [R] on the host.

    Returns:
        int64 [count.sum()] on the host.
    """
    row = torch.repeat_interleave(count)
    begin = count.cumsum(0) - count
    token = torch.arange(row.numel()) + (first - begin)[row]
    return block_table[row, token // block_size].long() * block_size + token % block_size


def check_slots(slot_mapping: torch.Tensor, num_blocks: int, block_size: int) -> None:
    """Holds slots that somebody brings against the cache; for the host, since it reads every number.

    Args:
        slot_mapping: int64 [T]; -1 = not written.
        num_blocks, block_size: of the cache.

    Raises:
        MetadataError: another dtype or shape, a slot outside of the cache or within its null block, or one slot twice.
    """
    if slot_mapping.dtype != torch.int64 or slot_mapping.ndim != 1:
        raise MetadataError(
            f"slot_mapping is {slot_mapping.dtype} {list(slot_mapping.shape)}: slots are one row of torch.int64"
        )
    slots = slot_mapping[slot_mapping != PAD_SLOT]
    outside = slots[(slots < block_size) | (slots >= num_blocks * block_size)]
    if outside.numel():
        raise MetadataError(
            f"slot {int(outside[0])} is out of range: {num_blocks} pages of {block_size} tokens have slots "
            f"{block_size} to {num_blocks * block_size - 1} (page 0 is never written), and {PAD_SLOT} skips a token"
        )
    written, times = torch.unique(slots, return_counts=True)
    if (times > 1).any():
        raise MetadataError(
            f"slot {int(written[times > 1][0])} is named {int(times.max())} times in one step, so that which token it "
            "keeps is left to chance. Give each token a slot of its own"
        )
