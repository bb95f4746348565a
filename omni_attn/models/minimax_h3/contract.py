"""How a distilled FastH3 checkpoint wants to be sampled: `fastvideo_inference.json`, read and held to the schedulers.

Facts: `fastvideo/pipelines/basic/minimax_h3/minimax_h3_pipeline.py` in FastVideo.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import first_names, read_json

CONTRACT_FILE = "fastvideo_inference.json"
CONTRACT_SCHEMA = "fasth3-inference-contract-v1"
_CLOCK = 1000  # rungs are noise levels on this many training steps
_LOG = logging.getLogger(__name__)

# Keys that say where a checkpoint comes from, and nothing about sampling it.
_PROVENANCE = frozenset(
    {"schema", "schema_version", "model_id", "model_type", "base_model_revision", "conditioning"}
)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_rungs(rungs: tuple[object, ...]) -> bool:
    numbers = [rung for rung in rungs if isinstance(rung, int) and _is_int(rung) and 0 < rung <= _CLOCK]
    return len(numbers) == len(rungs) > 0 and all(left > right for left, right in pairwise(numbers))


# Field -> (whether a value can be its, what it must be).
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "dmd_denoising_steps": (_are_rungs, f"descending integers from {_CLOCK} to 1"),
    "video_scheduler_shift": (lambda shift: _is_number(shift) and shift > 0, "a positive number"),
    "audio_scheduler_shift": (lambda shift: _is_number(shift) and shift > 0, "a positive number"),
    "vsa_sparsity": (lambda sparsity: _is_number(sparsity) and 0 <= sparsity < 1, "at least 0 and below 1"),
    "vsa_tile_size": (lambda size: _is_int(size) and size > 0, "a positive integer"),
    "attention_backend": (lambda name: isinstance(name, str), "a name"),
    "task": (lambda name: isinstance(name, str), "a name"),
}


@dataclass(frozen=True, kw_only=True)
class InferenceContract:
    """What a student was distilled for. A field that the file lacks is None.

    Attributes:
        dmd_denoising_steps: rungs: unshifted noise levels of the forwards on the 1000-step training clock, descending.
        video_scheduler_shift, audio_scheduler_shift: of the two schedulers.
        vsa_sparsity, vsa_tile_size: of the video sparse attention that it was trained with; tile size in tokens.
        attention_backend: that attention, by FastVideo's name for it.
        task: what it makes, "t2av" for video with audio from text.

    Raises:
        ConfigError: a value is out of range; all problems at once.
    """

    dmd_denoising_steps: tuple[int, ...]
    video_scheduler_shift: float | None = None
    audio_scheduler_shift: float | None = None
    vsa_sparsity: float | None = None
    vsa_tile_size: int | None = None
    attention_backend: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}, and must be {wanted}."
            for name, (fits, wanted) in _RULES.items()
            if (value := getattr(self, name)) is not None and not fits(value)
        ]
        if problems:
            raise ConfigError(*problems)

    @property
    def transformer_forwards(self) -> int:
        return len(self.dmd_denoising_steps)

    @property
    def num_inference_steps(self) -> int:
        """Points of the grid, its last 0 included: one more than forwards."""
        return len(self.dmd_denoising_steps) + 1

    @property
    def base_grid(self) -> tuple[float, ...]:
        """Unshifted noise levels u from the first rung to 0; each scheduler shifts them once."""
        return (*(rung / _CLOCK for rung in self.dmd_denoising_steps), 0.0)

    def check_shifts(self, video: float, audio: float, *, source: str) -> None:
        """Nothing if schedulers with these shifts are those that the student was distilled for.

        Raises:
            ConfigError: they are not; both numbers are named.
        """
        pairs = (("video", self.video_scheduler_shift, video), ("audio", self.audio_scheduler_shift, audio))
        problems = [
            f"{source}: {CONTRACT_FILE} wants a {name} shift of {wanted:g}, and the {name} scheduler has {found:g}. "
            "Fetch or save the checkpoint again."
            for name, wanted, found in pairs
            if wanted is not None and wanted != found
        ]
        if problems:
            raise ConfigError(*problems)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = CONTRACT_FILE) -> InferenceContract:
        """The contract in a parsed file.

        Keys that say nothing about sampling are passed over; others that are not known here are, with a warning.

        Args:
            values: the parsed file.
            source: where it came from, for error texts.

        Raises:
            ConfigError: another schema; a kind of student that is not supported; or values that contradict one another;
                all problems at once.
        """
        schema = values.get("schema_version")
        if schema != CONTRACT_SCHEMA:
            raise ConfigError(
                f"{source}: schema_version is {schema!r}, and {CONTRACT_SCHEMA!r} is the one that is read here. Use "
                "such a checkpoint."
            )
        if "pdd_steps" in values:
            raise ConfigError(
                f"{source}: pdd_steps is {values['pdd_steps']!r}: a student with that many output heads, fused step by "
                "step, which this model does not have. Use a checkpoint with dmd_denoising_steps."
            )
        rungs = values.get("dmd_denoising_steps")
        if not isinstance(rungs, list):
            raise ConfigError(
                f"{source}: dmd_denoising_steps is {rungs!r}, and must be a list: a uniform grid is no substitute for "
                "the rungs a student was distilled at. Fetch the checkpoint again."
            )
        fields = [field.name for field in dataclasses.fields(cls)]
        try:
            contract = cls(
                **{key: values[key] for key in fields if key in values}
                | {"dmd_denoising_steps": tuple(rungs)}
            )
        except ConfigError as error:
            raise ConfigError(*(f"{source}: {problem}" for problem in error.problems)) from None
        wanted = {
            "num_inference_steps": contract.num_inference_steps,
            "transformer_forwards": contract.transformer_forwards,
            "guidance_scale": 1.0,
        }
        problems = [
            f"{source}: {key} is {values[key]!r}, and {len(rungs)} rungs without guidance need {value:g}."
            for key, value in wanted.items()
            if key in values and values[key] != value
        ]
        if problems:
            raise ConfigError(*problems)
        known = {*fields, *wanted, *_PROVENANCE}
        if others := [key for key in values if key not in known]:
            _LOG.warning("%s: keys that are not read here: %s", source, first_names(others))
        return contract


#: The four-forward preview, whose adapters bring no file; sparsity and tile size are those of its gated variants.
FASTH3_PREVIEW = InferenceContract(
    dmd_denoising_steps=(999, 749, 500, 250),
    video_scheduler_shift=12.0,
    audio_scheduler_shift=3.0,
    vsa_sparsity=0.9,
    vsa_tile_size=64,
    task="t2av",
)


def contract_of_student(student: str) -> InferenceContract | None:
    """The contract of an adapter by the student it says it was extracted from; None if it is not FastH3's preview.

    The name alone tells: the container is used for adapters of other origins as well, which keep the base's schedule.
    """
    owner, _, name = student.casefold().partition("/")
    return FASTH3_PREVIEW if owner == "fastvideo" and "fasth3" in name and "4-step" in name else None


def read_contract(folder: Path) -> InferenceContract | None:
    """The contract in a pipeline's folder; None for checkpoints that are not distilled.

    Raises:
        ConfigError: see `InferenceContract.from_dict`; or it is no JSON object.
    """
    if not (folder / CONTRACT_FILE).is_file():
        return None
    return InferenceContract.from_dict(read_json(folder, CONTRACT_FILE), source=str(folder / CONTRACT_FILE))
