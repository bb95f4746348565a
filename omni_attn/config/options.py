"""Options of a backend that is not built in: any plain data, frozen here, checked later by that backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, PlainSerializer

from omni_attn.frozen import FrozenMapping


def freeze(value: Any) -> Any:
    """`value` with every mapping frozen and every list a tuple.

    Only what JSON can hold passes, so that a dump and its load stay equal.

    Raises:
        ValueError: another type, a key that is not text, NaN or infinity.
    """
    if isinstance(value, Mapping):
        strange = [key for key in value if not isinstance(key, str)]
        if strange:
            raise ValueError(f"keys must be text, found {strange[0]!r}")
        return FrozenMapping({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"numbers must be finite, found {value}")
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"values are text, numbers, true, false, null, lists or mappings, found {value!r}")


def thaw(value: Any) -> Any:
    """The reverse of `freeze`: plain dicts; tuples stay, since every loader takes them for lists."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(thaw(item) for item in value)
    return value


Options = Annotated[
    Mapping[str, Any], AfterValidator(freeze), PlainSerializer(thaw, return_type=dict[str, Any])
]
