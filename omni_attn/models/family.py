"""What a family of models gives to the commands: the module that `get_family` imports has these functions.

Commands know nothing else of a model: they find its attention layers by their roles, in the modules that
`build_meta_model` and `prepare` give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from omni_attn.config import GenerationConfig, PipelineConfig
from omni_attn.facts import CacheFacts
from omni_attn.models.runtime import Progress, RunResult, no_progress

Request = TypeVar("Request", bound=GenerationConfig)


class CachedChoice(NamedTuple):
    """What was chosen for layers over a KV cache.

    Attributes:
        label: backend and variant.
        block_size: tokens of a page, as the layers state it.
        takes: what the kernel takes of a cache.
    """

    label: str
    block_size: int
    takes: CacheFacts


class PreparedRun(Protocol):
    """A pipeline with its weights on the device, and all that it denoises from."""

    @property
    def model(self) -> nn.ModuleDict:
        """Every transformer by its name: the modules that run."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was filled in because the configuration left it out, a line each."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def dtype(self) -> str:
        """What it runs in."""

    def denoise(self, *, progress: Progress = no_progress) -> object:
        """Runs the loop from seeded noise; the result is the family's own.

        Every attention call gets a record that states its step, `num_steps` and sigma.
        """


class ModelFamily(Protocol):
    """The functions of a family's module."""

    def build_meta_model(self, config: PipelineConfig) -> nn.ModuleDict:
        """All transformers on the meta device, by the names that PreparedRun.model gives them.

        The caller decides what the attention layers do while they are constructed, with `use_attention_config` or
        `collect_attention_requests`.

        Raises:
            ConfigError: the model is unknown, or cannot be built as asked.
        """

    def attention_lengths(self, config: PipelineConfig) -> dict[str, tuple[int, int]]:
        """Role -> (query tokens, key tokens) of what is asked for; a role whose lengths are unknown is absent.

        Raises:
            ConfigError: the model is unknown, or what is asked for does not fit it.
        """

    def number_of_steps(self, config: PipelineConfig) -> int:
        """How often the loop of the run goes round, which is the `num_steps` of its records.

        Raises:
            ConfigError: the model is unknown, or cannot be sampled as asked.
        """

    def check_run(self, config: PipelineConfig, choices: Sequence[CachedChoice], dtype: str) -> None:
        """Nothing if the model can use all that was asked for, on the backends that were chosen for it.

        `prepare` refuses the same, of its own choices; here the device may be an assumed one.

        Args:
            choices: of every role that keeps a cache; empty = none does, or some role was refused.
            dtype: of the run.

        Raises:
            ConfigError: it cannot.
        """

    def prepare(self, config: PipelineConfig, *, progress: Progress = no_progress) -> PreparedRun:
        """Everything before the first denoising step.

        Everything that can be refused is refused before weights are allocated.

        Raises:
            ConfigError: model, sizes, inputs, device, memory or output folder do not fit.
            BackendRejectedError, NoBackendError, BackendImportError: a role's attention cannot run here.
            MissingExtraError: a library of the `pipelines` extra is not installed.
        """

    def run(self, config: PipelineConfig, *, progress: Progress = no_progress) -> RunResult:
        """Denoises and writes the results into the output folder.

        Raises:
            ConfigError, BackendRejectedError, NoBackendError, BackendImportError, MissingExtraError: see prepare.
        """


def generation_as(config: PipelineConfig, kind: type[Request]) -> Request:
    """What a pipeline is asked to generate, for the family that reads requests of this kind."""
    found = config.generation
    assert isinstance(found, kind), f"pipeline: {config.pipeline} came to the family of {kind.__name__}"
    return found
