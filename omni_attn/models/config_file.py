"""A transformer's `config.json` as the parameter record of its family, every key of it known. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from omni_attn.calibration import CALIBRATION_SECTION
from omni_attn.config.names import nearest
from omni_attn.errors import ConfigError

Record = TypeVar("Record")


def complete_values(
    record: type[Any],
    values: Mapping[str, Any],
    *,
    class_name: str,
    model: str,
    where: str,
    absent: Mapping[str, Any],
    source: str,
) -> dict[str, Any]:
    """A value for each field of the record, from a parsed config.json.

    Keys that start with an underscore are diffusers' own notes and are ignored, `_class_name` excepted; so is
    `sparse_attention_config`, which says nothing about the transformer and is read elsewhere (omni_attn.calibration).

    Args:
        record: the dataclass whose fields are the keys.
        values: the parsed file.
        class_name: the only `_class_name` that there may be.
        model: the family in words, "a Wan transformer", for error texts.
        where: what to do about another class, for error texts.
        absent: what holds for keys that a file may leave out.
        source: where the file came from, for error texts.

    Raises:
        ConfigError: another class, unknown or missing keys; all problems at once.
    """
    if (found := values.get("_class_name", class_name)) != class_name:
        raise ConfigError(f"{source}: _class_name is {found!r}, and only {class_name!r} is {model}. {where}")
    fields = [field.name for field in dataclasses.fields(record)]
    given = {
        key: value for key, value in values.items() if not key.startswith("_") and key != CALIBRATION_SECTION
    }
    complete = {**absent, **given}
    problems = [f"{source}: {_unknown_key(key, fields)}" for key in given if key not in fields]
    problems += [
        f"{source}: {key} is missing. Add it: {model} has no default."
        for key in fields
        if key not in complete
    ]
    if problems:
        raise ConfigError(*problems)
    if isinstance(complete.get("patch_size"), list):
        complete["patch_size"] = tuple(complete["patch_size"])
    return complete


def build_record(record: Callable[..., Record], values: Mapping[str, Any], source: str) -> Record:
    """The record of these values.

    Raises:
        ConfigError: the record refuses them; each problem is headed by the source.
    """
    try:
        return record(**values)
    except ConfigError as error:
        raise ConfigError(*(f"{source}: {problem}" for problem in error.problems)) from None


def is_count(value: object) -> bool:
    """True for positive integers; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _unknown_key(key: str, fields: list[str]) -> str:
    guess = nearest(key, fields)
    hint = f"Did you mean {guess!r}?" if guess else f"Known keys: {', '.join(fields)}."
    return f"{key}: unknown key. {hint}"
