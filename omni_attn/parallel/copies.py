"""Copies into the order of an exchange."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_WORD = torch.int64


def is_recorded(tensors: Iterable[Tensor]) -> bool:
    """Whether a backward pass may come to one of them."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def copy_numbers(source: Tensor, target: Tensor) -> None:
    """Writes a tensor into another of its shape and dtype; differentiable.

    Strided copies go number by number. In words of 8 bytes they take less than half of the time for numbers of 2.
    Words have no gradient, and compiled code makes copies of its own.
    """
    pair = (source, target)
    if not (is_recorded(pair) or torch.compiler.is_compiling()) and all(map(_is_made_of_words, pair)):
        source, target = source.view(_WORD), target.view(_WORD)
    target.copy_(source)


def cut(tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> Iterator[Tensor]:
    """Consecutive pieces: views that may be written to where a gradient is recorded, as those of split may not."""
    start = 0
    for size in sizes:
        yield tensor.narrow(dim, start, size)
        start += size


def _is_made_of_words(tensor: Tensor) -> bool:
    count = _WORD.itemsize // tensor.element_size()
    places = (tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1])
    aligned = tensor.data_ptr() % _WORD.itemsize == 0 and all(place % count == 0 for place in places)
    return count > 1 and tensor.stride(-1) == 1 and aligned
