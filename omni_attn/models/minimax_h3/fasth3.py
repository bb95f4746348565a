"""Adapters of FastH3 (container `fastvideo-lora-v2`): what a distilled student changed, fused into the base weights.

Not a LoRA that a request could switch: besides low-rank products it holds full differences of norms, biases and patch
projections, and gates that the base does not have. Facts: `scripts/lora_extraction/finalize_adapter.py` in FastVideo.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import FLOATS, first_names, read_safetensors
from omni_attn.models.gates import GATE, is_gate

ADAPTER_FORMAT = "fastvideo-lora-v2"
_DEFAULT_NAME = "adapter_model"

# What a key ends with -> (what it does to a parameter, the kind of parameter).
_SUFFIXES: Mapping[str, tuple[str, str]] = {
    ".lora_A.weight": ("lora_a", "weight"),
    ".lora_B.weight": ("lora_b", "weight"),
    ".diff_b": ("diff", "bias"),
    ".diff": ("diff", "weight"),
    ".set_weight": ("replacement", "weight"),
}
# Keys of the file's own notes -> the kinds of tensors that each of them counts.
_COUNTS: Mapping[str, tuple[str, ...]] = {
    "low_rank_tensors": ("lora_a", "lora_b"),
    "diff_tensors": ("diff",),
    "set_weight_tensors": ("replacement",),
}


@dataclass(eq=False)
class _Change:
    """What an adapter does to one parameter: W + B @ A + difference, or a replacement."""

    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    diff: Tensor | None = None
    replacement: Tensor | None = None

    def problem(self, weight: Tensor | None, like: Tensor | None) -> str | None:
        """Why it cannot be done to this weight, or None.

        Args:
            weight: None: the base has none.
            like: what a new one has to look like; None: none may be new.
        """
        if (self.lora_a is None) != (self.lora_b is None):
            return "has one of lora_A and lora_B, and needs both"
        if self.replacement is not None and (self.lora_a is not None or self.diff is not None):
            return "is both replaced and changed"
        if self.replacement is not None and weight is None:
            weight = like
            if weight is None:
                return "is not in the base checkpoint, and only gates of its blocks may be new"
        if weight is None:
            return "is not in the base checkpoint"
        shapes = {"set_weight": self.replacement, "diff": self.diff}
        for kind, tensor in shapes.items():
            if tensor is not None and tensor.shape != weight.shape:
                return f"is {list(weight.shape)} and its {kind} {list(tensor.shape)}"
        if self.lora_a is not None and self.lora_b is not None:
            found = [list(self.lora_b.shape), list(self.lora_a.shape)]
            rank = found[1][:1]
            if weight.ndim != 2 or found != [[weight.shape[0], *rank], [*rank, weight.shape[1]]]:
                return f"is {list(weight.shape)} and its lora_B @ lora_A {found[0]} @ {found[1]}"
        return None


@dataclass(frozen=True, eq=False)
class Adapter:
    """An opened adapter: tensors are views of the mapped file.

    Attributes:
        source: the file.
        student: what the adapter was extracted from, as it says itself (`finetuned_model`), "" if it does not.
        has_gates: it brings gates of video sparse attention.
    """

    source: Path
    student: str
    _changes: Mapping[str, _Change] = field(repr=False)

    @property
    def has_gates(self) -> bool:
        return any(is_gate(name) for name in self._changes)

    def fit(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The base's weights and the gates that the adapter adds; nothing is computed yet, see `fuse`.

        A new gate has the shape and dtype of its block's queries, which are projected from the same rows.

        Args:
            state: of the base, by the model's names.

        Raises:
            ConfigError: the adapter does not fit these weights; all problems at once.
        """
        problems = [
            f"{name} {problem}"
            for name, change in self._changes.items()
            if (problem := change.problem(state.get(name), _queries(state, name)))
        ]
        if problems:
            raise ConfigError(
                f"{self.source} does not fit the base checkpoint: {'; '.join(problems[:5])}"
                f"{f'; and {len(problems) - 5} more' if len(problems) > 5 else ''}. Nothing was changed. Take the base "
                "that it was extracted from, whole (without adaln_rank)."
            )
        added = {
            name: change.replacement.to(queries.dtype)
            for name, change in self._changes.items()
            if name not in state
            and change.replacement is not None
            and (queries := _queries(state, name)) is not None
        }
        return {**state, **added}

    def fuse(self, name: str, weight: Tensor) -> Tensor:
        """The student's weight: `W + B @ A + difference` or the replacement, on W's device.

        Computed in float32 and rounded once, to W's dtype, as a saved student is.

        Args:
            name: of the weight, in the model's spelling; one the adapter does not know passes unchanged.
            weight: the base's, as `fit` has seen it.
        """
        change = self._changes.get(name)
        if change is None:
            return weight
        if change.replacement is not None:
            return change.replacement.to(weight)
        total = weight.float()
        if change.lora_a is not None and change.lora_b is not None:
            total = torch.addmm(total, change.lora_b.to(total), change.lora_a.to(total))
        if change.diff is not None:
            total = total + change.diff.to(total)
        return total.to(weight.dtype)


