"""A pipeline's folder as diffusers' `save_pretrained` writes it: found, and its index read, without any weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omni_attn.config.names import nearest
from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import read_json

WEIGHTS = "diffusion_pytorch_model"
"""What the files of a transformer's weights are called, without their ending."""
_INDEX = "model_index.json"


def find_folder(model: str, presets: Iterable[str]) -> Path:
    """The checkpoint folder that `model` names, which is none of the presets.

    Raises:
        ConfigError: there is no such folder; the text holds the presets.
    """
    folder, names = Path(model).expanduser(), list(presets)
    if folder.is_dir():
        return folder
    guess = nearest(model, names)
    hint = f"Did you mean {guess!r}? " if guess else ""
    raise ConfigError(
        f"model: {model!r} is neither a preset nor a folder here. {hint}"
        f"Presets: {', '.join(names)}. A folder is one that diffusers' save_pretrained wrote."
    )


def find_index(folder: Path, model_class: str, names: Sequence[str] = (_INDEX,)) -> Path:
    """The file that lists the folder's parts.

    Args:
        folder: of a pipeline.
        model_class: loads one transformer alone, for the error text.
        names: what the file may be called; the first one there counts.

    Raises:
        ConfigError: there is none.
    """
    index = folder / _INDEX
    if found := next((folder / name for name in names if (folder / name).is_file()), None):
        return found
    if (folder / "config.json").is_file():
        parent = folder.absolute().parent
        hint = (
            f"Give its pipeline's folder: {parent}."
            if any((parent / name).is_file() for name in names)
            else "Give the folder that diffusers' pipeline.save_pretrained wrote, or load this transformer alone with "
            f"{model_class}.from_pretrained."
        )
        raise ConfigError(
            f"model: {folder} holds one transformer only; a pipeline also needs {index} and "
            f"{folder / 'scheduler' / 'scheduler_config.json'}, which are missing. {hint}"
        )
    others = sorted(path.name for path in folder.glob("*model_index.json"))
    if others:
        raise ConfigError(
            f"model: {index} is missing, and {folder} holds {', '.join(others)}, which pipelines of another family "
            "have. Correct `pipeline`, or give a checkpoint of this one."
        )
    raise ConfigError(
        f"model: {index} is missing, so {folder} is not a pipeline checkpoint. Give the folder that diffusers' "
        "save_pretrained wrote: it holds model_index.json, transformer/ and scheduler/."
    )


def read_index(folder: Path, model_class: str) -> dict[str, Any]:
    """The folder's model_index.json; see find_index.

    Raises:
        ConfigError: there is none, or it holds no JSON object.
    """
    return read_part(find_index(folder, model_class))


def is_listed(index: dict[str, Any], part: str) -> bool:
    """True if the index names a library and class for the part; diffusers writes [null, null] for an absent one."""
    entry = index.get(part)
    return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None


def read_part(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the folder.

    Raises:
        ConfigError: it is missing, or holds no JSON object.
    """
    if not path.is_file():
        raise ConfigError(f"model: {path} is missing. Complete the checkpoint folder.")
    return read_json(path.parent, path.name)
