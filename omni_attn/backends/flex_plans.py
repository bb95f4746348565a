"""From a record to the tensors of FLEX_ATTN's calls: rules with their map of tiles, and what is added to the scores.

What reads a record's tensors is made where they are; what the host alone knows, at the first call on a device.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch.compiler import is_compiling as _is_compiling
from torch.nn.attention.flex_attention import BlockMask

from omni_attn.backends import flex_blocks
from omni_attn.backends.abstract import AttentionMetadataBuilder
from omni_attn.backends.flex_blocks import Rule
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.stated import DENSE_FIELDS, read_record
from omni_attn.ops.layout import int32_on
from omni_attn.ops.masks import as_additive, behind_last, keep_finite, lift_hidden_rows, position_mask
from omni_attn.ops.segments import Segment


@dataclass(frozen=True, eq=False)
class Plan:
    """Tensors of a call, on its device.

    Attributes:
        block_mask: the rules and the tiles they touch; None = all is seen.
        bias: float [B|1, H|1, Sq|1, Sk], added to the scores.
        row_shift: what was taken off the rows of bias, [B|1, H|1, Sq|1, 1]; a log-sum-exp gets it back.
        unused_keys: True for packed key tokens behind the last boundary, [1, T, 1, 1]; they may hold anything, NaN too.
        kind: equal for plans that one compiled function serves.
    """

    block_mask: BlockMask | None = None
    bias: torch.Tensor | None = None
    row_shift: torch.Tensor | None = None
    unused_keys: torch.Tensor | None = None
    kind: Hashable = "plain"


@dataclass(frozen=True, eq=False)
class HostRules:
    """What the host knows about a call without saying where its tensors are.

    Attributes:
        lengths: (query tokens, key tokens).
        boundaries: cu_seqlens of both sides; None = one sequence.
        causal, window: of the layer.
    """

    lengths: tuple[int, int]
    boundaries: tuple[tuple[int, ...], tuple[int, ...]] | None
    causal: bool
    window: tuple[int, int] | None

    def plan(self, device: torch.device) -> Plan:
        """The plan on a device."""
        if self.boundaries is not None:
            cu_q, cu_k = (int32_on(device, cu) for cu in self.boundaries)
            return _document_plan(cu_q, cu_k, self.lengths, self.causal, self.window)
        rule = flex_blocks.position_rule(self.lengths, causal=self.causal, window=self.window, device=device)
        return _plan((rule,), self.lengths, (self.causal, self.window))


_PLAIN = Plan()


@dataclass(frozen=True, eq=False)
class FlexMetadata:
    """M of FLEX_ATTN.

    Attributes:
        plan: made from the record's tensors; None where there are none.
        rules: what to make a plan of once the device is known; None as well = plain dense attention.
        segments: no or one part of the sequence that attends to itself, the rest being padding; None = the whole.
    """

    plan: Plan | None = None
    rules: HostRules | None = None
    segments: tuple[Segment, ...] | None = None
    plans: dict[torch.device, Plan] = field(default_factory=dict, repr=False)

    def plan_on(self, device: torch.device) -> Plan:
        """The plan for tensors on a device; made at the first call where only the host knows the rules."""
        if self.plan is not None:
            return self.plan
        if self.rules is None:
            return _PLAIN
        if _is_compiling():
            return self.rules.plan(device)
        plan = self.plans.get(device)
        if plan is None:
            plan = self.rules.plan(device)
            # What is made in a capture lies in the graph's memory, which replays write to.
            if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                self.plans[device] = plan
        return plan


class FlexMetadataBuilder(AttentionMetadataBuilder):
    """Brings a record's masks and packing into rules and maps of tiles, on their device."""

    reads: frozenset[str] = DENSE_FIELDS

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> FlexMetadata:
        """See AttentionMetadataBuilder.build; masks stay on their device."""
        stated = read_record(record, lengths)
        if stated.segments is not None:
            return self._segmented(stated.segments, lengths)
        if stated.packed is not None:
            cu = (stated.packed.cu_seqlens_q, stated.packed.cu_seqlens_k)
            return FlexMetadata(_document_plan(*cu, lengths, self.causal, self.window))
        if stated.mask is None:
            return self._whole(lengths)
        mask, positional = stated.mask, self.causal or self.window is not None
        bias = row_shift = None
        if stated.mask_kind == "padding":
            rules = [flex_blocks.padding_rule(mask, lengths)]
        elif mask.dtype == torch.bool:
            rules = [flex_blocks.mask_rule(mask)]
        else:
            bias = keep_finite(mask)
            bias = as_additive(bias, torch.float32) if bias.dtype == torch.float64 else bias
            near = (
                position_mask(*lengths, causal=self.causal, window=self.window, device=mask.device)
                if positional
                else None
            )
            bias, row_shift = lift_hidden_rows(bias, near)
            rules = [flex_blocks.bias_rule(bias, lengths)]
        if positional:
            rules.append(
                flex_blocks.position_rule(lengths, causal=self.causal, window=self.window, device=mask.device)
            )
        plan = _plan(tuple(rules), lengths, (self.causal, self.window), bias=bias)
        return FlexMetadata(replace(plan, row_shift=row_shift))

    def _whole(self, lengths: tuple[int, int]) -> FlexMetadata:
        if not self.causal and self.window is None:
            return FlexMetadata()
        return FlexMetadata(None, HostRules(lengths, None, self.causal, self.window))

    def _segmented(self, segments: tuple[Segment, ...], lengths: tuple[int, int]) -> FlexMetadata:
        if len(segments) > 1:
            cu_q = (0, *(segment.query_end for segment in segments))
            cu_k = (0, *(segment.key_end for segment in segments))
            return FlexMetadata(None, HostRules(lengths, (cu_q, cu_k), self.causal, self.window))
        if not segments:
            return FlexMetadata(segments=())
        [only] = segments
        inner = self._whole((only.query_end - only.query_start, only.key_end - only.key_start))
        return FlexMetadata(inner.plan, inner.rules, segments)


def _document_plan(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    lengths: tuple[int, int],
    causal: bool,
    window: tuple[int, int] | None,
) -> Plan:
    rule = flex_blocks.document_rule(cu_seqlens_q, cu_seqlens_k, lengths, causal=causal, window=window)
    static = (causal, window, cu_seqlens_q.numel())
    return _plan((rule,), lengths, static, unused_keys=behind_last(cu_seqlens_k, lengths[1]))


def _plan(
    rules: tuple[Rule, ...], lengths: tuple[int, int], static: Hashable, **tensors: torch.Tensor | None
) -> Plan:
    """A plan of rules; `static` is what they hold beside tensors, which is compiled in."""
    block_mask = flex_blocks.build_block_mask(rules, lengths)
    shapes = tuple(None if tensor is None else tensor.shape for tensor in tensors.values())
    names = tuple(rule.name for rule in rules)
    return Plan(block_mask, kind=(names, static, block_mask.kv_indices.shape[:2], shapes), **tensors)
