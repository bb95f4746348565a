"""The pipeline YAML: which model, which attention, what to generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from omni_attn.config.attention import AttentionConfig
from omni_attn.config.base import ConfigModel, PathText, Text
from omni_attn.config.families import FAMILIES, Generation
from omni_attn.config.kv_cache import CUDAGraphModeName, KVCacheConfig
from omni_attn.config.names import nearest
from omni_attn.config.parallel import DEGREES, ParallelConfig
from omni_attn.config.spec import NameShorthand
from omni_attn.config.tuned import TunedFor

PIPELINES = tuple(FAMILIES)
"""Names that `pipeline` may have."""


def _pipeline_name(value: str) -> str:
    if value not in PIPELINES:
        near = nearest(value, PIPELINES)
        hint = f" Did you mean {near!r}?" if near else ""
        raise ValueError(f"unknown pipeline {value!r}.{hint} Known: {', '.join(PIPELINES)}")
    return value


def _empty_section(value: object) -> object:
    return {} if value is None else value  # a section whose lines are all commented out reads as null


def _generation_by_family(schema: dict[str, Any]) -> None:
    """Says in a JSON Schema which kind of `generation` goes with which `pipeline`, and which takes an adapter."""
    generation = schema["properties"]["generation"]
    del generation["default"]  # it is the family's
    schema["allOf"] = [
        {
            "if": {"properties": {"pipeline": {"const": name}}, "required": ["pipeline"]},
            "then": {
                "properties": {
                    "generation": section,
                    **({} if kind.takes_adapter else {"adapter": {"type": "null"}}),
                    **_cache_by_family(kind),
                    **({} if kind.splits_sequence else {"parallel": _one_process()}),
                }
            },
        }
        for (name, kind), section in zip(
            FAMILIES.items(), generation["anyOf"], strict=True
        )  # in the same order
    ]


def _cache_by_family(kind: type[Generation]) -> dict[str, Any]:
    if kind.keeps_kv_cache:
        return {}
    unset = {key: {"const": value} for key, value in KVCacheConfig().model_dump().items()}
    return {"kv_cache": {"properties": unset}, "cudagraph_mode": {"const": "NONE"}}


def _one_process() -> dict[str, Any]:
    return {"properties": {degree: {"const": 1} for degree in DEGREES}}


def _families(able: Callable[[type[Generation]], bool]) -> str:
    return ", ".join(name for name, kind in FAMILIES.items() if able(kind))


class _Guessed(NamedTuple):
    """A section `generation`, and the family by whose rules it is judged though none was named."""

    family: str
    section: Any


class PipelineConfig(ConfigModel):
    """One pipeline file. Relative paths in it are relative to the current directory."""

    model_config = ConfigDict(json_schema_extra=_generation_by_family)

    pipeline: Annotated[
        Text, Field(json_schema_extra={"enum": list(PIPELINES)}), AfterValidator(_pipeline_name)
    ]
    """Family of the model."""
    model: PathText
    """Name of a preset, or a checkpoint folder in diffusers' format."""
    adapter: PathText | None = None
    """An adapter that becomes part of the weights as they are loaded, for families that have such: FastH3's."""
    attention: Annotated[AttentionConfig, BeforeValidator(_empty_section), NameShorthand()] = (
        AttentionConfig()
    )
    """Which backend each role of the model uses."""
    generation: Generation = Field(default=cast(Any, None), validate_default=True)
    """What to generate: the keys are those of the family."""
    device: Annotated[Text, Field(min_length=1)] = "auto"
    """Device to run on, such as `cuda:1` or `cpu`; `auto` takes a GPU where there is one."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type to compute in; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    parallel: Annotated[ParallelConfig, BeforeValidator(_empty_section)] = ParallelConfig()
    """Over how many processes, one GPU each, the sequence is split, and how."""
    kv_cache: Annotated[KVCacheConfig, BeforeValidator(_empty_section)] = KVCacheConfig()
    """How keys and values of earlier tokens are kept, by models that keep them."""
    cudagraph_mode: CUDAGraphModeName = "NONE"
    """What of a step over the KV cache is captured as a CUDA graph and replayed."""
    output: PathText = "omni_attn_output"
    """Folder for what is written."""
    tuned_for: TunedFor | None = None
    """Where `attention` was measured, written by `omni-attn tune`; null for choices that nobody measured."""

    @model_validator(mode="before")
    @classmethod
    def _guess_a_misspelt_family(cls, value: Any) -> Any:
        """All problems of a file come at once, those of a section as well whose family is misspelt."""
        if not isinstance(value, Mapping) or "generation" not in value:
            return value
        name = value.get("pipeline")
        near = nearest(name, PIPELINES) if isinstance(name, str) and name not in PIPELINES else None
        return value if near is None else {**value, "generation": _Guessed(near, value["generation"])}

    @field_validator("adapter")
    @classmethod
    def _adapter_of_a_family_that_has_them(cls, value: str | None, info: ValidationInfo) -> str | None:
        family = info.data.get("pipeline")
        if value is not None and family is not None and not FAMILIES[family].takes_adapter:
            able = _families(lambda kind: kind.takes_adapter)
            raise ValueError(f"pipeline {family} fuses none. Leave it out; those that do: {able}")
        return value

    @field_validator("parallel")
    @classmethod
    def _ranks_of_a_family_that_splits(cls, value: ParallelConfig, info: ValidationInfo) -> ParallelConfig:
        if value.size == 1:
            return value
        family, device = info.data.get("pipeline"), info.data.get("device", "auto")
        if family is not None and not FAMILIES[family].splits_sequence:
            able = _families(lambda kind: kind.splits_sequence)
            raise ValueError(
                f"{value.describe()} was asked for, and models of pipeline {family} run in one process. Leave it "
                f"out; those that split their sequence: {able}"
            )
        if device.partition(":")[0] not in ("auto", "cuda", "cpu") or ":" in device:
            raise ValueError(
                f"{value.size} processes were asked for, and device: {device} is one place for all of them. Write "
                "device: cuda (each process takes the GPU of its number) or cpu"
            )
        return value

    @field_validator("kv_cache", "cudagraph_mode")
    @classmethod
    def _cache_of_a_family_that_has_one(cls, value: Any, info: ValidationInfo) -> Any:
        family = info.data.get("pipeline")
        if value in (KVCacheConfig(), "NONE") or family is None or FAMILIES[family].keeps_kv_cache:
            return value
        able = _families(lambda kind: kind.keeps_kv_cache)
        raise ValueError(
            f"models of pipeline {family} keep no KV cache. Leave it out"
            + (f"; those that keep one: {able}" if able else "")
        )

    @field_validator("generation", mode="wrap")
    @classmethod
    def _generation_of_the_family(
        cls, value: Any, _: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Generation:
        """Reads the section by the rules of the family alone, not as whatever member of the union takes it."""
        family = info.data.get("pipeline")
        if isinstance(value, _Guessed):
            family, value = value
        if family is not None:
            return FAMILIES[family].model_validate(_empty_section(value), context=info.context)
        # Which keys are right is unknown without a family, and its own problem is told.
        if not isinstance(value, (Mapping, NoneType, *FAMILIES.values())):
            raise PydanticCustomError("dict_type", "Input should be a valid dictionary")
        return next(iter(FAMILIES.values()))()
