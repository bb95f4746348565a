"""The whole choice of a person: a spec per role or category, and a default."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    PrivateAttr,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from omni_attn.config.base import ConfigModel
from omni_attn.config.names import canonical_name, is_auto
from omni_attn.config.roles import flatten_roles, is_unset
from omni_attn.config.spec import AttentionSpec, SpecOrName
from omni_attn.errors import ConfigError
from omni_attn.frozen import FrozenMapping

ENVIRONMENT_VARIABLES = ("OMNI_ATTN_BACKEND", "DIFFUSION_ATTENTION_BACKEND")
"""Variables that supply `default`, the first one first."""

UNREAD_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "VLLM_ATTENTION_BACKEND": "set OMNI_ATTN_BACKEND",
        "FASTVIDEO_ATTENTION_BACKEND": "set OMNI_ATTN_BACKEND",
        "DIFFUSERS_ATTN_BACKEND": "set OMNI_ATTN_BACKEND",
        "DIFFUSION_ATTENTION_QUANT": "write the `quant` block of a spec",
    }
)
"""Variables that other projects' users know, and what to do here instead."""


class _RoleTree:
    """Annotation that adds the accepted shorthands of `per_role` to its JSON Schema."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        roles = handler(schema)
        name = {"type": "string", "description": "The name of a backend alone."}
        # A tree holds mappings only, so a misspelt field of a spec (a text or number) matches neither form.
        tree = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "object"}}
        return {**roles, "additionalProperties": {"anyOf": [name, roles["additionalProperties"], tree]}}


Roles = Annotated[
    Mapping[str, AttentionSpec],
    BeforeValidator(flatten_roles),
    AfterValidator(FrozenMapping),
    PlainSerializer(dict, return_type=dict[str, AttentionSpec]),
    _RoleTree(),
]


def _none_if_unset(value: object) -> object:
    return None if is_unset(value) else value


class AttentionConfig(ConfigModel):
    """Which backend each role of a model uses. Whatever is set nowhere is the platform's choice."""

    default: Annotated[SpecOrName | None, BeforeValidator(_none_if_unset)] = None
    """For every role without an entry of its own; null or `auto` leaves it to the platform."""
    per_role: Roles = Field(default_factory=FrozenMapping)
    """Role or role category to a backend name or a spec; roles may be nested (`ltx2: {audio_self: ...}`)."""

    # The environment variable that supplied `default`. Pydantic's == compares private attributes, too.
    _default_variable: str | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"default": value} if isinstance(value, str) else value

    def resolve(
        self, role: str, role_category: str | None = None
    ) -> tuple[AttentionSpec, str] | tuple[None, None]:
        """The spec for a role and the label of where it stands, or `(None, None)` when nobody chose.

        Role, then category, then default. Names match exactly: a dotted role inherits nothing from a prefix.
        """
        return next(
            (
                (spec, source)
                for spec, source in (
                    (self.per_role.get(role), f"per_role['{role}']"),
                    (self.per_role.get(role_category or ""), f"per_role['{role_category}'] (role_category)"),
                    (self.default, f"env {self._default_variable}" if self._default_variable else "default"),
                )
                if spec is not None
            ),
            (None, None),
        )

    def with_environment(self, environ: Mapping[str, str]) -> Self:
        """This config with `default` from the environment; itself if it has one or nothing is set there.

        Warns about variables of other projects that look as if they would choose a backend here, too.

        Raises:
            ConfigError: the variables name different backends, or one holds no backend name.
        """
        if self.default is not None:
            return self
        for variable, advice in UNREAD_VARIABLES.items():
            if environ.get(variable):
                warnings.warn(f"{variable} is not read by omni_attn: {advice} instead", stacklevel=2)
        named: dict[str, str] = {}
        for variable in ENVIRONMENT_VARIABLES:
            text = environ.get(variable, "").strip()
            if text and not is_auto(text):
                try:
                    named[variable] = canonical_name(text)
                except ConfigError as error:
                    raise ConfigError(f"environment variable {variable}: {error}") from None
        if len(set(named.values())) > 1:
            pairs = " and ".join(f"{variable}={name}" for variable, name in named.items())
            raise ConfigError(f"{pairs} name different backends: unset one of them")
        if not named:
            return self
        variable, name = next(iter(named.items()))
        supplied = self.model_copy(update={"default": AttentionSpec(backend=name)})
        supplied._default_variable = variable
        return supplied

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's; a new `default` is no longer the environment's."""
        copied = super().model_copy(update=update, deep=deep)
        if update and "default" in update:
            copied._default_variable = None
        return copied

    def __hash__(self) -> int:
        return hash((self.default, self.per_role, self._default_variable))
