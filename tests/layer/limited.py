"""Backends of the tests' own with exact numbers and limits that no built-in one has.

Every recipe runs on them too, which shows that it checks a refusal where the facts give one, instead of failing.

    PLAIN_ONLY   one machine, one dtype, one head size: plain dense attention, and nothing beside it
    BOOL_ONLY    bool masks, causal calls of equal lengths, one of the two at a time; packing
    LONG_ONLY    all of it, from a number of tokens on
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from omni_attn.backends.abstract import AttentionBackend, AttentionImpl
from omni_attn.backends.masked import MaskedImpl, MaskedMetadata, MaskedMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.registry import register_diffusion_backend, unregister_diffusion_backend
from omni_attn.backends.stated import DENSE_FIELDS, read_record
from omni_attn.errors import MetadataError
from omni_attn.facts import BackendFacts, CapabilityRange, HeadSizes
from omni_attn.ops.reference import reference_attention
from omni_attn.ops.segments import Segment
from omni_attn.testing.standins.log import CallLog

_logs: dict[str, CallLog] = {}


@torch.library.custom_op("omni_attn_tests::limited_attention", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool, name: str
) -> tuple[Tensor, Tensor]:
    """[B, H, S, D] tensors; an operator, so that compiled code calls it too, as it would a kernel."""
    _logs[name].calls.append("limited_attention")
    in_order = (x.transpose(1, 2) for x in (query, key, value))
    output, lse = reference_attention(*in_order, attn_mask=mask, causal=causal, softmax_scale=scale)
    return output.to(query.dtype).transpose(1, 2).contiguous(), lse.float()


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    shape = (*query.shape[:3], value.shape[3])
    return query.new_empty(shape), query.new_empty(shape[:3], dtype=torch.float32)


class LimitedBuilder(MaskedMetadataBuilder):
    """Refuses what the facts of its backend do not claim."""

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        assert self.spec is not None
        self.name = self.spec.backend
        self.facts = LIMITED[self.name].facts
        unread = set() if self.facts.mask_kinds else {"attn_mask"}
        unread |= set() if self.facts.packing else {"cu_seqlens_q", "cu_seqlens_k", "packed_padding"}
        self.reads = DENSE_FIELDS - unread  # type: ignore[misc]

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> MaskedMetadata:
        """See AttentionMetadataBuilder.build."""
        stated = read_record(record, lengths)
        if 0 not in lengths:
            for part in stated.segments or (Segment(0, lengths[0], 0, lengths[1]),):
                self._check_lengths(part.query_end - part.query_start, part.key_end - part.key_start)
        if stated.packed is not None and max(self.facts.min_query_tokens, self.facts.min_key_tokens) > 1:
            raise MetadataError(
                f"{self.name} needs {self.facts.min_query_tokens} query and {self.facts.min_key_tokens} key tokens in "
                "each sequence, and cu_seqlens are on the device: give them as ints"
            )
        if stated.packed is not None and self.causal and not self.facts.causal_unequal_lengths:
            raise MetadataError(f"{self.name} needs cu_seqlens as ints, to see that each length is equal")
        if stated.mask is not None and stated.mask.dtype != torch.bool and not self.facts.float_masks:
            raise MetadataError(f"{self.name} adds no float attn_mask; TORCH_SDPA does")
        if stated.mask is not None and self.causal and not self.facts.causal_with_mask:
            raise MetadataError(f"{self.name} is causal or takes a mask, not both; TORCH_SDPA does")
        return super().build(record, lengths)

    def _check_lengths(self, queries: int, keys: int) -> None:
        least = (self.facts.min_query_tokens, self.facts.min_key_tokens)
        for side, needed, found in zip(("query", "key"), least, (queries, keys), strict=True):
            if 0 < found < needed:
                raise MetadataError(f"{self.name} needs {needed} {side} tokens, found {found}")
        if self.causal and queries != keys and not self.facts.causal_unequal_lengths:
            raise MetadataError(f"{self.name} needs equal lengths for causal, found {queries} and {keys}")
        if queries != keys and not self.facts.unequal_lengths:
            raise MetadataError(f"{self.name} needs equal lengths, found {queries} and {keys}")


class LimitedImpl(MaskedImpl):
    """Numbers of the reference."""

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        assert self.spec is not None
        self.backend = self.spec.backend  # type: ignore[misc]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """See MaskedImpl.attend."""
        return self.attend_with_lse(query, key, value, mask, is_causal)[0]

    def attend_with_lse(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """See MaskedImpl.attend_with_lse."""
        results: tuple[Tensor, Tensor] = _attention(
            query, key, value, mask, self.softmax_scale, is_causal, self.backend
        )
        return results


class _Limited(AttentionBackend):
    """What the three share; each names itself and its facts."""

    facts: ClassVar[BackendFacts] = BackendFacts()

    @staticmethod
    def get_name() -> str:
        """No name of its own."""
        return "LIMITED"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """LimitedImpl."""
        return LimitedImpl

    @staticmethod
    def get_builder_cls() -> type[MaskedMetadataBuilder]:
        """LimitedBuilder."""
        return LimitedBuilder


class PlainOnly(_Limited):
    """Plain dense attention on one machine."""

    facts: ClassVar[BackendFacts] = BackendFacts(
        device_kinds=frozenset({"cuda"}),
        capabilities=(CapabilityRange(minimum=(10, 0), below=(10, 1)),),
        dtypes=frozenset({"bfloat16"}),
        head_sizes=HeadSizes(allowed=(128,)),
        custom_scale=False,
        unequal_lengths=False,
    )

    @staticmethod
    def get_name() -> str:
        """PLAIN_ONLY."""
        return "PLAIN_ONLY"


class BoolOnly(_Limited):
    """Masks of bool, and causal for equal lengths."""

    facts: ClassVar[BackendFacts] = BackendFacts(
        device_kinds=frozenset({"rocm"}),
        architectures=frozenset({"gfx950"}),
        head_sizes=HeadSizes(allowed=(64, 128)),
        mask_kinds=frozenset({"padding", "arbitrary"}),
        float_masks=False,
        causal=True,
        causal_unequal_lengths=False,
        packing=True,
        compile_mode="custom_op",
    )

    @staticmethod
    def get_name() -> str:
        """BOOL_ONLY."""
        return "BOOL_ONLY"


class LongOnly(_Limited):
    """No short sequences."""

    facts: ClassVar[BackendFacts] = BackendFacts(
        dtypes=frozenset({"float16", "bfloat16", "float32"}),
        value_head_size=True,
        mask_kinds=frozenset({"padding", "arbitrary"}),
        causal=True,
        causal_with_mask=True,
        gqa=True,
        packing=True,
        window=True,
        lse=True,
        compile_mode="custom_op",
        min_query_tokens=15,
        min_key_tokens=17,
    )

    @staticmethod
    def get_name() -> str:
        """LONG_ONLY."""
        return "LONG_ONLY"


LIMITED: dict[str, type[AttentionBackend]] = {
    backend.get_name(): backend for backend in (PlainOnly, BoolOnly, LongOnly)
}


@contextmanager
def limited_kernels(name: str) -> Iterator[CallLog]:
    """Registers one of them for the time of the block; yields the log of its calls."""
    register_diffusion_backend(name, LIMITED[name])
    _logs[name] = CallLog()
    try:
        yield _logs[name]
    finally:
        unregister_diffusion_backend(name)
