"""`per_role` as a person writes it -- names, specs, trees -- to one mapping of role to spec.

A node with any field of a spec is a spec; any other node is a tree of roles. So a misspelt field never turns
into a new role: where it does not sit beside a correct one, it is a leaf that is no mapping, which only a direct
entry of `per_role` may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from omni_attn.config.base import Loc, line_error, line_errors, unknown_key
from omni_attn.config.names import is_auto, nearest
from omni_attn.config.spec import SPEC_FIELDS, AttentionSpec


def flatten_roles(tree: Any) -> dict[str, AttentionSpec]:
    """The spec of each role that is set; an `auto` entry is left out.

    Raises:
        ValidationError: all problems of the tree at once, each at the path that was written.
        ValueError: `tree` is not a mapping.
    """
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ValueError(f"per_role maps roles to backends, found {tree!r}")
    specs: dict[str, AttentionSpec] = {}
    written: dict[str, Loc] = {}
    problems: list[InitErrorDetails] = []
    for loc, value in _leaves(tree, ()):
        reason = _bad_path(loc) or _bad_leaf(loc, value)
        role = ".".join(map(str, loc))
        if reason is None and role in written:
            reason = f"role {role!r} is given twice: here and at {list(written[role])}"
        if reason is not None:
            problems.append(line_error(loc, reason, value, "bad_role"))
            continue
        written[role] = loc
        if not is_unset(value):
            try:
                specs[role] = AttentionSpec.model_validate(value)
            except ValidationError as error:
                problems += line_errors(error, loc)
    if problems:
        raise ValidationError.from_exception_data("per_role", problems)
    return specs


def is_unset(value: object) -> bool:
    """Says whether an entry leaves its choice open: `auto`, or a mapping with only `backend: auto`."""
    if isinstance(value, Mapping):
        return is_auto(value.get("backend")) and all(
            item is None for key, item in value.items() if key != "backend"
        )
    return is_auto(value)


def is_tree(value: object) -> bool:
    """Says whether a node holds roles further down, and not the fields of one role's spec."""
    return isinstance(value, Mapping) and bool(value) and not any(key in SPEC_FIELDS for key in value)


def _leaves(tree: Mapping[Any, Any], above: Loc) -> Iterator[tuple[Loc, Any]]:
    for key, value in tree.items():
        loc = (*above, key)
        if is_tree(value) and _bad_path(loc) is None:
            yield from _leaves(value, loc)
        else:
            yield loc, value


def _bad_path(loc: Loc) -> str | None:
    key = loc[-1]
    if not isinstance(key, str):
        return f"a role is named by text, found {key!r}: put it in quotes"
    words = key.split(".")
    if not all(words) or any(character.isspace() for character in key):
        return f"a role is one or more words joined by dots, found {key!r}"
    field = next((word for word in words if word in SPEC_FIELDS), None)
    if field is not None:
        return (
            f"{field!r} is a field of a spec and cannot name a role. "
            f"Write the role first: per_role: {{<role>: {{{field}: ...}}}}"
        )
    return None


def _bad_leaf(loc: Loc, value: object) -> str | None:
    key = str(loc[-1])
    if isinstance(value, (Mapping, AttentionSpec)):
        return None if value else "an empty mapping chooses nothing: name a backend, or leave the role out"
    if len(loc) == 1:
        if isinstance(value, str):
            return None
        return f"a role needs a backend name or a mapping with `backend`, found {value!r}"
    if nearest(key, SPEC_FIELDS):
        return unknown_key(key, list(SPEC_FIELDS))
    return (
        f"below {'.'.join(map(str, loc[:-1]))!r} a role needs a mapping with `backend`, found {value!r}. "
        f"Write {key}: {{backend: ...}}, or one of the spec's fields: {', '.join(SPEC_FIELDS)}"
    )
