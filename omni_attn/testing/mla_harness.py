"""What tests of a backend over a paged cache of latents share: scenes, a layer, its cache and its step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omni_attn.facts.kv_cache import MLAAttentionSpec
from omni_attn.kv_cache.build import make_step
from omni_attn.kv_cache.groups import init_attention_groups
from omni_attn.kv_cache.step import PagedStep
from omni_attn.mla_layer import MLAAttention
from omni_attn.selector import use_attention_config
from omni_attn.testing.harness import BackendHarness
from omni_attn.testing.mla_scene import MLAScene, make_mla_scene

#: (query tokens, all tokens): decodes, then a later part of a prompt, a first one, and one within a page.
MIXED = ((1, 19), (1, 1), (7, 30), (9, 9), (2, 3))
DECODES = ((1, 19), (1, 1), (1, 33))


class MLAHarness(BackendHarness):
    """One factory method to write, `get_backend`; see BackendHarness for the rest.

    Attributes:
        block_sizes: tokens of a page that are tried.
        latent, rope, nope, value: channels.
    """

    block_sizes: tuple[int, ...] = (8, 16, 3)
    latent: int = 32
    rope: int = 16
    nope: int = 24
    value: int = 20

    def scene(self, lengths: Sequence[tuple[int, int]] = MIXED, **how: Any) -> MLAScene:
        """A step of requests of (query tokens, all tokens); `how` as make_mla_scene has it, or of the cache's spec."""
        spec = MLAAttentionSpec(
            block_size=how.pop("block_size", self.block_sizes[0]),
            num_kv_heads=1,
            head_size=self.latent + self.rope,
            rope_size=self.rope,
            dtype=how.pop("cache_dtype", str(self.dtype).removeprefix("torch.")),
        )
        return make_mla_scene(
            lengths,
            spec=spec,
            num_heads=self.heads,
            nope=self.nope,
            value=self.value,
            dtype=self.dtype,
            device=self.device,
            **how,
        )

    def layer(self, scene: MLAScene, **needs: Any) -> MLAAttention:
        """A layer on the backend under test, with the scene's up-projection."""
        spec = scene.pages.spec
        assert isinstance(spec, MLAAttentionSpec)
        chosen: Any = {"default": {"backend": self.get_backend().get_name(), "variant": self.variant}}
        with use_attention_config(chosen, platform=self.machine):
            return MLAAttention(
                self.heads,
                role="self",
                kv_cache=spec,
                qk_nope_head_size=self.nope,
                v_head_size=self.value,
                kv_b_proj=scene.kv_b_proj,
                prefix="layer",
                dtype=self.dtype,
                **needs,
            )

    def filled(self, scene: MLAScene, layer: MLAAttention) -> torch.Tensor:
        """A cache with the scene's earlier tokens, and NaN everywhere else."""
        cache = scene.pages.empty_cache()
        if scene.pages.history_slots.numel():
            layer.impl.update_kv_cache(*scene.history, cache, scene.pages.history_slots)
        return cache

    def step(self, scene: MLAScene, layer: MLAAttention, cache: torch.Tensor) -> PagedStep:
        """The layer's step."""
        groups = init_attention_groups([layer], {"self": scene.pages.spec}, scene.query.device)
        return make_step(groups, {"self": scene.common}, {"layer": cache})

    def attend(self, scene: MLAScene, cache: torch.Tensor | None = None, **needs: Any) -> torch.Tensor:
        """One call of the layer: the output, which started as NaN."""
        layer = self.layer(scene, **needs)
        step = self.step(scene, layer, self.filled(scene, layer) if cache is None else cache)
        output = scene.query.new_full((len(scene.query), self.heads, self.value), float("nan"))
        given = layer(scene.query, scene.latent, scene.rope_key, step, output)
        assert given is output, "forward gives the output back that it was handed"
        return output

    def attend_compiled(self, scene: MLAScene) -> torch.Tensor:
        """The same through torch.compile(fullgraph=True)."""
        layer = self.layer(scene, compile=True)
        call = self.step(scene, layer, self.filled(scene, layer))["layer"]
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            output: torch.Tensor = compiled(scene.query, scene.latent, scene.rope_key, call)
        return output

    @property
    def scale(self) -> float:
        """Of the layer, unless stated otherwise."""
        return float((self.nope + self.rope) ** -0.5)
