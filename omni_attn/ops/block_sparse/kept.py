"""What is made once of a partition: it lives as long as the partition does, and serves every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, TypeVarTuple

import torch

from omni_attn.errors import MetadataError


class Owner(Protocol):
    """What such things are kept with."""

    @property
    def made(self) -> dict[Any, Any]: ...

    @property
    def device(self) -> torch.device: ...


_Owner = TypeVar("_Owner", bound=Owner)
_Made = TypeVar("_Made")
_Numbers = TypeVarTuple("_Numbers")
_captured: set[Any] = set()


def kept(make: Callable[[_Owner, *_Numbers], _Made]) -> Callable[[_Owner, *_Numbers], _Made]:
    """A function of an owner and host numbers that computes each answer once.

    Raises (the function):
        MetadataError: it was never asked before, and a CUDA graph is being captured.
    """

    @wraps(make)
    def find(owner: _Owner, *numbers: *_Numbers) -> _Made:
        found: _Made | None = owner.made.get((make, *numbers))
        if found is None:
            refuse_in_capture(owner.device)
            with torch.inference_mode(False):  # what is kept must serve calls with gradients too
                found = owner.made[make, *numbers] = make(owner, *numbers)
        return found

    return find


def refuse_in_capture(device: torch.device) -> None:
    """Before anything is made that later calls read.

    Raises:
        MetadataError: a CUDA graph is being captured, whose replays alone would fill it.
    """
    if is_capturing(device):
        raise MetadataError(
            "block-sparse attention cannot make the lists of a grid inside a CUDA-graph capture, where the first call "
            "with this grid lies: run it once before capturing"
        )


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep_captured(owner: Any, device: torch.device) -> None:
    """Keeps what a cache may drop for good where a graph is being captured, which knows its tensors by address only."""
    if is_capturing(device):
        _captured.add(owner)
