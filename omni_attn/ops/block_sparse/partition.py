"""BlockPartition: a sequence cut into blocks of tokens that belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omni_attn.errors import MetadataError
from omni_attn.ops.block_sparse.kept import kept, refuse_in_capture
from omni_attn.ops.layout import int32_on, without_waiting


@dataclass(frozen=True, eq=False)
class BlockPartition:
    """Block j holds the tokens `order[offsets[j] : offsets[j + 1]]` of a sequence of S tokens.

    Nothing here is padded: how many slots a block fills in a kernel's buffers is the kernel's own affair.

    Attributes:
        sizes: tokens of each block, host ints, each at least 1.
        capacity: the size of a whole block; no block is larger.
        order: int32 [S], token of the sequence at each place in block order.
        offsets: int32 [blocks + 1], first place of each block.
        made: what was made of the partition, see kept.py.
    """

    sizes: tuple[int, ...]
    capacity: int
    order: torch.Tensor
    offsets: torch.Tensor
    made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, order: torch.Tensor, sizes: Sequence[int], capacity: int, device: torch.device | str
    ) -> BlockPartition:
        """A partition on a device, from token numbers in block order and the blocks' sizes.

        Raises:
            MetadataError: the sizes do not add up to the tokens, or one is outside 1..capacity; or a CUDA graph is
                being captured on the device.
        """
        device = torch.device(device)
        refuse_in_capture(device)
        if sum(sizes) != order.numel() or not all(1 <= size <= capacity for size in sizes):
            raise MetadataError(
                f"a block partition needs sizes in 1..{capacity} that add up to its {order.numel()} tokens, found "
                f"sizes from {min(sizes, default=0)} to {max(sizes, default=0)} that add up to {sum(sizes)}"
            )
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + size)
        order = without_waiting(order.to(torch.int32), device)
        return cls(tuple(sizes), capacity, order, int32_on(device, offsets))

    @classmethod
    def in_order(cls, tokens: int, capacity: int, device: torch.device | str) -> BlockPartition:
        """Blocks of `capacity` tokens one behind the other, the last one as long as what is left."""
        sizes = [min(capacity, tokens - start) for start in range(0, tokens, capacity)]
        return cls.of(torch.arange(tokens, device="cpu"), sizes, capacity, device)

    @property
    def tokens(self) -> int:
        """S."""
        return self.order.numel()

    @property
    def num_blocks(self) -> int:
        return len(self.sizes)

    @property
    def device(self) -> torch.device:
        return self.order.device

    @property
    @kept
    def block_sizes(self) -> torch.Tensor:
        """The sizes as int32 [blocks]."""
        return self.offsets.diff()

    @property
    @kept
    def block_of(self) -> torch.Tensor:
        """int64 [S]: the block of each token of the sequence."""
        blocks = torch.arange(self.num_blocks, device=self.device)
        places = torch.repeat_interleave(blocks, self.block_sizes.long(), output_size=self.tokens)
        return torch.empty_like(places).scatter_(0, self.order.long(), places)

    @property
    @kept
    def places(self) -> torch.Tensor:
        """int64 [S]: the place of each token of the sequence in block order; the inverse of `order`."""
        numbers = torch.arange(self.tokens, device=self.device)
        return torch.empty_like(numbers).scatter_(0, self.order.long(), numbers)

    @kept
    def first(self, blocks: int) -> BlockPartition:
        """The first `blocks` blocks, which hold the first tokens of the sequence, as a partition of these."""
        tokens = sum(self.sizes[:blocks])
        return BlockPartition(
            self.sizes[:blocks],
            max(self.sizes[:blocks], default=1),
            self.order[:tokens],
            self.offsets[: blocks + 1],
        )

    @kept
    def behind(self, blocks: int) -> BlockPartition:
        """The blocks behind the first `blocks` ones, see `first`, as a partition of their tokens, numbered from 0."""
        tokens = sum(self.sizes[:blocks])
        return BlockPartition(
            self.sizes[blocks:],
            max(self.sizes[blocks:], default=1),
            self.order[tokens:] - tokens,
            self.offsets[blocks:] - tokens,
        )

    def slots(self, capacity: int | None = None) -> torch.Tensor:
        """int64 [S]: the slot of each token where every block owns `capacity` slots and fills the first of them."""
        capacity = capacity or self.capacity
        block_of = self.block_of
        return block_of * capacity + self.places - self.offsets.long()[block_of]

    def pack(self, tensor: torch.Tensor, capacity: int | None = None) -> torch.Tensor:
        """[B, S, ...] -> [B, blocks * capacity, ...] in block order, with zeros behind the tokens of a block."""
        slots = self.num_blocks * (capacity or self.capacity)
        packed = tensor.new_zeros(tensor.shape[0], slots, *tensor.shape[2:])
        return packed.index_copy(1, self.slots(capacity), tensor)

    def unpack(self, packed: torch.Tensor, capacity: int | None = None) -> torch.Tensor:
        """[B, blocks * capacity, ...] -> [B, S, ...] in sequence order; the inverse of `pack`."""
        return packed.index_select(1, self.slots(capacity))
