"""YAML to data and places: scalars of YAML 1.2, no key twice, lines that are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni_attn.config.yaml_document import parse_document, parse_value, read_document
from omni_attn.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-3", 0.005),
        ("-1.5E+2", -150.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("3", 3),
        ("-7", -7),
        ("0", 0),
        ("-0", 0),
        ("+12", 12),
        ("010", "010"),
        ("08", "08"),
        ("-007", "-007"),
        ("0.5", 0.5),
        ("08.5", 8.5),
        ("1e3", 1000.0),
        ("01e3", 1000.0),
        ("0x10", 16),
        ("0o17", 15),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("No", "No"),
        ("y", "y"),
        ("16:9", "16:9"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("e3", "e3"),
        ("1.2.3", "1.2.3"),
        ("<<", "<<"),
        ("=", "="),
        (".inf", float("inf")),
        ("'5e-3'", "5e-3"),
        ("[1, 5e-3, on]", [1, 0.005, "on"]),
        ("{a: {b: no}}", {"a": {"b": "no"}}),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    for got in (parse_value(text), parse_document(f"key: {text}").data["key"]):
        assert got == value
        assert type(got) is type(value)


@pytest.mark.parametrize("text", ["a cat: running", "50 % # of it", "- no list", "a, b", "*star", "&amp"])
def test_an_override_scalar_is_not_parsed_any_further(text: str) -> None:
    assert parse_value(text) == text


def test_a_leading_zero_is_a_number_for_those_who_say_so() -> None:
    assert parse_document("key: !!int 010").data == {"key": 10}


def test_keys_stay_text_too() -> None:
    assert parse_document("on: {no: {08: 1}}").data == {"on": {"no": {"08": 1}}}


def test_places() -> None:
    document = parse_document("a: 1\nb:\n  c.d: [x,\n    {e: 2}]\n\n  f: &f {g: 3}\nh: *f\n", "x.yaml:")
    assert document.places == {
        "": "x.yaml:1",
        "a": "x.yaml:1",
        "b": "x.yaml:2",
        "b.c.d": "x.yaml:3",
        "b.c.d.0": "x.yaml:3",
        "b.c.d.1": "x.yaml:4",
        "b.c.d.1.e": "x.yaml:4",
        "b.f": "x.yaml:6",
        "b.f.g": "x.yaml:6",
        "h": "x.yaml:7",
        "h.g": "x.yaml:6",
    }
    assert document.problem("b.f.unknown", "what") == "x.yaml:6: b.f.unknown: what"
    assert document.problem("zzz", "what") == "x.yaml:1: zzz: what"
    assert document.problem("", "what") == "x.yaml:1: what"


def test_every_key_given_twice_is_reported() -> None:
    with pytest.raises(ConfigError) as error:
        parse_document("a: 1\nb: {c: 1, c: 2}\n'a': 3\n", "x.yaml:")
    assert error.value.problems == (
        "x.yaml:2: b.c: the key is given twice",
        "x.yaml:3: a: the key is given twice",
    )
    with pytest.raises(ConfigError, match="line 1: a: the key is given twice"):
        parse_document('{"a": 1, "a": 2}')


def test_merge_keys_work() -> None:
    text = "base: &b {x: 1, y: 2}\nmore: &m {z: 0}\none: {<<: *b, y: 3}\ntwo: {<<: [*b, *m]}"
    data = parse_document(text).data
    assert (data["one"], data["two"]) == ({"x": 1, "y": 3}, {"x": 1, "y": 2, "z": 0})


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: [1, 2\n", 3, "expected"),
        ("a: 1\n b: 2\n", 2, "mapping values are not allowed"),
        ("a: !!python/object:os.system x", 1, "could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", 2, "but found another document"),
        ("a: 1\nb: \x00", 2, "special characters"),
        ("a: 1\nb: !!int abc", 2, "'abc' is no int"),
        ("a: 1\nb: !!bool maybe", 2, "'maybe' is no bool"),
        ("a: &a [1, *a]", 1, "cannot contain itself"),
    ],
)
def test_text_that_is_no_yaml(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        parse_document(text, "x.yaml:")
    assert str(error.value).startswith(f"x.yaml:{line}: ")


@pytest.mark.parametrize(
    "data", [{"a": "\U0001f600 \x7f\t"}, {"k" * 2000: [1, {"b": "/"}]}, 5e-3, "x", None, [True]]
)
def test_json_is_read_exactly(data: Any) -> None:
    for text in (json.dumps(data), json.dumps(data, indent="\t"), json.dumps(data, ensure_ascii=False)):
        assert parse_document(text).data == data


def test_json_has_places() -> None:
    assert parse_document('{\n\t"a": {\n\t\t"b": 1}}').places["a.b"] == "line 3"


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_document(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_document(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_document(binary)


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "marked.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_document(path).data == {"a": 1}


@pytest.mark.parametrize("text", ["9" * 5000, "[" + "9" * 5000 + "]", "[1", "{a: b: c}"])
def test_an_override_value_that_is_no_yaml(text: str) -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        parse_value(text)
