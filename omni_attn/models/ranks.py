"""A run that several processes share: whether it was asked for, and which of them leaves the results."""

from __future__ import annotations

from pathlib import Path

from omni_attn.config import ParallelConfig, PipelineConfig
from omni_attn.errors import ConfigError
from omni_attn.models.artifacts import create_output_folder
from omni_attn.parallel import current_parallel


def among_ranks(config: PipelineConfig) -> PipelineConfig:
    """The configuration, with the ranks in force where it asks for none: a program may choose those itself.

    Raises:
        ConfigError: it asks for ranks, and others are in force, or none.
    """
    asked, parallel = config.parallel, current_parallel()
    found = ParallelConfig() if parallel is None else parallel.config
    if found == asked or (found.size == 1 and asked.size == 1):
        return config
    if asked.size == 1:
        return config.model_copy(update={"parallel": found})
    in_force = f"{found.describe()} is in force" if parallel else "no ranks are in force"
    raise ConfigError(
        f"parallel: {asked.describe()} was asked for, and {in_force}. Run it inside "
        "use_parallel(connect(config.parallel)), as `omni-attn run` does"
    )


def results_folder(config: PipelineConfig) -> Path | None:
    """The output folder, which exists; None on all ranks but the first, which alone writes.

    Raises:
        ConfigError: see create_output_folder.
    """
    parallel = current_parallel()
    return create_output_folder(config.output) if parallel is None or parallel.rank == 0 else None
