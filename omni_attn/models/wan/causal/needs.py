"""What a streaming run needs of the model and its backends, checked before there are weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from omni_attn.config import KVCacheConfig, PipelineConfig, WanCausalGenerationConfig
from omni_attn.errors import ConfigError
from omni_attn.kv_cache import (
    ModeDecision,
    paged_layers,
    plan_block_sizes,
    resolve_cudagraph_mode,
    resolve_kv_cache_layout,
    select_common_block_size,
)
from omni_attn.models.family import CachedChoice
from omni_attn.models.wan.causal.plan import CachePlan
from omni_attn.models.wan.causal.source import CausalSource
from omni_attn.models.wan.needs import check_fits
from omni_attn.models.wan.requests import encodes_text, text_problems


def plan_cache(
    generation: WanCausalGenerationConfig, source: CausalSource, kv_cache: KVCacheConfig, dtype: str
) -> CachePlan:
    """Chunks, window and pages of a request.

    Pages divide a latent frame: without a `kv_cache.block_size`, they have 8 tokens at 480 x 832, 16 at 720 x 1280.

    Raises:
        ConfigError: a size does not fit the model, or pages do not divide a frame.
    """
    _, height, width = source.wan.geometry(generation).grid
    frame = height * width
    block_size = plan_block_sizes({}, block_size=kv_cache.block_size, unit=frame).block_size
    return CachePlan(
        frame_tokens=frame,
        chunk_frames=generation.chunk_frames,
        window_frames=generation.window_frames,
        sink_frames=generation.sink_frames,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=None if kv_cache.dtype == "auto" else kv_cache.dtype,
    )


def check_request(generation: WanCausalGenerationConfig, source: CausalSource) -> None:
    """Nothing if the model can use everything that was asked for.

    Raises:
        ConfigError: it cannot; one problem for each thing.
    """
    problems = text_problems(generation, source.wan)
    frames, limit = source.wan.geometry(generation).latent[0], source.config.rope_max_seq_len
    if frames > limit:
        problems.append(
            f"generation.num_frames: {generation.num_frames} are {frames} latent frames, and rope_max_seq_len is "
            f"{limit}. Ask for at most {(limit - 1) * source.wan.vae_temporal + 1}."
        )
    if problems:
        raise ConfigError(*problems)


def cached_choices(model: nn.Module) -> list[CachedChoice]:
    """What the layers of a model selected; it may be on the meta device."""
    return [
        CachedChoice(
            layer.selection.label,
            layer.kv_cache_spec.block_size,
            layer.selection.backend_cls.get_cache_facts(layer.selection.variant),
        )
        for layer in paged_layers(model)
        if layer.selection is not None  # else it only stated its request
    ]


def check_cache(choices: Sequence[CachedChoice], plan: CachePlan, config: PipelineConfig) -> ModeDecision:
    """What became of `cudagraph_mode`, if the selected backends can serve the layout, pages and graphs asked for.

    Raises:
        ConfigError: they cannot.
    """
    layouts, supports = {}, {}
    for label, block_size, takes in choices:
        layouts[label], supports[label] = takes.layouts, takes.cudagraph
        select_common_block_size(block_size, {label: takes.block_sizes})
    resolve_kv_cache_layout(layouts, config.kv_cache.layout)
    return resolve_cudagraph_mode(
        config.cudagraph_mode,
        supports,
        attention_is_splitting_op=False,
        compiled=False,
        uniform_query_len=plan.chunk_tokens,
        piecewise_available=False,
    )


def check_memory(
    model: nn.Module,
    plan: CachePlan,
    source: CausalSource,
    generation: WanCausalGenerationConfig,
    device: torch.device,
    dtype: str,
) -> None:
    """Nothing if weights, cache and what a chunk is computed in fit the device's memory.

    Args:
        model: may be on the meta device.

    Raises:
        ConfigError: they do not.
    """
    geometry = source.wan.geometry(generation)
    streams = 2 if generation.guidance_scale > 1 else 1
    kept = plan.cache_bytes(source.config, streams=streams, num_frames=geometry.latent[0])
    frames = plan.chunk_frames * streams
    chunk = replace(geometry, num_frames=frames * source.wan.vae_temporal, grid=(frames, *geometry.grid[1:]))
    reads_text = encodes_text(generation, source.wan)
    check_fits(model, source.wan, geometry, device, dtype, encodes_text=reads_text, kept=kept, at_once=chunk)


def graphs_note(decision: ModeDecision, device: torch.device) -> tuple[str, ...]:
    """What a device without CUDA makes of graphs."""
    if device.type == "cuda" or not decision.final.has_full_cudagraphs():
        return ()
    return (
        f"cudagraph_mode: {decision.final.name}, and there are no CUDA graphs on {device.type}: whole chunks run "
        "eagerly, padded as a graph would be",
    )
