"""`--set KEY=VALUE`: one value of a pipeline file replaced from the command line.

The key is the dotted path; below `attention.per_role`, the role is everything up to the first spec field. An
override sees through all the ways in which the file may write the same thing: a backend name alone, a tree of
roles, a section left empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from omni_attn.config.base import unknown_key
from omni_attn.config.names import nearest
from omni_attn.config.roles import is_tree
from omni_attn.config.spec import SPEC_FIELDS
from omni_attn.config.yaml_document import Document, parse_value
from omni_attn.errors import ConfigError

Path = tuple[str, ...]

_ROLES: Path = ("attention", "per_role")
# A word of a role must be very like a field before it is called a misspelt one: roles are free text.
_MISSPELT = 0.75


def apply_overrides(document: Document, overrides: Iterable[str]) -> list[str]:
    """Applies `KEY=VALUE` texts to the document, the last one wins; gives back what is wrong with the others.

    The data that the document was made with stays as it was; the places of what is set name the override.
    """
    problems: list[str] = []
    for text in overrides:
        key, equals, scalar = text.partition("=")
        try:
            if not equals or not all(key.split(".")):
                raise ConfigError("write KEY=VALUE, for example generation.seed=3")
            path, value = _path(document.data, key), parse_value(scalar)
            if isinstance(value, str) and _is_role(path):
                value = {"backend": value}  # a name alone would be refused further down in a tree
            data = _with_value(document.data, path, value)
        except ConfigError as error:
            problems += [f"--set {text}: {problem}" for problem in error.problems]
            continue
        replaced = _first_new(document.data, path)
        places = {
            at: place for at, place in document.places.items() if not f"{at}.".startswith(f"{replaced}.")
        }
        document.data, document.places = data, {**places, replaced: f"--set {text}"}
    return problems


def _path(data: Any, key: str) -> Path:
    """The keys that lead to the value: those of the file, where it writes the role already."""
    words = tuple(key.split("."))
    if words[:2] != _ROLES or len(words) == 2:
        return words
    words = words[2:]
    end = next((index for index, word in enumerate(words) if word in SPEC_FIELDS), len(words))
    role, fields = ".".join(words[:end]), words[end:]
    if not role:
        raise ConfigError(
            f"{key}: no role stands before {words[0]!r}. Write attention.per_role.<role>.{words[0]}"
        )
    written = _written(_role_tree(data), role)
    if written is None and not fields:
        misspelt = next((word for word in words[1:] if nearest(word, SPEC_FIELDS, _MISSPELT)), None)
        if misspelt is not None:
            raise ConfigError(f"{key}: {unknown_key(misspelt, list(SPEC_FIELDS))}")
    return (*_ROLES, *(written or (role,)), *fields)


def _is_role(path: Path) -> bool:
    return len(path) > 2 and path[:2] == _ROLES and not any(step in SPEC_FIELDS for step in path)


def _first_new(data: Any, path: Path) -> str:
    """The dotted beginning of `path` from which on everything comes from the override."""
    node = data
    for length, step in enumerate(path, 1):
        node = node.get(step) if isinstance(node, Mapping) else None
        if node is None:
            return ".".join(path[:length])
    return ".".join(path)


def _role_tree(data: Any) -> Mapping[str, Any]:
    attention = _entries(data, (), "attention").get("attention")
    return _entries(_entries(attention, _ROLES[:1], "per_role").get("per_role"), _ROLES, "")


def _written(tree: Mapping[str, Any], role: str) -> Path | None:
    """The keys under which the tree writes the spec of `role`, or None where it does not."""
    for key, node in tree.items():
        if key == role and not is_tree(node):
            return (key,)
        if is_tree(node) and role.startswith(f"{key}."):
            below = _written(node, role.removeprefix(f"{key}."))
            if below is not None:
                return (key, *below)
    return None


def _with_value(node: Any, path: Path, value: Any, above: Path = ()) -> Any:
    """`node` with the value at `path` replaced; every mapping on the way is a new one."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    entries = _entries(node, above, step)
    if above == _ROLES and (not rest or rest[0] in SPEC_FIELDS):
        entries = _beside_its_tree(entries, step)
    return {**entries, step: _with_value(entries.get(step), rest, value, (*above, step))}


def _beside_its_tree(roles: dict[str, Any], role: str) -> dict[str, Any]:
    """Makes room for a role whose key holds a tree of longer roles in the file: those move to dotted keys."""
    tree = roles.get(role)
    if not isinstance(tree, Mapping) or not is_tree(tree):
        return roles
    if not all(isinstance(node, (Mapping, BaseModel)) for node in tree.values()):
        return roles  # no tree of roles, but a spec with a misspelt field: validation says so
    others = {key: node for key, node in roles.items() if key != role}
    return {**others, **{f"{role}.{key}": node for key, node in tree.items()}}


def _entries(node: Any, above: Path, step: str) -> dict[str, Any]:
    """The entries of a node, also where it is written in a shorter form, so that `step` can be set in it."""
    if node is None:
        return {}
    if isinstance(node, BaseModel):
        return node.model_dump()
    if isinstance(node, Mapping):
        return dict(node)
    if isinstance(node, str) and above == ("attention",):
        return {"default": node}
    if isinstance(node, str) and above[:1] == ("attention",) and step in SPEC_FIELDS:
        return {"backend": node}
    raise ConfigError(f"{'.'.join(above)} holds {node!r}, which has no key {step!r}: set it as a whole")
