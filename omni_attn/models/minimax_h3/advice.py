"""Notes on a run that is not, or only by what was filled in, what its checkpoint was trained for."""

from __future__ import annotations

from math import prod

from torch import nn

from omni_attn.config import AttentionSpec, MiniMaxH3GenerationConfig
from omni_attn.layer import Attention
from omni_attn.models.minimax_h3.contract import InferenceContract
from omni_attn.models.minimax_h3.source import MiniMaxH3Source

_VSA = "FASTVIDEO_VSA"


def grid_note(source: MiniMaxH3Source, asked: MiniMaxH3GenerationConfig) -> tuple[str, ...]:
    """A note if a distilled checkpoint's schedule was filled in."""
    grid = source.plan.grid
    if grid is None or "num_inference_steps" in asked.model_fields_set:
        return ()
    levels = ", ".join(f"{level:g}" for level in grid[:-1])
    return (
        f"steps: {len(grid) - 1} forwards at base levels {levels}, which {source.name} was distilled for",
    )


def sparsity_note(source: MiniMaxH3Source, model: nn.Module) -> tuple[str, ...]:
    """A note if video sparse attention runs with another budget or tile than a distilled checkpoint was trained with.

    That it does not run at all where there are gates is another note's matter (`unread_gates_note`).
    """
    if source.contract is None or source.contract.vsa_sparsity is None:
        return ()
    layers = (module for module in model.modules() if isinstance(module, Attention) and module.role == "self")
    spec = next((layer.selection.spec for layer in layers if layer.selection is not None), None)
    if spec is None or spec.backend != _VSA or _is_as_trained(spec, source.contract):
        return ()
    tile = source.contract.vsa_tile_size
    tiles = "" if tile is None else f" in tiles of {tile}"
    return (
        f"attention: {source.name} was distilled with fastvideo_vsa.sparsity {source.contract.vsa_sparsity:g}{tiles}, "
        "and role self asks for something else",
    )


def _is_as_trained(spec: AttentionSpec, contract: InferenceContract) -> bool:
    options = spec.fastvideo_vsa
    return (
        options is not None
        and options.sparsity == contract.vsa_sparsity
        and contract.vsa_tile_size in (None, prod(options.tile_size))
    )
