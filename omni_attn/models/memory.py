"""How much memory the parts of a run take, known before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from omni_attn.config import ParallelConfig
from omni_attn.errors import ConfigError
from omni_attn.models import runtime
from omni_attn.models.checkpoint import read_safetensors_header, resolve_float
from omni_attn.models.runtime import GIB, check_memory


def weight_bytes(model: nn.Module, dtype: str, keeps_float32: Callable[[str], bool]) -> int:
    """Exact size of all weights once loaded in this dtype; the model may be on the meta device.

    Args:
        model: holds them.
        dtype: name of what they are loaded in.
        keeps_float32: whether the weight of a name stays in float32 whatever the dtype.
    """
    itemsize = resolve_float(dtype).itemsize
    return sum(
        parameter.numel() * (4 if keeps_float32(name) else itemsize)
        for name, parameter in model.named_parameters()
    )


def exchanged_tokens(total: int, heads: int, parallel: ParallelConfig, *, gated: bool) -> int:
    """Tokens, as wide as all heads together, in the buffers of one layer's exchanges on the busiest rank.

    Twice what is sent and received (query, key, value and gates; keys and values of two ranks in a ring), or keys and
    values of the whole sequence where they are gathered. With heads that the ranks do not share evenly, one receives
    more than it sends.

    Args:
        total: tokens of the whole sequence.
        heads: of the layer.
        gated: its gates travel with the queries.
    """
    if parallel.mode is None:
        return 0
    if parallel.mode == "allgather_kv":
        return 4 * total  # keys and values, as they arrive and as they are read
    own, ranks = -(-total // parallel.size), parallel.ulysses_degree
    busiest = -(-own * ranks * -(-heads // ranks) // heads)  # with the most heads of a Ulysses group
    traded = 2 * (3 + gated) * (own + busiest) if ranks > 1 else 0
    return traded + (4 * busiest if parallel.ring_degree > 1 else 0)


def stored_elements(folder: Path) -> int:
    """Numbers in all safetensors files of a folder, read from their headers.

    Raises:
        ConfigError: a file is broken.
    """
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        header = read_safetensors_header(path)
        try:
            total += sum(math.prod(entry["shape"]) for entry in header.values())
        except (TypeError, KeyError) as error:
            raise ConfigError(
                f"{path} is not a whole safetensors file. Fetch or save the checkpoint again."
            ) from error
    return total


def check_run_fits(
    weights_in: Callable[[str], int],
    working: int,
    device: torch.device,
    dtype: str,
    *,
    name: str,
    transformers: int,
    video: str,
    before: int = 0,
    presets: tuple[str, ...] = (),
) -> None:
    """Compare all that lives at the same time with what is free on the device.

    Args:
        weights_in: bytes of the transformers' weights in the dtype of a name.
        working: bytes that live beside them.
        device: where all of it is to be allocated.
        dtype: what the transformers run in.
        name, transformers: of the model and how many it has, for the error text.
        video: the size of what is made, for the error text.
        before: bytes of what is released before the transformers are loaded; the larger of the two counts.
        presets: smaller ones, to advise.

    Raises:
        ConfigError: it does not fit; the text names the model, both numbers and what to do.
    """
    weights = weights_in(dtype)
    needed = max(weights + working, before)
    free = runtime.available_memory(device)
    advice = []  # what would help, and nothing that would not
    if dtype == "float32" and weights_in("bfloat16") + working <= free:
        advice.append("dtype: bfloat16")
    if weights <= free and needed == weights + working:
        advice.append("a smaller video")
    advice.append("a device with more memory")
    if presets:
        advice.append(f"a smaller preset ({' or '.join(presets)})")
    check_memory(
        needed,
        device,
        what=(
            f"model: {name} ({transformers} transformer{'s' * (transformers > 1)}, {weights / GIB:.2f} GiB of {dtype} "
            f"weights, {working / GIB:.2f} GiB allowed for a video of {video})"
        ),
        advice=f"Choose {' or '.join(filter(None, (', '.join(advice[:-1]), advice[-1])))}.",
    )
