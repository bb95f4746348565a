"""What every model of the configuration shares: frozen, strict, errors that name the nearest valid key."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from omni_attn.config.names import nearest

Loc = tuple[int | str, ...]


def line_error(loc: Loc, message: str, value: object, kind: str = "value_error") -> InitErrorDetails:
    """One line of a `ValidationError` at the path `loc`, below wherever the error is raised."""
    return InitErrorDetails(type=PydanticCustomError(kind, message), loc=loc, input=value)


def line_errors(error: ValidationError, prefix: Loc = ()) -> list[InitErrorDetails]:
    """The lines of `error` with their messages kept and their paths moved below `prefix`."""
    return [
        line_error((*prefix, *line["loc"]), line["msg"], line["input"], line["type"])
        for line in error.errors(include_url=False, include_context=False)
    ]


def unknown_key(key: str, valid: list[str]) -> str:
    """The message for a key that does not exist, with the nearest one or, without a near one, all of them."""
    near = nearest(key, valid)
    return f"unknown key. Did you mean {near!r}?" if near else f"unknown key. Valid keys: {', '.join(valid)}"


class ConfigModel(BaseModel):
    """Frozen, hashable, and closed: a key that is not a field is an error that names the nearest field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def unknown_key_text(cls, key: str) -> str:
        """The message for a key that is no field."""
        return unknown_key(key, list(cls.model_fields))

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_nearest_key(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(value)
        except ValidationError as error:
            lines = line_errors(error)
            for index, line in enumerate(error.errors(include_url=False, include_context=False)):
                if line["type"] == "extra_forbidden":  # deeper models have explained their own already
                    message = cls.unknown_key_text(str(line["loc"][-1]))
                    lines[index] = line_error(line["loc"], message, line["input"], "unknown_key")
            raise ValidationError.from_exception_data(cls.__name__, lines) from None


def _finite(low: float, high: float) -> Callable[[float], float]:
    interval = f"[{low:g}, {high:g}]" if high < math.inf else f"[{low:g}, infinity)"

    def check(value: float) -> float:
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"must be finite and in {interval}, found {value}")
        return value

    return check


def _member_value(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def _path_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _sequence(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"must be a list, found {value!r}")
    return value


# Strict per field and not per model: a strict model refuses the lists that YAML and JSON give for tuples.
Count = Annotated[int, Field(strict=True, ge=0)]
PositiveInt = Annotated[int, Field(strict=True, ge=1)]
Fraction = Annotated[
    float, Field(strict=True, json_schema_extra={"minimum": 0, "maximum": 1}), AfterValidator(_finite(0, 1))
]
Timestep = Annotated[
    float,
    Field(strict=True, json_schema_extra={"minimum": 0, "maximum": 1000}),
    AfterValidator(_finite(0, 1000)),
]
NonNegative = Annotated[
    float, Field(strict=True, json_schema_extra={"minimum": 0}), AfterValidator(_finite(0, math.inf))
]
Text = Annotated[str, Field(strict=True)]
PathText = Annotated[str, Field(strict=True, min_length=1), BeforeValidator(_path_text)]

MEMBER_VALUE = BeforeValidator(_member_value)
"""Takes an enum member for its value, so that what is stored is always plain text."""
SEQUENCE = BeforeValidator(_sequence)
"""Takes a list or a tuple, never a set, a generator or text."""
