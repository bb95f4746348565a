"""The choice for one role: a backend and the options that this backend owns.

A check that needs two fields looks back at the ones declared above its own (`info.data`), so that its error
carries the field's path and comes out together with all other errors.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from omni_attn.config.base import SEQUENCE, ConfigModel, PositiveInt, line_error
from omni_attn.config.blocks import (
    AiterQuantSpec,
    BlockSparseSpec,
    FastVideoVSASpec,
    QuantSpec,
    SkipSoftmaxSpec,
    VariantName,
)
from omni_attn.config.names import KNOWN_NAMES, OPTION_OWNERS, canonical_name, foreign_option, is_auto
from omni_attn.config.options import Options


class NameShorthand:
    """Annotation for a model that also takes a backend name alone: adds that form to the JSON Schema."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        name = {"type": "string", "description": "The name of a backend alone."}
        return {"anyOf": [name, handler(schema)]}


def _backend(value: object) -> object:
    if isinstance(value, Enum):
        value = value.name  # a member's name is the public name, its value a class path
    if is_auto(value):
        raise ValueError(
            "auto means 'not set here' and takes no options: name a backend, or leave the entry out"
        )
    return canonical_name(value)


BackendName = Annotated[
    str, Field(strict=True, json_schema_extra={"examples": list(KNOWN_NAMES)}), BeforeValidator(_backend)
]
# Choosing one of these backends is the opt-in to its block, so the block is never absent there.
_DEFAULT_BLOCKS: dict[str, type[ConfigModel]] = {
    "block_sparse": BlockSparseSpec,
    "fastvideo_vsa": FastVideoVSASpec,
    "aiter_quant": AiterQuantSpec,
}
# Keys inside a block that are accepted spellings of the spec's `variant`.
_VARIANT_KEYS = {"quant": "flashinfer_backend", "fastvideo_vsa": "provider"}


class AttentionSpec(ConfigModel):
    """One backend with its options. A backend name alone stands for a spec without options."""

    backend: BackendName
    """Name of the backend, in any case; aliases are SDPA, VSA, FLASHINFER, TRTLLM, CUDNN, SAGE."""
    variant: VariantName = None
    """Kernel generation or provider inside the backend; null lets the platform pick."""
    quant: QuantSpec | None = None
    """Low-precision operands (TRTLLM_ATTN, FLASHINFER_ATTN)."""
    skip_softmax: SkipSoftmaxSpec | None = None
    """Skipping of key blocks that matter little (TRTLLM_ATTN)."""
    block_sparse: BlockSparseSpec | None = Field(default=None, validate_default=True)
    """Training-free block sparsity (RAINFUSION_ATTN, BLOCK_SUMMARY_ATTN)."""
    fastvideo_vsa_topk: PositiveInt | None = Field(default=None, exclude=True, repr=False)
    """Short spelling of `fastvideo_vsa.topk`; reads as the number in force."""
    fastvideo_vsa: FastVideoVSASpec | None = Field(default=None, validate_default=True)
    """Video sparse attention (FASTVIDEO_VSA)."""
    aiter_quant: AiterQuantSpec | None = Field(default=None, validate_default=True)
    """Quantised attention of aiter (AITER_QUANT_ATTN)."""
    options: Options | None = None
    """Options of a backend that is not built in, checked by its own model at selection."""
    fallback: Annotated[tuple[Annotated[AttentionSpec, NameShorthand()], ...], SEQUENCE] = ()
    """What runs instead, in this order, where this backend is refused. Without it a refusal is an error."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"backend": value} if isinstance(value, str) else value

    @field_validator(*OPTION_OWNERS, "options", mode="before")
    @classmethod
    def _owned(cls, value: Any, info: ValidationInfo) -> Any:
        backend, option = info.data.get("backend"), str(info.field_name)
        if value is not None and backend is not None and (reason := foreign_option(option, backend)):
            raise ValueError(reason)
        return value

    @field_validator(*_DEFAULT_BLOCKS)
    @classmethod
    def _opted_in(cls, block: ConfigModel | None, info: ValidationInfo) -> ConfigModel | None:
        option = str(info.field_name)
        if block is None and info.data.get("backend") in OPTION_OWNERS[option]:
            return _DEFAULT_BLOCKS[option]()
        return block

    @field_validator(*_VARIANT_KEYS)
    @classmethod
    def _one_variant(cls, block: ConfigModel | None, info: ValidationInfo) -> ConfigModel | None:
        key = _VARIANT_KEYS[str(info.field_name)]
        spelled, variant = getattr(block, key, None), info.data.get("variant")
        if spelled and variant and spelled != variant:
            raise ValueError(f"{key} {spelled!r} differs from variant {variant!r}: give one of the two")
        return block

    @field_validator("fastvideo_vsa")
    @classmethod
    def _one_topk(cls, block: FastVideoVSASpec | None, info: ValidationInfo) -> FastVideoVSASpec | None:
        topk = info.data.get("fastvideo_vsa_topk")
        if block is None or topk is None:
            return block
        if block.sparsity is not None:
            raise ValueError(f"give either fastvideo_vsa_topk {topk} or sparsity {block.sparsity}, not both")
        if "topk" in block.model_fields_set and block.topk != topk:
            raise ValueError(f"topk {block.topk} differs from fastvideo_vsa_topk {topk}: give one of the two")
        return block.model_copy(update={"topk": topk})

    @field_validator("fallback")
    @classmethod
    def _flat(cls, fallback: tuple[AttentionSpec, ...]) -> tuple[AttentionSpec, ...]:
        message = "a fallback has no fallback of its own: write one flat list"
        nested = [
            line_error((index, "fallback"), message, spec)
            for index, spec in enumerate(fallback)
            if spec.fallback
        ]
        if nested:
            raise ValidationError.from_exception_data("fallback", nested)
        return fallback

    @model_validator(mode="after")
    def _settled(self) -> Self:
        """Moves each accepted spelling to its one place, so that equal choices are equal specs."""
        for option, key in _VARIANT_KEYS.items():
            block = getattr(self, option)
            if block is not None and key in block.model_fields_set:
                bare = block.model_copy(update={key: None})
                bare.model_fields_set.discard(key)
                self._settle("variant", getattr(block, key) or self.variant)
                self._settle(option, None if bare == QuantSpec() else bare)
        if self.fastvideo_vsa is not None:
            if "fastvideo_vsa_topk" in self.model_fields_set:
                self._settle("fastvideo_vsa", self.fastvideo_vsa)
            self.__dict__["fastvideo_vsa_topk"] = self.fastvideo_vsa.topk
        message = f"the fallback is {self.backend} itself: name another backend or variant"
        same = [
            line_error(("fallback", index), message, spec)
            for index, spec in enumerate(self.fallback)
            if (spec.backend, spec.variant) == (self.backend, self.variant)
        ]
        if same:
            raise ValidationError.from_exception_data("AttentionSpec", same)
        return self

    def _settle(self, name: str, value: object) -> None:
        # Only while the object is built: nobody has seen or hashed it yet.
        self.__dict__[name] = value
        if value is None:
            self.model_fields_set.discard(name)
        else:
            self.model_fields_set.add(name)


SpecOrName = Annotated[AttentionSpec, NameShorthand()]
SPEC_FIELDS: tuple[str, ...] = tuple(AttentionSpec.model_fields)
