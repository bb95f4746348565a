"""What a replay is held against: what the graph keeps of its capture, and, in debug, an eager step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from omni_attn.kv_cache.batches import BatchDescriptor
from omni_attn.kv_cache.graphs import map_tensors
from omni_attn.kv_cache.step import PagedStep

#: Relative error that a replay may have against an eager step, whose kernels may sum in another order.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def check_same(
    metadata: Any, held: Mapping[str, object], device: torch.device, descriptor: BatchDescriptor
) -> None:
    """Holds a step's metadata against what a graph keeps of that of its capture.

    Args:
        held: `baked_in` of the capture.
        descriptor: of the graph.

    Raises:
        RuntimeError: a replay would read something else than this metadata.
    """
    now = baked_in(metadata, device)
    if now != held:
        place = next(p for p in {**held, **now} if now.get(p) != held.get(p))
        raise RuntimeError(
            f"metadata{place} is {now.get(place)} in this step, and the CUDA graph of {descriptor} was captured with "
            f"{held.get(place)}, which a replay would read -- builders stage what they compute, and take numbers from "
            "the common metadata's upper bounds only"
        )


def check_outputs(outputs: Any, expected: Any, batch: BatchDescriptor) -> None:
    """Holds the outputs of a replay against those of an eager step; waits for the device.

    Raises:
        RuntimeError: they differ by more than TOLERANCE.
    """
    wanted: list[torch.Tensor] = []
    map_tensors(wanted.append, expected)

    def compare(output: torch.Tensor) -> None:
        one, other = output.double(), wanted.pop(0).double()
        same = (one == other) | (one.isnan() & other.isnan())
        off = torch.where(same, 0.0, one - other).norm()
        error = float(off / other.nan_to_num().norm().clamp(min=1e-30))
        if not error <= TOLERANCE.get(output.dtype, 0.0):
            raise RuntimeError(
                f"a replay of {batch} differs from an eager step by {error:.1e} of its norm: the graph holds something "
                "that has changed since its capture -- pass it as an input, or through the metadata"
            )

    map_tensors(compare, outputs)


def baked_in(metadata: Any, device: torch.device) -> dict[str, object]:
    """What a graph keeps of a metadata object: place -> address and strides, number, or identity of an object.

    Tensors elsewhere than on the device are left out: kernels do not read them. Nothing waits for the device.
    """
    found: dict[str, object] = {}
    seen: dict[int, str] = {}  # layers of a group share one M

    def once(place: str, value: Any) -> str:
        if id(value) not in seen:
            seen[id(value)] = place
            look(place, value)
        return seen[id(value)]

    def look(place: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.device.type == device.type:
                found[place] = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        elif isinstance(value, PagedStep):
            for name, (metadata, kv_cache, slots, tokens) in value.calls.items():
                of = f"{place}[{name!r}]"
                parts = once(f"{of}.metadata", metadata), once(f"{of}.slot_mapping", slots)
                found[of] = (*parts, id(kv_cache), tokens)
        elif is_dataclass(value) and not isinstance(value, type):
            for part in fields(value):
                look(f"{place}.{part.name}", getattr(value, part.name))
        elif isinstance(value, (tuple, list)):
            found[place] = len(value)
            for index, part in enumerate(value):
                look(f"{place}[{index}]", part)
        elif isinstance(value, Mapping):
            found[place] = tuple(value)
            for key, part in value.items():
                look(f"{place}[{key!r}]", part)
        elif value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            found[place] = value
        else:
            found[place] = id(value)

    look("", metadata)
    return found
