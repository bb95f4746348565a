"""From a file, text or mapping to a configuration; whatever is wrong in it comes out as one ConfigError."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from omni_attn.config.attention import AttentionConfig
from omni_attn.config.base import ConfigModel
from omni_attn.config.overrides import apply_overrides
from omni_attn.config.pipeline import PipelineConfig
from omni_attn.config.yaml_document import Document, parse_document, read_document
from omni_attn.errors import ConfigError

Model = TypeVar("Model", bound=ConfigModel)

_FILE_LIKE = re.compile(r"[^\n{]+\.(ya?ml|json)|[^\n{:]*[/\\][^\n{:]*", re.IGNORECASE)
# These messages are whole sentences of ours; pydantic's own do not say what was found.
_OWN_KINDS = frozenset({"unknown_key", "bad_role", "value_error"})


def load_config(
    source: AttentionConfig | Mapping[str, Any] | os.PathLike[str] | str,
    *,
    environ: Mapping[str, str] | None = None,
) -> AttentionConfig:
    """The attention config in a path, YAML or JSON text, mapping or backend name, then the environment.

    Text that names an existing file is a path. `environ` None reads this process's environment.

    Raises:
        ConfigError: all problems at once, each with file, line and key path where known.
    """
    if isinstance(source, AttentionConfig):
        config = source
    else:
        document = _document(source)
        if isinstance(document.data, Mapping) and not {"pipeline", "attention"}.isdisjoint(document.data):
            raise ConfigError(
                document.problem(
                    "", "this is a whole pipeline: use load_pipeline, or pass its `attention` section"
                )
            )
        config = _validated(AttentionConfig, document)
    return config.with_environment(os.environ if environ is None else environ)


def load_pipeline(
    source: Mapping[str, Any] | os.PathLike[str] | str,
    *,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> PipelineConfig:
    """The pipeline in a path, YAML or JSON text or mapping, then `KEY=VALUE` overrides, then the environment.

    Raises:
        ConfigError: all problems at once, each with file and line or override, and key path.
    """
    document = _document(source)
    if document.data is not None and not isinstance(document.data, Mapping):
        raise ConfigError(document.problem("", f"a pipeline is a mapping of keys, found {document.data!r}"))
    pipeline = _validated(PipelineConfig, document, apply_overrides(document, overrides))
    attention = pipeline.attention.with_environment(os.environ if environ is None else environ)
    return pipeline.model_copy(update={"attention": attention})


def _document(source: Mapping[str, Any] | os.PathLike[str] | str) -> Document:
    if isinstance(source, Mapping):
        return Document(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"a configuration is a path, text or mapping, found {type(source).__name__}")
    if isinstance(source, os.PathLike) or _is_file(source):
        return read_document(Path(source))
    if not source.strip():
        raise ConfigError("the configuration is empty text: write {} to choose nothing")
    if _FILE_LIKE.fullmatch(source):
        raise ConfigError(f"{source}: there is no such file")
    return parse_document(source)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # far too long for a path, or a NUL in it
        return False


def _validated(model: type[Model], document: Document, problems: Iterable[str] = ()) -> Model:
    found = list(problems)
    try:
        config = model.model_validate({} if document.data is None else document.data)
    except ValidationError as error:
        lines = error.errors(include_url=False, include_context=False)
        located = [(".".join(map(str, line["loc"])), _message(line)) for line in lines]
        found += [
            document.problem(*problem) for problem in sorted(located, key=lambda p: document.line(p[0]))
        ]
    if found:
        raise ConfigError(*found)
    return config


def _message(line: ErrorDetails) -> str:
    text = line["msg"].removeprefix("Value error, ")
    if line["type"] == "missing":
        return "this key is required"
    if line["type"] in _OWN_KINDS:
        return text
    value = repr(line["input"])
    return f"{text[0].lower()}{text[1:]}, found {value if len(value) <= 80 else f'{value[:77]}...'}"
