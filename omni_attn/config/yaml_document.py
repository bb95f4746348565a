"""YAML and JSON text to plain data, together with the place of every key.

Four differences from PyYAML's defaults: a key given twice is an error, `5e-3` is a number, only `true` and `false`
are booleans, so that `on` and `no` stay text (YAML 1.2), and digits behind a leading zero stay text too: YAML 1.1 and
1.2 read `010` as different numbers, and PyYAML writes the text `08` without quotes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from omni_attn.errors import ConfigError

_PREFIX = "tag:yaml.org,2002:"


@dataclass
class Document:
    """Data, and where each dotted key path of it is written, such as `wan.yaml:12`; `""` is the whole."""

    data: Any
    places: dict[str, str] = field(default_factory=dict)

    def problem(self, path: str, message: str) -> str:
        """One line of a `ConfigError`: place, key path, message. A path without a place has its parent's."""
        return ": ".join(part for part in (self.place(path), path, message) if part)

    def place(self, path: str) -> str:
        """Where a key path is written, or else its nearest parent; "" if nothing is known."""
        parts = path.split(".") if path else []
        ancestors = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
        return next((self.places[ancestor] for ancestor in ancestors if ancestor in self.places), "")

    def line(self, path: str) -> int:
        """The line of a place, to sort problems by; 0 if nothing is known."""
        number = re.search(r"(?::|line )(\d+)\Z", self.place(path))
        return int(number[1]) if number else 0


class _Loader(yaml.SafeLoader):
    """SafeLoader with the plain scalars of YAML 1.2."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (KeyError, ValueError):  # `!!int abc`, or more digits than Python takes
            kind = node.tag.removeprefix(_PREFIX)
            raise yaml.constructor.ConstructorError(
                problem=f"{str(node.value)[:40]!r} is no {kind}", problem_mark=node.start_mark
            ) from None


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?[0-9]+[eE][-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_PREFIX + _tag, re.compile(rf"(?:{_pattern})\Z"), _first)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0 if text.startswith(("0o", "0x")) else 10)  # `!!int 010` is no octal in YAML 1.2


def _construct_text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    return loader.construct_scalar(node)  # `<<` in the place of a value is only text


_Loader.add_constructor(_PREFIX + "int", _construct_int)
_Loader.add_constructor(_PREFIX + "merge", _construct_text)


def read_document(path: Path) -> Document:
    """The document in a file.

    Raises:
        ConfigError: no such file, not readable as UTF-8 text, not YAML, or keys given twice.
    """
    return parse_document(read_text(path), f"{path}:")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ConfigError: no such file, or not readable as UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def parse_document(text: str, name: str = "line ") -> Document:
    """The document in `text`; `name` with a line number behind it makes the places.

    Raises:
        ConfigError: not YAML, or keys given twice (all of them).
    """
    try:
        data, is_json = json.loads(text), True
    except ValueError:
        data, is_json = None, False
    try:
        # JSON has rules of its own (PyYAML stumbles over surrogate pairs); its places still come from YAML nodes.
        loader = _Loader(text.replace("\t", " ") if is_json else text)
        node = loader.get_single_node()
        places, twice = _places(node, name)
        document = Document(data if is_json or node is None else loader.construct_document(node), places)
    except yaml.YAMLError as error:
        if is_json:
            return Document(data)
        mark = getattr(error, "problem_mark", None)
        line = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0))
        reason = getattr(error, "problem", None) or str(error).replace("\n", " ")
        raise ConfigError(f"{name}{line + 1}: not valid YAML: {reason}") from None
    if twice:
        raise ConfigError(*twice)
    return document


def parse_value(text: str) -> Any:
    """The value of an override: a YAML scalar, or flow YAML when it begins like one.

    A scalar is never parsed any further, so that a prompt may hold `: ` and ` #`.

    Raises:
        ConfigError: not YAML.
    """
    text = text.strip()
    if text.startswith(("{", "[", '"', "'")):
        return parse_document(text).data
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    try:
        return loader.construct_document(yaml.ScalarNode(tag, text))
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"not valid YAML: {error.problem}") from None


def _places(root: yaml.Node | None, name: str) -> tuple[dict[str, str], list[str]]:
    """The place of every key and list item below `root`, and a problem for every key given twice."""
    places: dict[str, str] = {"": f"{name}1"}
    twice: list[str] = []

    def walk(node: yaml.Node, path: tuple[str, ...], line: int, above: frozenset[int]) -> None:
        places[".".join(path)] = f"{name}{line}"
        if id(node) in above:
            raise ConfigError(f"{name}{line}: {'.'.join(path)}: an anchor cannot contain itself")
        above |= {id(node)}
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                walk(item, (*path, str(index)), item.start_mark.line + 1, above)
        if isinstance(node, yaml.MappingNode):
            first: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                below, line = (*path, str(key.value)), key.start_mark.line + 1
                known = first.setdefault((key.tag, str(key.value)), id(key))
                if known != id(key):
                    twice.append(f"{name}{line}: {'.'.join(below)}: the key is given twice")
                walk(value, below, line, above)

    if root is not None:
        walk(root, (), root.start_mark.line + 1, frozenset())
    return places, twice
