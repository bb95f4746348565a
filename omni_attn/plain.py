"""Facts and records as plain data: what `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def to_plain(value: Any) -> Any:
    """A value as dicts, lists, numbers, texts and None.

    Dataclasses and named tuples become dicts of their fields, sets become sorted lists, pydantic models become
    the mapping that a YAML file would hold, with every default that is not None.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(to_plain(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_plain(value._asdict())
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value
