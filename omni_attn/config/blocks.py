"""The typed option blocks of a spec, one per family of backends.

A backend that serves only a part of the values allowed here says so at selection.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from omni_attn.config.base import (
    MEMBER_VALUE,
    SEQUENCE,
    ConfigModel,
    Count,
    Fraction,
    NonNegative,
    PositiveInt,
)
from omni_attn.config.names import is_auto

DEFAULT_TOPK = 64


def _exact_int(value: object) -> object:
    if type(value) is not int:  # a Literal would take true for 1 and 4.0 for 4
        raise ValueError(f"must be a whole number, found {value!r}")
    return value


def _variant(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value or any(character.isspace() for character in value):
        raise ValueError(f"a variant is one word without spaces, found {value!r}")
    return None if is_auto(value) else value.lower()


def _layers(value: object) -> object:
    """Layer numbers from `"0-2,38"`, one number, or a list, tuple or set of numbers; sorted, each once."""
    if value is None:
        return ()
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        return tuple(sorted({layer for part in parts for layer in _layer_range(part)}))
    numbers = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
    for number in numbers:
        if type(number) is not int or number < 0:  # type(): a bool is an int, too
            raise ValueError(f"skip_layers takes layer numbers from 0 on, found {number!r}")
    return tuple(sorted(set(numbers)))


def _layer_range(part: str) -> range:
    match = re.fullmatch(r"([0-9]+)(?:\s*-\s*([0-9]+))?", part)
    if match is None:
        raise ValueError(f"skip_layers takes numbers and ranges such as '0-2,38', found {part!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"skip_layers has a reversed range: {part!r}. Write '{last}-{first}'")
    return range(first, last + 1)


VariantName = Annotated[str | None, Field(strict=True), BeforeValidator(_variant)]
QuantDtype = Annotated[Literal["float16", "bfloat16", "int8", "fp8_e4m3"], MEMBER_VALUE]
QuantBlockSize = Annotated[Literal[1, 4, 16], BeforeValidator(_exact_int)]
_LAYERS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        {"type": "integer", "minimum": 0},
        {"type": "string", "examples": ["0-2,38"]},
        {"type": "null"},
    ]
}


class QuantSpec(ConfigModel):
    """Low-precision operands of a dense kernel. Each owner serves a part of these values only."""

    dtype_qk: QuantDtype | None = None
    """Type of queries and keys; null leaves the model's."""
    dtype_vo: QuantDtype | None = None
    """Type of values; null leaves the model's."""
    q_block_size: QuantBlockSize = 1
    """Query tokens that share one scale."""
    k_block_size: QuantBlockSize = 16
    """Key tokens that share one scale."""
    flashinfer_backend: VariantName = Field(default=None, exclude=True, repr=False)
    """Accepted spelling of the spec's `variant`; a spec moves it there."""


class SkipSoftmaxSpec(ConfigModel):
    """Skips softmax and value work of key blocks that matter little, by a threshold or a target sparsity."""

    threshold: NonNegative | None = None
    """Blocks whose scores fall this far below the maximum are skipped; 0 skips nothing."""
    target_sparsity: Fraction | None = None
    """Share of blocks to skip; needs the calibration that comes with a checkpoint."""
    disabled_until_timestep: Fraction = 0.0
    """Steps with a normalised timestep above this stay dense; 0 skips on every step."""

    @model_validator(mode="after")
    def _one_criterion(self) -> Self:
        if (self.threshold is None) == (self.target_sparsity is None):
            raise ValueError("skip_softmax needs either threshold or target_sparsity, exactly one of them")
        return self


class BlockSparseSpec(ConfigModel):
    """Training-free block sparsity."""

    sparsity: Fraction = 0.8
    """Share of key blocks that a query block leaves out."""
    start_step: Count = 0
    """First step that is sparse; the steps before it are dense."""
    end_step: Count = 0
    """Number of steps at the end that are dense again."""
    skip_layers: Annotated[tuple[Count, ...], BeforeValidator(_layers), WithJsonSchema(_LAYERS_SCHEMA)] = ()
    """Layers that stay dense: `0-2,38` or a list of numbers."""
    precision: Annotated[Literal["bf16", "fp8", "mix"], MEMBER_VALUE] = "bf16"
    """Arithmetic of the sparse kernel."""


class FastVideoVSASpec(ConfigModel):
    """Video sparse attention. Give the number of tiles or a sparsity; without either, 64 tiles."""

    sparsity: Fraction | None = None
    """Share of tiles that a query tile leaves out."""
    topk: PositiveInt | None = Field(default=None, validate_default=True)
    """Number of tiles that a query tile attends to."""
    tile_size: Annotated[tuple[PositiveInt, PositiveInt, PositiveInt], SEQUENCE] = (4, 4, 4)
    """Extent of a tile in (frames, rows, columns) of the latent grid."""
    coarse_weight: Annotated[Literal["gate", "one"], MEMBER_VALUE] = "gate"
    """Weight of the coarse branch: the learned gate alone (without one: sparse only), or one where no gate comes."""
    provider: VariantName = Field(default=None, exclude=True, repr=False)
    """Accepted spelling of the spec's `variant`; a spec moves it there."""

    @field_validator("topk")
    @classmethod
    def _default_topk(cls, topk: int | None, info: ValidationInfo) -> int | None:
        return DEFAULT_TOPK if topk is None and info.data.get("sparsity") is None else topk

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.topk is not None and self.sparsity is not None:
            raise ValueError("fastvideo_vsa takes either topk or sparsity, not both")
        return self


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class AiterQuantSpec(ConfigModel):
    """Quantised attention of aiter."""

    format: Annotated[
        Literal["bf16", "fp8", "i8fp8", "mxfp8", "mxfp6", "mxfp4", "f6f4", "f8f6"],
        BeforeValidator(_lower),
        MEMBER_VALUE,
    ] = "fp8"
    """Number format of the operands, in any case. Which ones run depends on the GPU."""
