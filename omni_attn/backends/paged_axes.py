"""Fields that lie along the requests or tokens of a step: cut and padded alike, also those that a model adds.

A field says so once, `positions: torch.Tensor = field(metadata=along("tokens"))`, and every operation follows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Where the requests or tokens of a field lie.

    Attributes:
        along: "requests" [R], "boundaries" of requests [R + 1], exclusive sums whose last one repeats in padding, or
            "tokens" [T].
        dim: of the tensor.
        fill: what padding gets.
    """

    along: Literal["requests", "boundaries", "tokens"]
    dim: int = 0
    fill: int | float = 0


def along(
    axis: Literal["requests", "boundaries", "tokens"], *, dim: int = 0, fill: int | float = 0
) -> dict[str, Axis]:
    """The `metadata` of a dataclass field that lies along an axis of the step.

    A part of a step has its part of the field as it is: boundaries of a model's own do not begin anew from 0.

    Raises:
        ValueError: there is no such axis.
    """
    if axis not in ("requests", "boundaries", "tokens"):
        raise ValueError(f"axis={axis!r}: a field of a step lies along 'requests', 'boundaries' or 'tokens'")
    return {"axis": Axis(along=axis, dim=dim, fill=fill)}


class _Lying(NamedTuple):
    name: str
    axis: Axis
    value: Any


def _lying(step: Any) -> Iterator[_Lying]:
    """The fields with an axis that hold something: tensors, tuples and lists; a single number holds for all."""
    for spec in fields(step):
        axis, value = spec.metadata.get("axis"), getattr(step, spec.name)
        if axis is not None and isinstance(value, (torch.Tensor, tuple, list)):
            yield _Lying(spec.name, axis, value)
        elif axis is not None and not (value is None or isinstance(value, (bool, int, float))):
            raise TypeError(
                f"{type(step).__name__}.{spec.name} lies along the {axis.along} and is a {type(value).__name__}: needs "
                "a tensor, a tuple or a list"
            )


def cut_fields(step: Any, requests: tuple[int, int], tokens: tuple[int, int]) -> dict[str, Any]:
    """Each field with an axis, for some requests and tokens in a row; boundaries are cut and not rebased."""
    ranges = {
        "requests": slice(*requests),
        "boundaries": slice(requests[0], requests[1] + 1),
        "tokens": slice(*tokens),
    }
    cut: dict[str, Any] = {}
    for name, axis, value in _lying(step):
        part = ranges[axis.along]
        if isinstance(value, torch.Tensor):
            cut[name] = value[(slice(None),) * axis.dim + (part,)]
        else:
            cut[name] = value[part]
    return cut


def pad_fields(step: Any, num_reqs: int, num_tokens: int) -> dict[str, Any]:
    """Each field with an axis, grown to so many requests and tokens; does not wait for the device."""
    lengths = {"requests": num_reqs, "boundaries": num_reqs + 1, "tokens": num_tokens}
    padded: dict[str, Any] = {}
    for name, axis, value in _lying(step):
        wanted = lengths[axis.along]
        if isinstance(value, torch.Tensor):
            padded[name] = _pad_tensor(value, axis, wanted)
        else:
            fill = value[-1] if axis.along == "boundaries" and value else axis.fill
            padded[name] = type(value)([*value, *[fill] * (wanted - len(value))])
    return padded


def _pad_tensor(tensor: torch.Tensor, axis: Axis, length: int) -> torch.Tensor:
    dim, missing = axis.dim, length - tensor.shape[axis.dim]
    if missing <= 0:
        return tensor
    shape = (*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
    if axis.along == "boundaries":
        tail = tensor.narrow(dim, tensor.shape[dim] - 1, 1).expand(shape)
    else:
        tail = tensor.new_full(shape, axis.fill)
    return torch.cat((tensor, tail), dim)
