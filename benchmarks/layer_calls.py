"""One call of an attention layer with its record, and what it should compute in float64 over the blocks it selects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks.sampled import SampledRows
from omni_attn import Attention, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.backends.abstract import AttentionImpl
from omni_attn.ops.block_sparse.executor import Executor
from omni_attn.ops.block_sparse.selection import BlockSelection

#: The blocks that it leaves out stand in the softmax all the same, as one key each.
SUMMARY_BACKEND = "BLOCK_SUMMARY_ATTN"


Made = TypeVar("Made")


@dataclass(frozen=True)
class LayerCall:
    """A layer on tensors [B, S, H, D].

    Attributes:
        record: prepared for this layer, with a gate beside it where there is one.
    """

    layer: Attention
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    record: AttentionMetadata

    def __call__(self) -> torch.Tensor:
        return self.layer(self.query, self.key, self.value, self.record)

    @property
    def label(self) -> str:
        """Backend and variant."""
        assert self.layer.selection is not None
        return self.layer.selection.label

    @property
    def executor(self) -> Executor | None:
        """What runs the two parts of a sparse call, None where the layer has no such thing."""
        return getattr(self.layer.impl, "executor", None)

    @property
    def is_sparse(self) -> bool:
        """Whether its backend selects blocks."""
        assert self.layer.selection is not None
        return self.layer.selection.backend_cls.facts.selects_blocks

    def selection(self) -> BlockSelection:
        """The blocks that the call attends to.

        Raises:
            ValueError: the backend's own rules make this call dense.
        """
        impl, made = self.layer.impl, self.record.prepared(self.layer.group_id)
        assert impl is not None and made is not None
        inputs = {name: x for name, x in self.record.layer_inputs.items() if self.layer.reads(name)}
        found = impl.select_blocks(self.query, self.key, self.value, made.product, **inputs)
        if found is None:
            raise ValueError(f"{self.layer.route}: {self.layer.route_reason}")
        return found

    def expected(
        self, sampled: SampledRows, selection: BlockSelection | None, chosen: torch.Tensor | None
    ) -> torch.Tensor:
        """The sampled rows over the selected blocks, `chosen` as a bool map [B, H, N, N]; None = over all keys."""
        if selection is None or chosen is None:
            return sampled.dense[0]
        assert self.layer.selection is not None
        summaries = self.layer.selection.backend_cls.get_name() == SUMMARY_BACKEND
        rows, _ = sampled.over(chosen, selection.query_blocks, summaries=summaries)
        if selection.coarse is None:
            return rows
        gate = selection.coarse.gate
        coarse = sampled.coarse(selection.query_blocks)
        return rows + (coarse if gate is None else coarse * gate[:, sampled.rows])


def layer_call(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    spec: Mapping[str, Any] | None,
    record: AttentionMetadata,
    *,
    gate: torch.Tensor | None = None,
    impl_overrides: Mapping[str, type[AttentionImpl]] | None = None,
) -> LayerCall:
    """A self-attention layer that publishes a video grid, prepared for these tensors; spec None = platform default.

    Raises:
        BackendRejectedError: the machine cannot run the spec; BackendImportError: its package is missing.
    """
    query, key, value = tensors
    lengths = {"self": (query.shape[1], key.shape[1])}
    config: dict[str, Any] = {} if spec is None else {"default": dict(spec)}
    with use_attention_config(config, device=query.device, dtype=query.dtype, lengths=lengths):
        layer = Attention(
            query.shape[2],
            query.shape[3],
            role="self",
            mask_usage="never",
            video_grid=True,
            impl_overrides=impl_overrides,
        )
    prepare_attention(layer, {"self": record}, lengths)
    if gate is not None and layer.reads("gate_compress"):
        record = record.with_layer_inputs(gate_compress=gate)
    return LayerCall(layer, query, key, value, record)


def try_each(makers: Mapping[str, Callable[[], Made]]) -> list[Made | tuple[str, Exception]]:
    """What each maker makes, or its name and why it cannot be made."""
    found: list[Made | tuple[str, Exception]] = []
    for name, make in makers.items():
        try:
            found.append(make())
        except Exception as error:  # a package may raise anything while it is loaded
            found.append((name, error))
    return found