def open_adapter(path: str | os.PathLike[str]) -> Adapter:
    """The adapter in a file, or in a folder with one.

    Raises:
        ConfigError: none or several there; another container; keys that are not known; or other numbers of tensors
            than the file itself states.
    """
    file = _adapter_file(Path(path).expanduser())
    tensors = read_safetensors(file.parent, file.stem)
    notes = _read_notes(file)
    if notes.get("format") != ADAPTER_FORMAT:
        raise ConfigError(
            f"{file} is not an adapter that can be fused here: its format is {notes.get('format')!r}, and must be "
            f"{ADAPTER_FORMAT!r}. A plain LoRA has to be merged into a checkpoint before."
        )
    changes: dict[str, _Change] = {}
    counts = {kind: 0 for kinds in _COUNTS.values() for kind in kinds}
    unknown = []
    for key, tensor in tensors.items():
        suffix = next((suffix for suffix in _SUFFIXES if key.endswith(suffix)), None)
        if suffix is None or tensor.dtype not in FLOATS.values():
            unknown.append(f"{key} ({str(tensor.dtype).removeprefix('torch.')})")
            continue
        kind, parameter = _SUFFIXES[suffix]
        counts[kind] += 1
        setattr(changes.setdefault(f"{key.removesuffix(suffix)}.{parameter}", _Change()), kind, tensor)
    if unknown:
        raise ConfigError(
            f"{file} holds {len(unknown)} tensors of no known kind: {first_names(unknown)}. Known are floating ones "
            f"that end in {', '.join(_SUFFIXES)}; nothing is left out silently."
        )
    if not changes:
        raise ConfigError(f"{file} holds no tensor, so it changes nothing: it is not whole. Fetch it again.")
    for note, kinds in _COUNTS.items():
        found = sum(counts[kind] for kind in kinds)
        if note in notes and notes[note] != str(found):
            raise ConfigError(
                f"{file} says {note} = {notes[note]} and holds {found}: it is not whole. Fetch it again."
            )
    return Adapter(file, notes.get("finetuned_model", ""), changes)


def fuse_adapter(state: Mapping[str, Tensor], path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The student's weights: the base's with an adapter fused in, and with the gates that it adds.

    Holds every changed weight at once; `Adapter.fuse` does one at a time.

    Args:
        state: the base's, by the model's names.
        path: see `open_adapter`.

    Raises:
        ConfigError: no such adapter, or it does not fit.
    """
    adapter = open_adapter(path)
    return {name: adapter.fuse(name, weight) for name, weight in adapter.fit(state).items()}


def _queries(state: Mapping[str, Tensor], gate: str) -> Tensor | None:
    """The weight that projects queries beside the gate of this name; None if it is no gate, or of another model."""
    return state.get(gate.replace(GATE, "to_q")) if is_gate(gate) else None


def _adapter_file(path: Path) -> Path:
    if path.is_file() and path.suffix == ".safetensors":
        return path
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    named = [file for file in files if file.stem == _DEFAULT_NAME]
    if len(named or files) == 1:
        return (named or files)[0]
    below = (
        sorted(str(file.relative_to(path)) for file in path.glob("*/*.safetensors")) if path.is_dir() else []
    )
    found = first_names([file.name for file in files] or below) or "none"
    raise ConfigError(
        f"adapter: {path} is not one adapter; safetensors files found: {found}. Name one file, for example "
        f"dense-datafree/{_DEFAULT_NAME}.safetensors."
    )


def _read_notes(file: Path) -> dict[str, str]:
    """What a safetensors file says about itself; `read_safetensors` has found it whole."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    notes: dict[str, str] = header.get("__metadata__", {})
    return notes
