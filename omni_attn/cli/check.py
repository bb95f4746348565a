"""`omni-attn check`: pipeline files, judged without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omni_attn.cli.options import Overrides, folder_problem
from omni_attn.cli.target import Assume, Cudnn, Packages, target_platform
from omni_attn.errors import ConfigError, OmniAttnError

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_attn.config import AttentionConfig, PipelineConfig
    from omni_attn.explanation import PipelineExplanation
    from omni_attn.platforms import OmniPlatform

    PlatformOf = Callable[[PipelineConfig], OmniPlatform | None]

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Pipeline files.")]
Model = Annotated[
    bool,
    typer.Option(
        "--model",
        help="Also build each model without weights: unknown roles, refused choices and what the model cannot be "
        "asked for are errors.",
    ),
]


def check(
    files: Files,
    overrides: Overrides,
    model: Model = False,
    assume: Assume = None,
    packages: Packages = None,
    cudnn: Cudnn = None,
) -> None:
    """Validate pipeline files without running them; every problem of every file is reported at once."""
    from omni_attn.cli.console import print_line

    if not model and (assume, packages, cudnn) != (None, None, None):
        raise ConfigError("--assume, --packages and --cudnn describe where the model would run. Add --model.")
    problems: list[str] = []
    for file in files:
        found = file_problems(
            file, overrides, lambda config: target_platform(config, assume, packages, cudnn), model
        )
        if not found:
            print_line(f"{file}: good")
        problems += found
    if problems:
        raise ConfigError(*problems)


def file_problems(file: Path, overrides: list[str], platform_of: PlatformOf, model: bool) -> list[str]:
    """Every problem of one file, each with its place. The environment has no part in it: the file is judged."""
    from omni_attn.cli.console import warn
    from omni_attn.config import load_pipeline
    from omni_attn.config.overrides import apply_overrides
    from omni_attn.config.yaml_document import read_document
    from omni_attn.explain import explain_pipeline

    if problem := folder_problem(file):
        return [problem]
    try:
        config = load_pipeline(file, overrides=overrides, environ={})
    except ConfigError as error:
        return list(error.problems)
    document = read_document(file)
    apply_overrides(document, overrides)
    problems = unregistered_backends(config.attention)
    if problems or not model:
        return [document.problem(path, text) for path, text in problems.items()]
    try:
        explanation = explain_pipeline(config, platform_of(config))
    except OmniAttnError as error:
        return [f"{file}: {line}" for line in str(error).splitlines()]
    for note in explanation.notes:
        warn(f"{file}: {note}")
    unmatched = [document.problem(path, text) for path, text in explanation.unmatched.items()]
    refused = [*explanation.refusals, *run_problems(config, explanation)]
    return [*unmatched, *(f"{file}: {refusal}" for refusal in refused)]


def run_problems(config: PipelineConfig, explanation: PipelineExplanation) -> list[str]:
    """What `run` would refuse beside the choices of backends, before there are weights."""
    from omni_attn.explain import check_run

    try:
        check_run(config, explanation)
    except ConfigError as error:
        return list(error.problems)
    return []


def unregistered_backends(config: AttentionConfig) -> dict[str, str]:
    """Key path -> what is wrong, for each backend name in the configuration that nobody registered."""
    from omni_attn.backends.registry import registered_names, unknown_name_text

    chosen = {f"attention.per_role.{role}": spec for role, spec in config.per_role.items()}
    if config.default is not None:
        chosen = {"attention.default": config.default, **chosen}
    named = {f"{path}.backend": spec.backend for path, spec in chosen.items()}
    for path, spec in chosen.items():
        named |= {
            f"{path}.fallback.{index}.backend": other.backend for index, other in enumerate(spec.fallback)
        }
    known = registered_names()
    return {path: unknown_name_text(name) for path, name in named.items() if name not in known}
