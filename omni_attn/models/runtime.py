"""The machine a model runs on: device, dtype, memory, optional libraries; and what a run gives back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from omni_attn.config import AttentionConfig
from omni_attn.config.names import nearest
from omni_attn.errors import ConfigError, MissingExtraError
from omni_attn.platforms import current_omni_platform
from omni_attn.selector import current_scope, use_attention_config

GIB = 2**30
DTYPES = ("float32", "bfloat16", "float16")
_DEVICE_KINDS = ("cpu", "cuda", "mps")

# progress(iterable, total, description) gives the same items and may draw a bar while doing so.
Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]


@dataclass(frozen=True, eq=False)
class RunResult:
    """What `run` of a model family gives back.

    `model` holds every transformer that ran (for `attention_report`), `files` are the ones written into
    `output_folder` (None and no files where another rank writes them), and `notes` says, a line each, what was filled
    in because the configuration left it out.
    """

    model: nn.Module
    output_folder: Path | None
    files: tuple[Path, ...]
    notes: tuple[str, ...]
    device: torch.device
    dtype: str


def no_progress(items: Iterable[Any], total: int, description: str) -> Iterable[Any]:
    """The items as they are: a run without a progress bar."""
    return items


def import_extra(name: str, purpose: str, *, extra: str = "pipelines") -> ModuleType:
    """The module `name` of one of our extras.

    Raises:
        MissingExtraError: it is not installed, or is broken; its own error is chained.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingExtraError(
            f"{purpose} needs {package}, which cannot be imported here ({error}). Install it: "
            f'pip install "omni-attn[{extra}]"'
        ) from error


def resolve_device(name: str) -> torch.device:
    """The torch device of a configuration's `device`; "auto" takes a CUDA GPU, else Apple's, else the CPU.

    Raises:
        ConfigError: no such device here, or not a device that models run on.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in _DEVICE_KINDS:
        guess = "cuda" if name.lower().startswith("gpu") else nearest(name, ("auto", *_DEVICE_KINDS))
        hint = f"Did you mean {guess!r}? " if guess else ""
        raise ConfigError(
            f"device: {name!r} is not a device that models run on. {hint}"
            "Write auto, cpu, cuda, cuda:<index> or mps."
        )
    if device.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= found:
            raise ConfigError(
                f"device: {name!r} was asked for, and PyTorch {torch.__version__} sees {found} CUDA devices here. "
                "Write device: auto or cpu, or install a CUDA build of PyTorch."
            )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(
            "device: 'mps' was asked for, and PyTorch sees no Apple GPU here. Write device: auto or cpu."
        )
    return device


def resolve_dtype(name: str, device_kind: str) -> str:
    """The dtype's name; "auto" is bfloat16 on a GPU and float32 on a CPU.

    Raises:
        ConfigError: not a dtype that models run in.
    """
    if name == "auto":
        return "float32" if device_kind == "cpu" else "bfloat16"
    if name not in DTYPES:
        guess = nearest(name, ("auto", *DTYPES))
        hint = f"Did you mean {guess!r}?" if guess else f"Write auto, {', '.join(DTYPES)}."
        raise ConfigError(f"dtype: {name!r} is not a dtype that models run in. {hint}")
    return name


def select_for(
    device: torch.device | str | None, dtype: torch.dtype | None
) -> AbstractContextManager[AttentionConfig]:
    """The scope in force, with what loading knows better: the dtype, and the device where one was asked for.

    Assumed facts of a device of the same kind stay in force.
    """
    scope = current_scope()
    platform = scope.platform_or_current()
    if device is not None and torch.device(device).type != platform.device.kind:
        platform = current_omni_platform(device)
    return use_attention_config(scope.config_for(), platform=platform, dtype=dtype, lengths=scope.lengths)


def parameter_bytes(model: nn.Module) -> int:
    """Exact size of all parameters in the dtypes they have; works on the meta device."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    psutil = import_extra("psutil", "Comparing a model with this machine's memory")
    free = int(psutil.virtual_memory().available)
    if device.type == "mps":
        return min(free, torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return min(free, _control_group_rest())


def _control_group_rest() -> int:
    """What a container's limit (Linux control groups, version 2) leaves; psutil knows only the whole machine."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / "memory.current").read_text()) - int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):  # no such file, or the limit "max"
        return 2**63
    return max(0, limit - used)


def check_memory(
    needed_bytes: int, device: torch.device, *, what: str = "The model", advice: str = ""
) -> None:
    """Compare a need with what is free, before anything is allocated.

    Args:
        needed_bytes: weights and everything else that lives at the same time.
        device: where it is to be allocated.
        what: the subject of the error text.
        advice: what to do instead, a full sentence.

    Raises:
        ConfigError: it does not fit; the text holds both numbers in GiB.
    """
    free = available_memory(device)
    if needed_bytes <= free:
        return
    raise ConfigError(
        f"{what} needs {needed_bytes / GIB:.2f} GiB on {device}, and {free / GIB:.2f} GiB are available. "
        + (advice or "Choose a smaller model or a device with more memory.")
    )
