"""One forward of the open chunk: eagerly, or as a CUDA graph that was captured at the first chunk."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from omni_attn.kv_cache import (
    BatchDescriptor,
    CUDAGraphMode,
    GraphRunner,
    ModeDecision,
    PagedStep,
    cudagraph_supports,
    resolve_cudagraph_mode,
)
from omni_attn.models.wan.causal.cache import CausalCache
from omni_attn.models.wan.causal.model import CausalWanModel
from omni_attn.models.wan.rope import RopeTable

_INPUTS = ("latents", "timestep", "first", "second")


class ChunkStepper:
    """Runs a model on the chunk that is open in its cache.

    Args:
        model, cache: one made for the other.
        cudagraph_mode: `cudagraph_mode` of the pipeline. Chunks of a whole size are uniform batches; a shorter last one
            runs eagerly.
        debug: each replay is held against an eager step, see GraphRunner.

    Attributes:
        model: see above.
        decision: the mode that was asked for, the one that the backends support, and why.

    Raises:
        ConfigError: no backend of the model has graphs of any kind, and FULL was asked for.
    """

    def __init__(
        self,
        model: CausalWanModel,
        cache: CausalCache,
        *,
        cudagraph_mode: CUDAGraphMode | str | None = None,
        debug: bool = False,
    ) -> None:
        self.model, self._cache = model, cache
        self.decision: ModeDecision = resolve_cudagraph_mode(
            cudagraph_mode,
            cudagraph_supports(cache.groups),
            attention_is_splitting_op=False,
            compiled=False,
            uniform_query_len=model.plan.chunk_tokens,
            piecewise_available=False,
        )
        self._runner: GraphRunner | None = None
        if self.decision.final.has_full_cudagraphs():
            self._runner = GraphRunner.for_groups(
                self._forward,
                cache.groups,
                cache.kv_caches,
                device=model.device,
                mode=self.decision.final,
                input_axes=dict.fromkeys(_INPUTS),  # no input has a row per token or request
                output_axis=None,
                debug=debug,
            )
        self._is_captured = False

    @property
    def replays(self) -> int:
        """Forwards that ran as a graph."""
        return 0 if self._runner is None else self._runner.replays

    def velocity(self, latents: Tensor, timestep: Tensor, rope: RopeTable) -> Tensor:
        """What the model predicts for the open chunk; its keys and values are in their slots then.

        Args:
            latents: [B, C, f, H, W] in the model's dtype.
            timestep: [B] on the device.
            rope: of the chunk.

        Returns:
            [B, C, f, H, W] in the model's dtype; valid until the next call.
        """
        if self._runner is None or latents.shape[2] != self.model.plan.chunk_frames:
            return self.model(latents, timestep, self._cache.step(), rope)  # type: ignore[no-any-return]
        inputs = dict(zip(_INPUTS, (latents, timestep, *rope), strict=True))
        commons = self._cache.commons()
        if not self._is_captured:
            size = BatchDescriptor.of(commons, max_seq_len=self._cache.max_seq_len)
            self._runner.capture(size, inputs, commons)
            self._is_captured = True
        result: Tensor = self._runner(inputs, commons)
        return result

    def _forward(self, inputs: Mapping[str, Tensor], step: PagedStep) -> Tensor:
        latents, timestep, first, second = (inputs[name] for name in _INPUTS)
        return self.model(latents, timestep, step, RopeTable(first, second))  # type: ignore[no-any-return]
