"""A checkpoint folder as diffusers' `save_pretrained` writes it; its weights fitted to a model, strictly."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from omni_attn.errors import ConfigError
from omni_attn.models.runtime import import_extra

_LOG = logging.getLogger(__name__)
_SHOWN = 5  # problems of one kind that a text lists before it only counts
FLOATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def read_json(folder: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """The JSON object in `folder/name`.

    Raises:
        ConfigError: the folder or file is not there, or holds no JSON object.
    """
    path = Path(folder) / name
    if not path.is_file():
        raise ConfigError(f"{path} does not exist. {_folder_hint(Path(folder))}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}. Fetch or save the checkpoint again.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a JSON {type(values).__name__}, and must hold an object.")
    return values


def _folder_hint(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder: give one that holds config.json and safetensors files."
    if (folder / "model_index.json").is_file():
        return f"{folder} is a whole pipeline: give its transformer's own folder, {folder / 'transformer'}."
    return "Give the folder of one transformer as save_pretrained writes it: config.json beside the weights."


def read_safetensors(folder: str | os.PathLike[str], stem: str) -> dict[str, Tensor]:
    """Every tensor of `stem.safetensors`, or of the shards that `stem.safetensors.index.json` names.

    The tensors are views of the mapped files on the CPU: nothing is read until it is used.

    Raises:
        ConfigError: no weights, a missing shard, or a broken file.
        MissingExtraError: safetensors is not installed.
    """
    safetensors = import_extra("safetensors.torch", f"Reading weights from {folder}")
    broken = (import_extra("safetensors", f"Reading weights from {folder}").SafetensorError, OSError)
    state: dict[str, Tensor] = {}
    for path in _weight_files(Path(folder), stem):
        try:
            state.update(safetensors.load_file(path))
        except broken as error:
            raise ConfigError(
                f"{path} cannot be read: {error}. Fetch or save the checkpoint again."
            ) from error
    return state


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """What a safetensors file says about each of its tensors (dtype, shape, place), without reading any.

    Raises:
        ConfigError: it is no whole safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, size))
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a whole safetensors file. Fetch or save the checkpoint again."
        ) from error
    return header


def stored_names(folder: Path, stem: str) -> frozenset[str]:
    """Names of all weights that `read_safetensors` would read; none where it would refuse.

    Raises:
        ConfigError: a file is broken.
    """
    whole, index = folder / f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    if whole.is_file():
        return frozenset(read_safetensors_header(whole))
    if (folder / index).is_file():
        weight_map = read_json(folder, index).get("weight_map")
        return frozenset(weight_map) if isinstance(weight_map, dict) else frozenset()
    return frozenset()


def stored_header(folder: Path, stem: str) -> dict[str, Any]:
    """What the headers say about each weight that `read_safetensors` would read; nothing where there are none.

    Raises:
        ConfigError: a shard is missing, or a file is broken.
    """
    if not any((folder / f"{stem}.safetensors{ending}").is_file() for ending in ("", ".index.json")):
        return {}
    return {
        name: entry
        for path in _weight_files(folder, stem)
        for name, entry in read_safetensors_header(path).items()
    }


