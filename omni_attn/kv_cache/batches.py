"""Which batches one captured graph serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from omni_attn.backends.paged import CommonAttentionMetadata

Commons = Mapping[Any, CommonAttentionMetadata]
"""One step: KV-cache group -> its common metadata; all state the same requests and tokens."""


@dataclass(frozen=True, kw_only=True)
class BatchDescriptor:
    """The size of a batch, or the largest one that a graph serves.

    Attributes:
        num_tokens, num_reqs: query tokens and requests, with padding.
        query_len: every request has exactly so many query tokens; None = they may differ.
        max_seq_len: most keys of a request, this step's own included.

    Raises:
        ValueError: num_tokens is not num_reqs times query_len, or a number is not positive.
    """

    num_tokens: int
    num_reqs: int
    query_len: int | None = None
    max_seq_len: int

    def __post_init__(self) -> None:
        if min(self.num_tokens, self.num_reqs, self.max_seq_len, self.query_len or 1) < 1:
            raise ValueError(f"{self}: all of its numbers have to be positive")
        if self.query_len is not None and self.num_tokens != self.num_reqs * self.query_len:
            raise ValueError(
                f"{self.num_reqs} requests of {self.query_len} query tokens are {self.num_reqs * self.query_len} "
                f"tokens, found num_tokens={self.num_tokens}"
            )

    @classmethod
    def of(cls, commons: Commons, **bounds: int) -> Self:
        """The size of a step without padding; one that is padded all the same counts as mixed.

        Args:
            bounds: fields that are larger than in this step, `max_seq_len` most of all.

        Raises:
            ValueError: groups of the step differ in size, or there is none.
        """
        sizes = {(c.num_actual_tokens, c.num_reqs, c.max_query_len) for c in commons.values()}
        if len(sizes) != 1:
            raise ValueError(
                f"groups of one step have the same tokens, requests and queries, found {sorted(sizes)}"
            )
        ((tokens, requests, longest),) = sizes
        starts = next(iter(commons.values())).query_start_loc_cpu
        uniform = longest * requests == tokens == int(starts[-1])  # tokens of padding do not fill a query up
        own: dict[str, int | None] = {
            "num_tokens": tokens,
            "num_reqs": requests,
            "query_len": longest if uniform else None,
            "max_seq_len": max(c.max_seq_len for c in commons.values()),
        }
        return cls(**(own | bounds))  # type: ignore[arg-type]

    @property
    def max_query_len(self) -> int:
        """Longest query that a batch of this size can have."""
        return self.num_tokens if self.query_len is None else self.query_len

    def takes(self, batch: BatchDescriptor) -> bool:
        """Whether the batch is of this size once it is padded."""
        return (
            self.query_len in (None, batch.query_len)
            and self.num_tokens >= batch.num_tokens
            and self.num_reqs >= batch.num_reqs
            and self.max_seq_len >= batch.max_seq_len
        )

    @property
    def order(self) -> tuple[int, ...]:
        """Sorts the graph that wastes least first, those of uniform batches before all others."""
        return int(self.query_len is None), self.num_tokens, self.num_reqs, self.max_seq_len


_SIZES = frozenset({"num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"})


def form_of(commons: Commons) -> tuple[object, ...]:
    """What else a graph holds of a step: which fields it has, their dtypes and widths, and all of its plain values."""
    form: list[object] = []
    for group, common in commons.items():
        form += [group, type(common)]
        for field in fields(common):
            value = getattr(common, field.name)
            if isinstance(value, torch.Tensor):
                form.append((value.dtype, value.shape[1:], value.device.type))
            elif field.name not in _SIZES:
                form.append(value)
    return tuple(form)
