"""A step of latent attention, made up, and what must come out of it: the formula in its open form, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from omni_attn.backends.mla import MLASizes
from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.facts.kv_cache import MLAAttentionSpec
from omni_attn.testing.paged_scene import PagedScene, make_scene


@dataclass(frozen=True, eq=False, kw_only=True)
class MLAScene:
    """Requests of one step, their latents in pages, and the up-projection of the layer.

    Attributes:
        pages: whose keys are the rows [latent | rope], with one head.
        query: [T, H, K + E].
    """

    pages: PagedScene
    sizes: MLASizes
    query: torch.Tensor
    kv_b_proj: nn.Linear

    @property
    def common(self) -> CommonAttentionMetadata:
        """What a runner states."""
        return self.pages.common

    @property
    def latent(self) -> torch.Tensor:
        """Of this step's tokens: [T, C]."""
        return self.pages.key[:, 0, : self.sizes.latent]

    @property
    def rope_key(self) -> torch.Tensor:
        """Of this step's tokens: [T, E]."""
        return self.pages.key[:, 0, self.sizes.latent :]

    @property
    def history(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and rope keys of the earlier tokens, as pages.history_slots has them."""
        rows = self.pages.history[0][:, 0]
        return rows[:, : self.sizes.latent], rows[:, self.sizes.latent :]

    def with_common(self, **changes: Any) -> MLAScene:
        """The same requests, stated otherwise."""
        return replace(self, pages=replace(self.pages, common=self.common.replace(**changes)))

    def only(self, row: int) -> MLAScene:
        """One request alone, in the pages that it has."""
        first, last = self.common.query_start_loc_cpu[row : row + 2].tolist()
        alone = self.pages.only(row)
        totals = self.common.seq_lens_cpu
        assert totals is not None
        stated = replace(alone.common, seq_lens_cpu=totals[row : row + 1])
        return replace(self, pages=replace(alone, common=stated), query=self.query[first:last])

    def expected(self, *, scale: float, decode_threshold: int = 1) -> torch.Tensor:
        """softmax(scale q [W_K c | r]) W_V c of each request, float64 [T, H, V]; zeros for padding.

        Earlier tokens count as the cache keeps them; a prefill's own tokens as they are.
        """
        _, nope, _, value = self.sizes
        weight = self.kv_b_proj.weight.double().view(-1, nope + value, self.sizes.latent)
        bounds = pairwise(self.common.query_start_loc_cpu.tolist())
        outputs = []
        for (first, last), rows in zip(bounds, self.pages.keys, strict=True):
            count, kept = last - first, self.pages.kept(rows).double()[:, 0]
            if self.common.causal and count > decode_threshold:
                kept[len(kept) - count :] = rows.double()[len(rows) - count :, 0]
            opened = torch.einsum("sc,hxc->shx", kept[:, : self.sizes.latent], weight)
            rope = kept[:, None, self.sizes.latent :].expand(-1, weight.shape[0], -1)
            key = torch.cat((opened[..., :nope], rope), dim=2)
            scores = torch.einsum("thd,shd->hts", self.query[first:last].double(), key) * scale
            if self.common.causal:
                place = torch.arange(len(rows), device=scores.device)
                scores = scores.masked_fill(place > place[len(rows) - count :, None], float("-inf"))
            outputs.append(torch.einsum("hts,shv->thv", scores.softmax(2), opened[..., nope:]))
        padding = len(self.query) - sum(map(len, outputs))
        return torch.cat([*outputs, outputs[0].new_zeros(padding, *outputs[0].shape[1:])])


def make_mla_scene(
    lengths: Sequence[tuple[int, int]],
    *,
    spec: MLAAttentionSpec,
    num_heads: int,
    nope: int,
    value: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    causal: bool = True,
    seed: int = 0,
    **pages: Any,
) -> MLAScene:
    """Requests of (query tokens, all tokens) each; `pages` as make_scene has it."""
    drawn = make_scene(
        lengths, spec=spec, num_heads=1, dtype=dtype, device=device, causal=causal, seed=seed, **pages
    )
    numbers = torch.Generator().manual_seed(seed + 1)
    sizes = MLASizes(latent=spec.latent_size, nope=nope, rope=spec.rope_size, value=value)
    query = torch.randn(len(drawn.query), num_heads, nope + sizes.rope, generator=numbers)
    weight = torch.randn(num_heads * (nope + value), sizes.latent, generator=numbers) * sizes.latent**-0.5
    rows, columns = weight.shape
    projection = nn.Linear(columns, rows, bias=False, device=device, dtype=dtype).requires_grad_(False)
    projection.weight.copy_(weight)
    return MLAScene(pages=drawn, sizes=sizes, query=query.to(device, dtype), kv_b_proj=projection)