def _weight_files(folder: Path, stem: str) -> list[Path]:
    whole, index = folder / f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not (folder / index).is_file():
        found = sorted(
            path.name for path in folder.iterdir() if path.suffix in {".safetensors", ".bin", ".pt", ".pth"}
        )
        raise ConfigError(
            f"{folder} holds neither {whole.name} nor {index}; weights found there: "
            f"{', '.join(found) or 'none'}. Save it with diffusers' "
            "save_pretrained(safe_serialization=True) and without a variant."
        )
    weight_map = read_json(folder, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{folder / index} has no weight_map. Fetch or save the checkpoint again.")
    shards = [folder / name for name in sorted({str(name) for name in weight_map.values()})]
    if absent := [path.name for path in shards if not path.is_file()]:
        raise ConfigError(
            f"{folder / index} names shards that are not there: {first_names(absent)}. Fetch them as well."
        )
    return shards


def load_part(loader: Callable[..., Any], folder: Path, **options: Any) -> Any:
    """What `loader`, a `from_pretrained` of diffusers or transformers, makes of one part of a checkpoint.

    Raises:
        ConfigError: it cannot be loaded; the library's own words are in the text.
    """
    try:
        return loader(str(folder), local_files_only=True, **options)
    except Exception as error:  # they pass on whatever their readers raise, without a common base
        reason = " ".join(str(error).split()).rstrip(".!")
        raise ConfigError(
            f"{folder} cannot be loaded: {reason or type(error).__name__}. Fetch or save the checkpoint again."
        ) from error


def assign_weights(
    model: nn.Module,
    state: dict[str, Tensor],
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    keeps_float32: Callable[[str], bool],
    ignored: Callable[[str], bool] = lambda name: False,
    source: str,
    finish: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Gives a model that was built on the meta device these weights, moved and cast one at a time.

    Args:
        model: has parameters and no stored buffers.
        state: by the model's own names.
        device: the CPU if None.
        dtype: of every weight but those that stay in float32, as stored if None.
        keeps_float32: whether the parameter of this name is float32 in any case.
        ignored: whether a key that the model lacks may be left out, with a warning; none may if not given.
        source: where the weights came from, for error texts.
        finish: what becomes of the weight of a name once it has been moved; it keeps shape, dtype and device.

    Raises:
        ConfigError: a weight is missing, unexpected, or of another shape or of no floating dtype.
    """
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    if skipped := [name for name in state if name not in wanted and ignored(name)]:
        _LOG.warning("%s: ignored weights that no layer uses: %s", source, first_names(skipped))
    if problems := _mismatches(wanted, {name: state[name] for name in state if name not in skipped}):
        raise ConfigError(
            *(f"{source}: {problem}" for problem in problems),
            f"{source}: weights and config.json must describe the same model; nothing was loaded. Check "
            "that both come from one checkpoint.",
        )
    fitted = {}
    for name in wanted:
        weight = state[name]
        target = torch.float32 if keeps_float32(name) else dtype or weight.dtype
        if finish is not None:
            weight = finish(name, weight.to(device or "cpu"))
        fitted[name] = weight.to(device or "cpu", target)
    model.load_state_dict(fitted, assign=True)


def stored_dtype(state: Mapping[str, Tensor], name: str) -> torch.dtype | None:
    """The dtype of one weight; None if it is not there, or of a dtype that no model has."""
    weight = state.get(name)
    return weight.dtype if weight is not None and weight.dtype in FLOATS.values() else None


def resolve_float(dtype: torch.dtype | str) -> torch.dtype:
    """A floating dtype from itself or its name.

    Raises:
        ConfigError: it is none that a model's weights can have.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in FLOATS:
        raise ConfigError(f"dtype {name!r} is not one that weights can have here: {', '.join(FLOATS)}.")
    return FLOATS[name]


def _mismatches(wanted: dict[str, torch.Size], state: dict[str, Tensor]) -> list[str]:
    shapes = [
        f"{name} is {list(state[name].shape)}, needs {list(shape)}"
        for name, shape in wanted.items()
        if name in state and state[name].shape != shape
    ]
    dtypes = [
        f"{name} is {tensor.dtype}" for name, tensor in state.items() if tensor.dtype not in FLOATS.values()
    ]
    kinds = {
        "missing weights": [name for name in wanted if name not in state],
        "unexpected weights": [name for name in state if name not in wanted],
        "weights of another shape": shapes,
        "weights of a dtype that is not supported": dtypes,
    }
    return [f"{len(found)} {kind}: {first_names(found)}" for kind, found in kinds.items() if found]


def first_names(names: Sequence[str]) -> str:
    """The first of them, and how many more there are, for an error text."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
