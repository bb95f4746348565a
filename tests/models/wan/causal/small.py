"""Small causal Wan models beside the plain ones of the same weights, and the plain one under a block-causal mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_attn.models.wan.causal import CachePlan, CausalCache, CausalWanModel
from omni_attn.models.wan.model import WanModel
from omni_attn.selector import use_attention_config
from tests.models.wan.tiny_models import config_of, seed_weights

HEIGHT, WIDTH, CHANNELS, TEXT = 4, 6, 4, 24
FRAME = 6  # tokens of a latent frame


def plan_of(**changes: Any) -> CachePlan:
    return CachePlan(**({"frame_tokens": FRAME, "chunk_frames": 2, "block_size": 3} | changes))


def causal_model(
    plan: CachePlan, kind: str = "t2v", seed: int = 0, *, is_dmd: bool = False
) -> CausalWanModel:
    with use_attention_config(None, device="cpu", dtype=plan.dtype):
        model = CausalWanModel(config_of(kind), plan, is_dmd=is_dmd).eval()
    seed_weights(model, seed)
    return model


def plain_model(kind: str = "t2v", seed: int = 0) -> WanModel:
    model = WanModel(config_of(kind)).eval()
    seed_weights(model, seed)
    return model


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def masked_attention(mask: Tensor) -> Callable[..., Tensor]:
    """Softmax attention under a mask [S, S], in place of a layer's forward."""

    def forward(query: Tensor, key: Tensor, value: Tensor, _record: object = None) -> Tensor:
        heads = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)

    return forward


def block_causal(plan: CachePlan, frames: int) -> Tensor:
    """Which frames a frame sees, by what is said of chunks, windows and sinks: bool [S, S] in tokens."""
    seen = torch.zeros(frames, frames, dtype=torch.bool)
    for frame in range(frames):
        begin = frame // plan.chunk_frames * plan.chunk_frames
        end = min(begin + plan.chunk_frames, frames)
        first = 0 if plan.window_frames is None else max(0, end - plan.window_frames)
        seen[frame, first:end] = True
        seen[frame, : min(plan.sink_frames, end)] = True
    tokens = plan.frame_tokens
    return seen.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)


def masked_model(plan: CachePlan, frames: int, kind: str = "t2v", seed: int = 0) -> WanModel:
    """The plain model whose self-attention sees what chunks see."""
    model, attention = plain_model(kind, seed), masked_attention(block_causal(plan, frames))
    for block in model.blocks:
        block.attn1.attention.forward = attention
    return model


def begun(model: CausalWanModel, text: Tensor, frames: int | None, **options: Any) -> CausalCache:
    """A cache that holds this text [B, L, E]."""
    cache = CausalCache(model, streams=text.shape[0], num_frames=frames, text_tokens=text.shape[1], **options)
    cache.begin(model, text)
    return cache


def forward(model: CausalWanModel, cache: CausalCache, latents: Tensor, time: Any) -> Tensor:
    """One step of the open chunk."""
    grid = model.config.token_grid(*latents.shape[2:])
    times = torch.as_tensor(time, dtype=torch.float32).expand(latents.shape[0])
    output: Tensor = model(latents, times, cache.step(), model.rope(grid, cache.first_frame))
    return output
