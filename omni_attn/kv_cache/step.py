"""What the paged layers of a model get in a step; it is handed to them, nothing is looked up behind their back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from omni_attn.errors import MetadataError


class PagedCall(NamedTuple):
    """One layer's call of a step.

    Attributes:
        metadata: M of the layer's group.
        kv_cache: the layer's pages, or those of the layer whose cache it reads.
        slot_mapping: int64 [T] on the device, where new keys and values go; None = nothing is written.
        num_tokens: query tokens that M is about; rows of a tensor behind them are padding that no kernel sees.
    """

    metadata: Any
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor | None
    num_tokens: int


class PagedStep:
    """The calls of all paged layers in one step, by layer name; made by `make_step`.

    A model hands it to its layers. Where blocks are compiled one by one, hand each its own `step[name]`, so that equal
    blocks look equal to the compiler.
    """

    __slots__ = ("calls",)

    def __init__(self, calls: Mapping[str, PagedCall]) -> None:
        self.calls = calls

    def __getitem__(self, name: str) -> PagedCall:
        call = self.calls.get(name)
        if call is None:
            known = ", ".join(self.calls) or "none"
            raise MetadataError(
                f"layer {name!r} has no part in this step, which was made for {known}: give it to "
                "init_attention_groups with the others"
            )
        return call
