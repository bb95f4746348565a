"""Which layer is looked at: found by role and number, and refused early where there is nothing to see."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from omni_attn.backends.registry import registered_names
from omni_attn.config import AttentionSpec, PipelineConfig
from omni_attn.config.names import nearest
from omni_attn.errors import ConfigError
from omni_attn.kv_cache import paged_layers
from omni_attn.layer import Attention
from omni_attn.models import get_family
from omni_attn.models.runtime import resolve_device, resolve_dtype
from omni_attn.platforms import OmniPlatform, current_omni_platform
from omni_attn.selector import Selection, use_attention_config
from omni_attn.tuning.candidates import candidates_for, facts_of


@dataclass(frozen=True)
class Target:
    """One attention call of a run.

    Attributes:
        step: index of the denoising step.
        layer: number of the layer among those of its role, in each transformer.
        role: its role.
    """

    step: int
    layer: int
    role: str = "self"


def layers_of(model: nn.Module, target: Target) -> dict[str, Attention]:
    """The target's layer in each transformer, by its name in the model; only one of them runs at a step.

    Args:
        model: holds the transformers as children.

    Raises:
        ConfigError: no layer has the role, or there are fewer.
    """
    found: dict[str, Attention] = {}
    roles: set[str] = set()
    fewest: int | None = None
    for component, transformer in model.named_children():
        layers = [(n, layer) for n, layer in transformer.named_modules() if isinstance(layer, Attention)]
        roles |= {layer.role for _, layer in layers}
        of_role = [(name, layer) for name, layer in layers if layer.role == target.role]
        fewest = len(of_role) if fewest is None else min(fewest, len(of_role))
        found |= {f"{component}.{name}": layer for name, layer in of_role[target.layer : target.layer + 1]}
    if target.role in {layer.selection.request.role for layer in paged_layers(model) if layer.selection}:
        raise ConfigError(
            f"--role {target.role!r}: its layers attend over the pages of a KV cache, where every query sees every "
            "key, so there is no map to look at. Choose a model that keeps none."
        )
    if target.role not in roles:
        guess = nearest(target.role, roles)
        hint = f" Did you mean {guess!r}?" if guess else ""
        raise ConfigError(
            f"--role {target.role!r}: no attention layer of this model has that role.{hint} Roles: "
            f"{', '.join(sorted(roles))}."
        )
    if fewest is not None and target.layer >= fewest:
        raise ConfigError(
            f"--layer {target.layer}: this model has {fewest} attention layers of role {target.role!r}, numbered from "
            f"0 to {fewest - 1}. Choose one of these."
        )
    return found


def check_target(config: PipelineConfig, target: Target) -> None:
    """Nothing if the target exists and its backend selects blocks; asked before weights are loaded.

    Raises:
        ConfigError: there is no such layer or step, or its attention is dense.
        BackendRejectedError, NoBackendError, BackendImportError: a role's attention cannot run here.
    """
    family, device = get_family(config.pipeline), resolve_device(config.device)
    steps = family.number_of_steps(config)
    if target.step >= steps:
        raise ConfigError(
            f"--step {target.step}: {config.model} is denoised in {steps} steps here, numbered from 0 to {steps - 1}. "
            "Choose one of these."
        )
    dtype = resolve_dtype(config.dtype, device.type)
    lengths = family.attention_lengths(config)
    with use_attention_config(config.attention, device=device, dtype=dtype, lengths=lengths):
        layers = layers_of(family.build_meta_model(config), target)
    for layer in layers.values():
        if layer.selection is not None:
            check_selects_blocks(layer.selection, current_omni_platform(device))


def check_selects_blocks(selection: Selection, platform: OmniPlatform) -> None:
    """Nothing if the backend of a selection chooses blocks of keys.

    Raises:
        ConfigError: it is dense; the text names those that are not.
    """
    if selection.backend_cls.facts.selects_blocks:
        return
    role, sparse = selection.request.role, sparse_backends(selection, platform)
    advice = (
        f"Choose one that does: {', '.join(sparse)}, as in --set attention.per_role.{role}.backend={sparse[0]}."
        if sparse
        else "No registered backend that does can run this layer here."
    )
    raise ConfigError(
        f'role "{role}": {selection.label} ({selection.source}) selects no blocks: every query attends to every key, '
        f"so there is no map to look at. {advice}"
    )


def sparse_backends(selection: Selection, platform: OmniPlatform) -> tuple[str, ...]:
    """Names of the registered backends that select blocks and could run the layer of a selection."""
    candidates = candidates_for(
        selection.request, platform, (AttentionSpec(backend=name) for name in registered_names())
    )
    able = [found.spec.backend for found in candidates if found.verdict.accepted]
    return tuple(name for name in able if (facts := facts_of(name, platform)) and facts.selects_blocks)
