"""CommonAttentionMetadata: what a step over a paged KV cache looks like, before any backend makes its own of it.

Legend: R requests, T query tokens of all requests, W pages a request may have, P tokens of a page.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from omni_attn.backends.paged_axes import along, cut_fields, pad_fields
from omni_attn.errors import MetadataError

PAD_SLOT = -1
"""A slot that is not written."""
NULL_BLOCK = 0
"""The page that is never given out: rows of a block table are filled with it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CommonAttentionMetadata:
    """What one step looks like for the layers of one KV-cache group. Frozen; padding is a part of it.

    Padding is a request without tokens and keys, with NULL_BLOCK alone in its row, or a token with PAD_SLOT that
    belongs to no request. A model may add fields in a frozen subclass; `along` tells what cutting and padding do to
    them. Who overwrites a tensor of a step in place, and torch does not count that (inference mode, kernels of one's
    own), makes a new object for the next step: equal objects are not built anew.

    Attributes:
        query_start_loc: int32 [R + 1] on the device, exclusive sums of the query lengths, from 0.
        query_start_loc_cpu: the same on the host.
        seq_lens: int32 [R] on the device, keys of each request with this step's own: earlier ones + query length.
        seq_lens_cpu: the same, or an upper bound, on the host; None = only the device knows.
        num_reqs: R; num_actual_tokens: T; both with padding.
        max_query_len, max_seq_len: longest query, and an upper bound of the keys.
        block_table: int32 [R, W] on the device, pages of each request in order; NULL_BLOCK behind them.
        slot_mapping: int64 [T] on the device, page * P + place of each token that is written, PAD_SLOT = not; None =
            nothing is written in this step.
        causal: bottom-right aligned causal attention, for all requests or, as int32 [R] on the device, for each.
        is_prefilling: bool [R] on the host: the request's prompt is not yet complete.
    """

    query_start_loc: torch.Tensor = field(metadata=along("boundaries"))
    query_start_loc_cpu: torch.Tensor = field(metadata=along("boundaries"))
    seq_lens: torch.Tensor = field(metadata=along("requests"))
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table: torch.Tensor = field(metadata=along("requests", fill=NULL_BLOCK))
    slot_mapping: torch.Tensor | None = field(default=None, metadata=along("tokens", fill=PAD_SLOT))
    seq_lens_cpu: torch.Tensor | None = field(default=None, metadata=along("requests"))
    causal: bool | torch.Tensor = field(default=True, metadata=along("requests", fill=1))
    is_prefilling: torch.Tensor | None = field(default=None, metadata=along("requests"))

    def __post_init__(self) -> None:
        rows = {
            "query_start_loc": (self.query_start_loc, self.num_reqs + 1),
            "query_start_loc_cpu": (self.query_start_loc_cpu, self.num_reqs + 1),
            "seq_lens": (self.seq_lens, self.num_reqs),
            "seq_lens_cpu": (self.seq_lens_cpu, self.num_reqs),
            "block_table": (self.block_table, self.num_reqs),
            "is_prefilling": (self.is_prefilling, self.num_reqs),
        }
        for name, (tensor, wanted) in rows.items():
            if tensor is not None and tensor.shape[0] != wanted:
                raise MetadataError(
                    f"{name} has {tensor.shape[0]} rows, and num_reqs={self.num_reqs} needs {wanted}: state both alike"
                )
            if tensor is not None and tensor.dtype not in (torch.int32, torch.bool):
                raise MetadataError(f"{name} is {tensor.dtype}: needs torch.int32, which kernels read")
        causal, slots = self.causal, self.slot_mapping
        if isinstance(causal, torch.Tensor) and (
            causal.dtype != torch.int32 or causal.shape != (self.num_reqs,)
        ):
            raise MetadataError(
                f"causal by request is a {causal.dtype} tensor of shape {tuple(causal.shape)}: needs torch.int32 "
                f"[{self.num_reqs}], or a bool for all requests"
            )
        if slots is not None and slots.dtype != torch.int64:
            raise MetadataError(
                f"slot_mapping is {slots.dtype}: needs torch.int64, since a cache may hold 2**31 slots"
            )
        if slots is not None and slots.shape[0] > self.num_actual_tokens:
            raise MetadataError(
                f"slot_mapping has {slots.shape[0]} slots, and the step num_actual_tokens={self.num_actual_tokens}: a "
                "token has one slot"
            )

    def replace(self, **changes: Any) -> Self:
        """The same with other values in some fields."""
        return replace(self, **changes)

    def padded(self, num_reqs: int, num_tokens: int) -> Self:
        """The same step with requests without tokens, and tokens of no request, behind its own.

        Raises:
            MetadataError: the step is larger than that.
        """
        if num_reqs < self.num_reqs or num_tokens < self.num_actual_tokens:
            raise MetadataError(
                f"padding to {num_reqs} requests and {num_tokens} tokens: the step has {self.num_reqs} and "
                f"{self.num_actual_tokens}; choose a size that holds it"
            )
        grown = pad_fields(self, num_reqs, num_tokens)
        return replace(self, **grown, num_reqs=num_reqs, num_actual_tokens=num_tokens)

    def unpadded(self, num_reqs: int, num_tokens: int) -> Self:
        """The first requests and tokens alone; what is left out has to be padding.

        Raises:
            MetadataError: a request with tokens would be left out, or the step is smaller than that.
        """
        if num_reqs > self.num_reqs or num_tokens > self.num_actual_tokens:
            raise MetadataError(
                f"taking {num_reqs} requests and {num_tokens} tokens: the step has only {self.num_reqs} and "
                f"{self.num_actual_tokens}"
            )
        kept, real = int(self.query_start_loc_cpu[num_reqs]), int(self.query_start_loc_cpu[-1])
        if kept < real or num_tokens < real:
            raise MetadataError(
                f"taking {num_reqs} requests with {kept} tokens, and {num_tokens} tokens: the step has {real} tokens "
                "that are no padding; cut it with sliced()"
            )
        cut = cut_fields(self, (0, num_reqs), (0, num_tokens))
        return replace(self, **cut, num_reqs=num_reqs, num_actual_tokens=num_tokens)

    def sliced(self, requests: tuple[int, int], tokens: tuple[int, int] | None = None) -> Self:
        """A part of the step as a step of its own, for micro-batches and for kernels that serve a part.

        The first request may begin earlier: its earlier tokens count as keys. The last one may go on behind the part:
        its later tokens count neither as queries nor as keys, which only causal attention allows.

        Args:
            requests: from, and up to but not including.
            tokens: the same, of the whole step; None = all tokens of those requests, with padding behind the last.

        Raises:
            MetadataError: the tokens do not lie in those requests, or cut a request of non-causal attention.
        """
        first, end = requests
        if not 0 <= first < end <= self.num_reqs:
            raise MetadataError(
                f"requests {first} to {end} of a step with {self.num_reqs}: needs at least one of them"
            )
        starts = self.query_start_loc_cpu[first : end + 1].tolist()
        behind = self.num_actual_tokens if end == self.num_reqs else starts[-1]
        begin, stop = (starts[0], behind) if tokens is None else tokens
        if not (starts[0] <= begin <= starts[1] and starts[-2] <= stop <= behind and begin <= stop):
            raise MetadataError(
                f"tokens {begin} to {stop} do not begin in request {first} and end in request {end - 1}, which have "
                f"tokens {starts[0]} to {starts[1]} and {starts[-2]} to {behind}"
            )
        dropped = max(0, starts[-1] - stop)
        if dropped and self.causal is not True:
            raise MetadataError(
                f"request {end - 1} would be cut {dropped} tokens before its end, and its attention is not causal: "
                "queries in front would miss those keys. Cut between requests"
            )
        cut = cut_fields(self, requests, (begin, stop))
        for name in ("query_start_loc", "query_start_loc_cpu"):
            cut[name] = cut[name].clamp(begin, stop) - begin
        if dropped:
            for name in ("seq_lens", "seq_lens_cpu"):
                if (lengths := cut.get(name)) is not None:
                    cut[name] = torch.cat((lengths[:-1], lengths[-1:] - dropped))
        bound, host = self.max_seq_len, cut.get("seq_lens_cpu")
        queries = cut["query_start_loc_cpu"].diff()
        return replace(
            self,
            **cut,
            num_reqs=end - first,
            num_actual_tokens=stop - begin,
            max_query_len=int(queries.max()),
            max_seq_len=bound if host is None else min(bound, int(host.max())),
        )
