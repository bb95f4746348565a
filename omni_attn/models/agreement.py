"""What all ranks of a split model have to be given alike: each computes a piece of what should be one result."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from omni_attn.errors import MetadataError
from omni_attn.parallel.collectives import from_first
from omni_attn.parallel.context import Parallel, current_parallel

Made = TypeVar("Made", bound=Any)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_alike(parallel: Parallel, named: Mapping[str, object]) -> None:
    """Nothing if every rank holds the same; else an error on every rank.

    It waits for the device and for all ranks, so it is for the beginning of a run.

    Args:
        parallel: the ranks.
        named: tensors, and whatever else is told apart by its text, by the names a person gave them under.

    Raises:
        MetadataError: they differ; the text names what, and the ranks.
    """
    found = parallel.everyone.share_counts([fingerprint(value) for value in named.values()])
    for name, marks in zip(named, zip(*found, strict=True), strict=True):
        if other := [str(rank) for rank, mark in enumerate(marks) if mark != marks[0]]:
            raise MetadataError(
                f"{name} differs between the {len(marks)} ranks that split one sequence: rank {', '.join(other)} from "
                "rank 0. Give every rank the same, for noise from a generator of one seed"
            )


def of_first_rank(made: Made, device: torch.device) -> Made:
    """A dataclass with the tensors that the first rank made of the same input; the given one where nothing is split.

    Encoders on several GPUs may differ in the last bit, and ranks would then each compute a piece of another result.

    Args:
        made: its fields are tensors, or None.
        device: where ranks exchange.

    Raises:
        MetadataError: ranks made tensors of other shapes or dtypes.
    """
    parallel = current_parallel()
    if parallel is None or made is None:
        return made
    tensors = {
        field.name: tensor
        for field in fields(made)
        if isinstance(tensor := getattr(made, field.name), torch.Tensor)
    }
    check_alike(parallel, {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()})
    received = {
        name: from_first(parallel.everyone, tensor.to(device)).to(tensor.device)
        for name, tensor in tensors.items()
    }
    return replace(made, **received)


def fingerprint(value: object) -> int:
    """A number that is the same for equal values, and hardly ever for others."""
    if not isinstance(value, torch.Tensor):
        return zlib.crc32(repr(value).encode())
    bits = value.detach().contiguous().view(_INTEGERS[value.element_size()]).flatten()
    # By place, so that another order is another number; odd factors lose no bit where products wrap around.
    place = 2 * torch.arange(bits.shape[0], device=bits.device) + 1
    about = zlib.crc32(repr((tuple(value.shape), value.dtype)).encode())
    return int((bits * place).sum()) * 2**32 + about
