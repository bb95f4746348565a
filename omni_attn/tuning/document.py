"""The tuned pipeline file: the person's own text with the attention section replaced and the numbers beside it.

Only the lines of `attention` and `tuned_for` are touched, so that comments and order stay. What comes out is read
back: where the text cannot be edited that way (JSON, flow style, anchors), the whole file is written anew.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from omni_attn.config import AttentionConfig, AttentionSpec, PipelineConfig, load_pipeline
from omni_attn.config.yaml_document import parse_document
from omni_attn.errors import ConfigError
from omni_attn.frozen import FrozenMapping
from omni_attn.tuning.measure import Result
from omni_attn.tuning.tune import CaseResults, RoleTuning, Tuning

_PLAIN_KEY = re.compile(r"(?!(?:true|false|null)\Z)[A-Za-z_][\w.-]*", re.IGNORECASE)


def tuned_document(text: str, tuning: Tuning) -> str:
    """The text of a pipeline file with the choices of a tuning in it.

    Args:
        text: the file as the person wrote it.
    """
    config = load_pipeline(text, environ={})
    roles = FrozenMapping({**config.attention.per_role, **{role.role: role.winner for role in tuning.roles}})
    attention = config.attention.model_copy(update={"per_role": roles})
    wanted = config.model_copy(update={"attention": attention, "tuned_for": tuning.tuned_for})
    sections = {
        "attention": list(_attention_lines(attention, tuning)),
        "tuned_for": list(_tuned_for_lines(tuning)),
    }
    edited = _edited(text, sections, keep_old=config.tuned_for is None)
    if edited is not None and _reads_as(edited, wanted):
        return edited
    anew = _written_anew(text, sections)
    assert _reads_as(anew, wanted), anew
    return anew


def check_output(path: Path, *, force: bool) -> None:
    """Nothing if a file can be written there; asked before anything is measured.

    Raises:
        ConfigError: it exists and `force` is not set, or there is no such folder.
    """
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"lies in {path.parent}, which does not exist"
        raise ConfigError(f"--output {path}: {what}. Name a file in a folder that exists.")
    if path.exists() and not force:
        raise ConfigError(
            f"--output {path}: exists already. Name another file, or add --force to replace it."
        )


def _reads_as(text: str, wanted: PipelineConfig) -> bool:
    try:
        return load_pipeline(text, environ={}) == wanted
    except ConfigError:
        return False


def _attention_lines(attention: AttentionConfig, tuning: Tuning) -> Iterator[str]:
    yield "attention:"
    yield f"  # Chosen by `omni-attn tune` on {datetime.date.today()}, on {tuning.tuned_for}: for each role the fastest"
    yield f"  # of what runs it with a relative error of at most {tuning.max_error:g}. Times are medians of one call."
    for role, reason in tuning.unmeasured.items():
        yield f"  # Role {role} was not measured: {reason}."
    if attention.default is not None:
        yield from _lines({"default": _plain(attention.default)}, 1)
    yield "  per_role:"
    measured = {role.role: role for role in tuning.roles}
    for name, spec in attention.per_role.items():
        if name in measured:
            yield from ("    # " + line for line in _measured_lines(measured[name], tuning))
        yield from _lines({name: _plain(spec)}, 2)


def _measured_lines(role: RoleTuning, tuning: Tuning) -> Iterator[str]:
    for call in role.calls:
        yield f"{call.layers} layers: {call.case}, {tuning.tuned_for.dtype}"
        width = max(len(result.label) for result in call.results)
        for result in _ordered(call):
            mark = "  <- chosen" if role.won(result) else ""
            yield f"  {result.label.ljust(width)}  {_finding(result)}{mark}"


def _ordered(call: CaseResults) -> list[Result]:
    """The measured ones, fastest first, then the others."""
    return sorted(call.results, key=lambda r: float("inf") if r.milliseconds is None else r.milliseconds)


def _finding(result: Result) -> str:
    if result.milliseconds is None:
        return " ".join(f"{result.status}: {result.reason}".split())
    kind = "" if result.candidate.numerics == "exact" else f", {result.candidate.numerics}"
    wrong = ", wrong numbers" if result.is_broken else ""
    return f"{result.milliseconds:.3f} ms, {result.tflops:.4g} TFLOP/s, error {result.error:.1e}{kind}{wrong}"


def _tuned_for_lines(tuning: Tuning) -> Iterator[str]:
    yield "tuned_for:"
    yield "  # What the choices were measured on; the commands say so wherever one of these differs."
    yield from _lines(tuning.tuned_for.model_dump(mode="json", exclude_none=True), 1)


def _plain(spec: AttentionSpec) -> Any:
    """A spec as a person would write it: only what is set."""
    return spec.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def _lines(data: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Block YAML: mappings by indentation, everything else as JSON, which is YAML."""
    for key, value in data.items():
        name = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)
        if isinstance(value, Mapping) and value:
            yield f"{'  ' * depth}{name}:"
            yield from _lines(value, depth + 1)
        else:
            yield f"{'  ' * depth}{name}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    """Backend names and the like as plain words, everything that YAML could take for something else as JSON."""
    if isinstance(value, str) and _PLAIN_KEY.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def _edited(text: str, sections: Mapping[str, list[str]], *, keep_old: bool) -> str | None:
    """The text with its sections replaced line by line; None where it is no block of keys at the margin."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        return None
    lines = text.splitlines()
    starts = {key.value: key.start_mark.line for key, _ in root.value}
    ends = dict(zip(starts, [*list(starts.values())[1:], len(lines)], strict=True))
    new = dict(sections)
    out: list[str] = []
    line = 0
    for name, start in starts.items():
        if name not in new:
            continue
        end = _end_of_section(lines, start, ends[name])
        out += [*lines[line:start], *new.pop(name)]
        if name == "attention":
            if keep_old and end - start > 1:
                out += ["# Before:", *(f"# {old}".rstrip() for old in lines[start:end])]
            if "tuned_for" not in starts:
                out += ["", *new.pop("tuned_for")]
        line = end
    out += lines[line:]
    for section in new.values():
        out += ["", *section]
    return "\n".join(out) + "\n"


def _end_of_section(lines: list[str], start: int, end: int) -> int:
    """Blank lines and comments at the margin before the next key belong to that key."""
    while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1
    return end


def _written_anew(text: str, sections: Mapping[str, list[str]]) -> str:
    data = parse_document(text).data
    rest = {key: value for key, value in data.items() if key not in sections}
    lines = ["# Written by `omni-attn tune` from a file whose comments could not be kept.", *_lines(rest, 0)]
    for section in sections.values():
        lines += ["", *section]
    return "\n".join(lines) + "\n"
