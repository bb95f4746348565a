"""A small model over a paged KV cache, and videos that it goes through chunk by chunk, as graph tests need them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.facts.kv_cache import FullAttentionSpec
from omni_attn.kv_cache import (
    AttentionGroup,
    BlockPool,
    BlockTable,
    GraphRunner,
    PagedStep,
    StepInputs,
    allocate_kv_cache,
    init_attention_groups,
    make_step,
    paged_layers,
)
from omni_attn.paged_layer import PagedAttention
from omni_attn.selector import use_attention_config

PAGE, CHUNK, HEADS, GROUPS, PAGES_OF_A_STREAM = 8, 16, 4, 2, 6
"""A stream holds at most 48 tokens: sink and window of 16 each, and the chunk."""


class Blocks(nn.Module):
    """Tokens [T, C] through layers of projections and paged attention."""

    def __init__(
        self, *, layers: int, head_size: int, dtype: torch.dtype, config: Any, platform: Any
    ) -> None:
        super().__init__()
        spec = FullAttentionSpec(
            block_size=PAGE, num_kv_heads=GROUPS, head_size=head_size, dtype=str(dtype).removeprefix("torch.")
        )
        needs: dict[str, Any] = {"num_kv_heads": GROUPS, "kv_cache": spec, "causal": True}
        self.sizes = [HEADS * head_size, GROUPS * head_size, GROUPS * head_size]
        with use_attention_config(config, platform=platform):
            self.attention = nn.ModuleList(
                PagedAttention(HEADS, head_size, role="self", prefix=f"blocks.{i}", **needs)
                for i in range(layers)
            )
        self.project = nn.ModuleList(nn.Linear(self.sizes[0], sum(self.sizes)) for _ in range(layers))

    def forward(self, x: torch.Tensor, shift: torch.Tensor, step: PagedStep) -> torch.Tensor:
        for layer, project in zip(self.attention, self.project, strict=True):
            parts = project(x + shift).split(self.sizes, dim=-1)
            query, key, value = (part.unflatten(-1, (-1, layer.request.head_size)) for part in parts)
            x = x + layer(query, key, value, step).flatten(1)
        return x


@dataclass
class World:
    """A model with pages, a block table and the streams in it.

    Attributes:
        caches: what the layers write; a second world over `like` has its own.
    """

    model: Blocks
    groups: tuple[AttentionGroup, ...]
    caches: Mapping[str, torch.Tensor]
    table: BlockTable
    inputs: StepInputs
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def make(
        cls,
        config: Any = "TORCH_SDPA",
        platform: Any = None,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        layers: int = 2,
        head_size: int = 16,
        max_reqs: int = 4,
    ) -> World:
        torch.manual_seed(0)
        model = Blocks(layers=layers, head_size=head_size, dtype=dtype, config=config, platform=platform)
        return cls.around(model.to(device, dtype), device, dtype, max_reqs)

    @classmethod
    def around(
        cls, model: Blocks, device: str | torch.device, dtype: torch.dtype, max_reqs: int = 4
    ) -> World:
        """Pages and tables of its own for a model."""
        device, attention = torch.device(device), paged_layers(model)
        groups = init_attention_groups(attention, {"self": attention[0].kv_cache_spec}, device)
        num_pages = 1 + max_reqs * PAGES_OF_A_STREAM
        layouts = groups[0].cache_facts.layouts
        caches = {
            name: allocate_kv_cache(group.kernel_spec, num_pages * group.block_ratio, layouts[0], device)
            for group in groups
            for name in group.layer_names
        }
        for cache in caches.values():  # pages that nobody wrote must not be read
            cache.fill_(float("nan"))
        table = BlockTable(BlockPool(num_pages), PAGE, max_reqs, PAGES_OF_A_STREAM, device)
        return cls(model, groups, caches, table, StepInputs(table), device, dtype)

    @functools.cached_property
    def twin(self) -> World:
        """The same model over pages of its own."""
        with torch.inference_mode(False):
            return World.around(self.model, self.device, self.dtype, self.table.max_reqs)

    def runner(self, **options: Any) -> GraphRunner:
        """A runner of the model."""

        def step(inputs: Mapping[str, torch.Tensor], paged: PagedStep) -> torch.Tensor:
            out: torch.Tensor = self.model(inputs["x"], inputs["shift"], paged)
            return out

        options = {"device": self.device, "input_axes": {"shift": None}} | options
        return GraphRunner.for_groups(step, self.groups, self.caches, **options)

    def open(self, lengths: Mapping[str, int]) -> None:
        """Opens a chunk of each stream, new ones included, after forgetting what lies between sink and window."""
        for stream, tokens in lengths.items():
            if stream not in self.table.streams:
                self.table.add(stream)
            self.table.evict(stream, window=16, sink=16, exact=False)
            self.table.append(stream, tokens)

    def commit(self, streams: Sequence[str]) -> None:
        """Makes their chunks history."""
        for stream in streams:
            self.table.commit(stream)

    def common(self, streams: Sequence[str], *, causal: bool = False) -> CommonAttentionMetadata:
        """The step of these streams' open chunks."""
        return self.inputs.common(streams, causal=causal)

    def tensors(self, tokens: int, seed: int) -> dict[str, torch.Tensor]:
        """Inputs of a step."""
        numbers = torch.Generator().manual_seed(seed)
        width = self.model.sizes[0]
        drawn = {
            "x": torch.randn(tokens, width, generator=numbers),
            "shift": torch.randn(width, generator=numbers),
        }
        return {name: value.to(self.device, self.dtype) for name, value in drawn.items()}

    @torch.no_grad()
    def eager(self, inputs: Mapping[str, torch.Tensor], common: CommonAttentionMetadata) -> torch.Tensor:
        """A step without a runner."""
        out: torch.Tensor = self.model(
            inputs["x"], inputs["shift"], make_step(self.groups, {"self": common}, self.caches)
        )
        return out
