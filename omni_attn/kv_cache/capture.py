"""Steps of a model over a paged KV cache, captured once and replayed for every batch that fits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from omni_attn.backends.buffers import BufferPool
from omni_attn.backends.paged import PAD_SLOT
from omni_attn.kv_cache.batches import BatchDescriptor, Commons
from omni_attn.kv_cache.build import contents_key, make_step
from omni_attn.kv_cache.cudagraph import CUDAGraphMode
from omni_attn.kv_cache.graphs import DeviceGraph, Graph, HostGraph, map_tensors
from omni_attn.kv_cache.groups import AttentionGroup
from omni_attn.kv_cache.replay_checks import baked_in, check_outputs, check_same
from omni_attn.kv_cache.staged_step import Axis, Inputs, StagedStep, without_padding
from omni_attn.kv_cache.step import PagedStep

_log = logging.getLogger("omni_attn")


class Build(Protocol):
    """From the common metadata of a step to what the model hands to its layers."""

    def __call__(self, commons: Commons, *, capture: bool) -> Any:
        """With `capture` through build_for_cudagraph_capture, and anew each time."""


@dataclass(frozen=True, eq=False)
class _Captured:
    descriptor: BatchDescriptor
    form: tuple[object, ...]
    graph: Graph
    metadata: Any  # keeps what the graph reads alive
    held: dict[str, object]


class GraphRunner:
    """Runs steps of a model: as a CUDA graph where one was captured that takes the batch, eagerly otherwise.

    A step's inputs and metadata are copied to where the graph reads them, padded to its size. Metadata is built anew
    only when its objects change, so the denoising steps of a chunk cost the copies of their inputs and one launch.
    On a device without CUDA the step is called again over the inputs and the metadata objects of the capture.

    Args:
        step: (inputs, what `build` gives) -> a tensor, or a nest of them; reads no other tensor that changes its place,
            and no number that changes.
        build: see Build; see also for_groups.
        device: of the model.
        mode: what may be captured. Whole steps are; of a mode with pieces resolve_cudagraph_mode makes one without, by
            `piecewise_available=False`.
        pools: BufferPools of the builders.
        input_axes: name -> what an input's first dimension counts, None = nothing that a batch changes; inputs that are
            not named count "tokens".
        output_axis: the same, of all outputs.
        block_sizes: KV-cache group -> tokens of a page, for groups whose metadata is to state no more keys than a row
            of their block table holds; the bound of a graph is one for all groups.
        debug: each replay is held against an eager step that ran before it. Waits for the device; steps have to write
            the same when they run twice, as denoising steps do.

    Attributes:
        replays: steps that ran as a graph.
        eager: why -> steps that did not.

    Raises:
        ValueError: the mode has pieces.
    """

    def __init__(
        self,
        step: Callable[[Inputs, Any], Any],
        build: Build,
        *,
        device: torch.device | str,
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
        pools: Iterable[BufferPool] = (),
        input_axes: Mapping[str, Axis] | None = None,
        output_axis: Axis = "tokens",
        block_sizes: Mapping[Any, int] | None = None,
        debug: bool = False,
    ) -> None:
        if mode.requires_piecewise_compilation():
            raise ValueError(
                f"CUDAGraphMode.{mode.name} captures pieces of a model, and a GraphRunner captures whole steps -- "
                "resolve the mode with piecewise_available=False"
            )
        self.device, self.mode, self.debug = torch.device(device), mode, debug
        self.replays, self.eager = 0, Counter[str]()
        self._step, self._build = step, build
        self._staged = StagedStep(self.device, input_axes or {}, block_sizes or {})
        self._shared = tuple(pools)
        self._output_axis = output_axis
        self._captured: list[_Captured] = []
        self._memory: Any = None
        self._current: tuple[_Captured, tuple[object, ...], list[int], Commons] | None = None

    @classmethod
    def for_groups(
        cls,
        step: Callable[[Inputs, PagedStep], Any],
        groups: Iterable[AttentionGroup],
        kv_caches: Mapping[str, torch.Tensor],
        **options: Any,
    ) -> Self:
        """A runner of a model whose steps are made by `make_step`, for the first micro-batch.

        Args:
            step: (inputs, paged step) -> outputs.
            groups: of init_attention_groups.
            kv_caches: layer -> its pages; they stay where they are.
            options: see GraphRunner.
        """
        groups = tuple(groups)

        def build(commons: Commons, *, capture: bool) -> PagedStep:
            return make_step(groups, commons, kv_caches, capture=capture)

        pools = [group.builder().buffers for group in groups]
        sizes = {group.cache_group: group.kv_cache_spec.block_size for group in groups}
        return cls(step, build, pools=pools, block_sizes=sizes, **options)

    @torch.no_grad()
    def capture(
        self, descriptors: BatchDescriptor | Sequence[BatchDescriptor], inputs: Inputs, commons: Commons
    ) -> None:
        """Captures one graph per size. Nothing is written into the KV cache.

        Args:
            descriptors: all sizes that will be needed: buffers cannot grow later.
            inputs, commons: of a step that fits into each of them; only its form counts.

        Raises:
            ValueError: the mode captures no such batch, the step does not fit, or the size was captured before.
            RuntimeError: the step cannot be captured, or needs larger buffers than those captured before.
        """
        sizes = (
            [descriptors] if isinstance(descriptors, BatchDescriptor) else list(dict.fromkeys(descriptors))
        )
        batch, form = BatchDescriptor.of(commons), self._staged.form(inputs, commons)
        for size in sizes:
            self._check_size(size, batch, form)
        self._current = None
        for size in sizes:  # all buffers grow before the first address is captured
            self._staged.inputs(inputs, batch, size)
            self._build(self._staged.commons(commons, size), capture=True)
        for pool in (self._staged.buffers, *self._shared):
            pool.freeze()
        for size in sorted(sizes, key=lambda size: size.order, reverse=True):
            static, staged = self._staged.inputs(inputs, batch, size), self._staged.commons(commons, size)
            for common in staged.values():
                if common.slot_mapping is not None:
                    common.slot_mapping.fill_(PAD_SLOT)
            metadata = self._build(staged, capture=True)
            graph = self._graph(static, metadata)
            self._captured.append(_Captured(size, form, graph, metadata, baked_in(metadata, self.device)))
        self._captured.sort(key=lambda captured: captured.descriptor.order)

    @torch.no_grad()
    def __call__(self, inputs: Inputs, commons: Commons) -> Any:
        """Outputs of one step, without padding; those of a replay hold until the next call.

        Args:
            inputs: by the names of the capture.
            commons: without padding.

        Raises:
            MetadataError: an input has not as many rows as the step.
            RuntimeError: a replay would read something else than this step's metadata, or, in debug, gave something
                else than an eager step.
        """
        batch = BatchDescriptor.of(commons)
        captured = self._taking(batch, self._staged.form(inputs, commons)) if self._captured else None
        if captured is None:
            self._count_eager(batch)
            return self._eagerly(inputs, commons)
        expected = map_tensors(torch.clone, self._eagerly(inputs, commons)) if self.debug else None
        size = captured.descriptor
        self._staged.inputs(inputs, batch, size)
        self._stage_metadata(captured, commons)
        captured.graph.replay()
        self.replays += 1
        outputs = without_padding(captured.graph.outputs, batch, size, self._output_axis)
        if self.debug:
            check_outputs(outputs, expected, batch)
        return outputs

    def _eagerly(self, inputs: Inputs, commons: Commons) -> Any:
        self._current = None  # what groups and builders keep is of another step now
        return self._step(inputs, self._build(commons, capture=False))

    def _graph(self, static: Inputs, metadata: Any) -> Graph:
        def call() -> Any:
            return self._step(static, metadata)

        if self.device.type != "cuda":
            return HostGraph(call)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        return DeviceGraph(call, self.device, self._memory)

    def _check_size(self, size: BatchDescriptor, batch: BatchDescriptor, form: tuple[object, ...]) -> None:
        kind = self._mode_of(size)
        if kind is not CUDAGraphMode.FULL:
            raise ValueError(
                f"capturing {size}: CUDAGraphMode.{self.mode.name} runs such batches as {kind.name} -- leave it out"
            )
        if not size.takes(batch):
            raise ValueError(f"capturing {size}: the step given with it does not fit, it is {batch}")
        if any(known.descriptor == size and known.form == form for known in self._captured):
            raise ValueError(f"capturing {size}: it was captured before")

    def _mode_of(self, batch: BatchDescriptor) -> CUDAGraphMode:
        return self.mode.mixed_mode() if batch.query_len is None else self.mode.decode_mode()

    def _taking(self, batch: BatchDescriptor, form: tuple[object, ...]) -> _Captured | None:
        fitting = (known for known in self._captured if known.descriptor.takes(batch) and known.form == form)
        return next(fitting, None)

    def _count_eager(self, batch: BatchDescriptor) -> None:
        kind = "mixed" if batch.query_len is None else "uniform"
        if self._mode_of(batch) is not CUDAGraphMode.FULL:
            reason = f"cudagraph_mode {self.mode.name} captures no {kind} batches"
        elif not self._captured:
            reason = "nothing was captured"
        else:
            reason = f"no captured graph takes the {kind} batch"
            if not self.eager[reason]:
                sizes = ", ".join(str(known.descriptor) for known in self._captured)
                _log.warning("%s %s: it runs eagerly; captured were %s", reason, batch, sizes)
        self.eager[reason] += 1

    def _stage_metadata(self, captured: _Captured, commons: Commons) -> None:
        """Brings the step's metadata to where the graph reads it, unless it lies there from the call before.

        Another runner over the same groups prepares its steps in the same buffers, so those are asked too.
        """
        state = tuple(map(contents_key, commons.values()))
        changes = [pool.changes for pool in self._shared]
        if self._current is not None and self._current[:3] == (captured, state, changes):
            return
        self._current = None
        metadata = self._build(self._staged.commons(commons, captured.descriptor), capture=True)
        check_same(metadata, captured.held, self.device, captured.descriptor)
        self._current = captured, state, [pool.changes for pool in self._shared], commons
