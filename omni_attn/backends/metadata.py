"""AttentionMetadata: what the calls of one step look like, stated by the model, neutral of any backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, Literal

import torch

from omni_attn.errors import MetadataError

STEP_FIELDS = frozenset({"step", "num_steps", "sigma"})
# A backend that does not read one of these would compute something else than the record says.
BINDING_FIELDS = frozenset({"attn_mask", "cu_seqlens_q", "cu_seqlens_k", "packed_padding"})


@dataclass(frozen=True)
class VideoLayout:
    """Where text and video lie in a joint sequence: prefix segments first, then video spans, then padding.

    Attributes:
        prefix_segments: token counts of the segments before the video (text, condition, audio).
        spans: latent grids (T, H, W) of the video spans that follow, in order.
        used_len: tokens in use; what lies behind them is padding.

    Raises:
        MetadataError: an extent is out of range, or segments and spans do not add up to used_len; both are named.
    """

    prefix_segments: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]
    used_len: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix_segments", tuple(self.prefix_segments))
        object.__setattr__(self, "spans", tuple(map(tuple, self.spans)))
        if min(self.prefix_segments, default=0) < 0 or any(
            len(span) != 3 or min(span) < 1 for span in self.spans
        ):
            raise MetadataError(
                f"video_layout: segments {self.prefix_segments} need to be 0 tokens or more, and spans {self.spans} "
                "three extents (T, H, W) from 1 on: state the grids after patchify"
            )
        counted = sum(self.prefix_segments) + sum(prod(span) for span in self.spans)
        if counted != self.used_len:
            raise MetadataError(
                f"video_layout: segments {self.prefix_segments} and spans {self.spans} hold {counted} tokens, "
                f"used_len says {self.used_len}: make both the same number"
            )


@dataclass(frozen=True)
class PackedPadding:
    """One sequence with structural padding behind it: the first q_length / kv_length tokens are real.

    Padded query rows come out as zeros. Batch size 1.
    """

    q_length: int
    kv_length: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a builder made from a record for one group of layers.

    Attributes:
        product: the backend's own metadata M.
        lengths: (query tokens, key tokens) it holds for.
        route: index of the impl that runs: 0 = the selected one, 1 = its first fallback, ...
        reads: record fields that decided it.
        refusal: why the routes before it could not, None for the selected one.
        mask_batch, mask_device: batch size (None = any) and device of the mask it was built from, None without one.
    """

    product: Any
    lengths: tuple[int, int]
    route: int = 0
    reads: frozenset[str] = frozenset()
    refusal: str | None = None
    mask_batch: int | None = None
    mask_device: torch.device | None = None
    mask_version: int | None = None

    @property
    def call_lengths(self) -> tuple[int, int]:
        """What the tensors of a call have: a rank's own tokens, where the sequence is split."""
        own: tuple[int, int] | None = getattr(self.product, "call_lengths", None)
        return self.lengths if own is None else own


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionMetadata:
    """One kind of call of a step: masks, packing, geometry, and where in the schedule it stands. Frozen.

    Attributes:
        attn_mask: `[B, K]` keep-padding mask, or `[B|1, H|1, Sq, Sk]`; bool = keep, float = added to the scores.
        mask_mode: host fact about the mask: "none" (it hides nothing and is ignored), "padding" or "arbitrary".
        kv_lengths: host fact: valid keys per batch item, where a `[B, K]` mask keeps a prefix of that length.
        cu_seqlens_q, cu_seqlens_k: int32 tensors `[N + 1]`, or tuples of ints (host facts), for N sequences packed in
            `[1, T, H, D]`; k defaults to q.
        max_seqlen_q, max_seqlen_k: longest packed sequence, host ints; None = the whole length.
        vsa_dit_seq_shape: the (T, H, W) token grid of a pure video sequence in raster order.
        video_layout: where segments and video spans lie in a joint sequence.
        packed_padding: structural padding behind one sequence, as host ints.
        preserve_vsa_all_blocks: keep the sparse path even when all blocks are selected.
        joint_tokens: (query, key) tokens of joint streams, which come as layer inputs joint_query, joint_key and
            joint_value beside the sequence; masks and lengths count them.
        joint_order: whether they lie before the sequence ("front") or behind it ("rear").
        step, num_steps: index of the denoising step and their number; sigma: noise level in [0, 1].
        memo, step_memo: what was prepared, by group: from fields that are the same at every step, and from those that
            are not. Records that at_step makes share the first; dataclasses.replace starts anew.
        validate: "shapes", or "values" to also compare device masks with the host facts (costs a synchronisation).

    Raises:
        MetadataError: fields contradict each other; the text names both sides.
    """

    attn_mask: torch.Tensor | None = None
    mask_mode: Literal["none", "padding", "arbitrary"] | None = None
    kv_lengths: tuple[int, ...] | None = None
    cu_seqlens_q: torch.Tensor | tuple[int, ...] | None = None
    cu_seqlens_k: torch.Tensor | tuple[int, ...] | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    vsa_dit_seq_shape: tuple[int, int, int] | None = None
    video_layout: VideoLayout | None = None
    packed_padding: PackedPadding | None = None
    preserve_vsa_all_blocks: bool = False
    joint_tokens: tuple[int, int] = (0, 0)
    joint_order: Literal["front", "rear"] = "front"
    step: int | None = None
    num_steps: int | None = None
    sigma: float | None = None
    validate: Literal["shapes", "values"] = "shapes"
    layer_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    memo: dict[str, Prepared] = field(default_factory=dict, init=False, repr=False)
    step_memo: dict[str, Prepared] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "vsa_dit_seq_shape"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.cu_seqlens_q is None and (self.max_seqlen_q is not None or self.max_seqlen_k is not None):
            raise MetadataError(
                "max_seqlen_q or max_seqlen_k without cu_seqlens_q: they belong to packed sequences"
            )
        if self.mask_mode not in (None, "none", "padding", "arbitrary"):
            raise MetadataError(f"mask_mode={self.mask_mode!r}: needs 'none', 'padding', 'arbitrary' or None")
        if self.kv_lengths is not None and self.attn_mask is None:
            raise MetadataError(
                "kv_lengths states what attn_mask keeps, and there is no attn_mask: give both"
            )
        if self.cu_seqlens_k is not None and self.cu_seqlens_q is None:
            raise MetadataError("cu_seqlens_k without cu_seqlens_q: packed queries need their own boundaries")
        if self.packed_padding is not None and self.cu_seqlens_q is not None:
            raise MetadataError(
                "packed_padding and cu_seqlens_q both say how tokens are packed: give one of them"
            )
        object.__setattr__(self, "joint_tokens", tuple(self.joint_tokens))
        if (
            len(self.joint_tokens) != 2
            or min(self.joint_tokens) < 0
            or self.joint_tokens[0] > self.joint_tokens[1]
        ):
            raise MetadataError(
                f"joint_tokens={self.joint_tokens}: needs (query, key) tokens from 0 on; queries need keys of their own"
            )
        if self.joint_order not in ("front", "rear"):
            raise MetadataError(f"joint_order={self.joint_order!r}: needs 'front' or 'rear'")
        if self.validate not in ("shapes", "values"):
            raise MetadataError(f"validate={self.validate!r}: needs 'shapes' or 'values'")

    @property
    def stated(self) -> frozenset[str]:
        """Names of the fields that differ from an empty record."""
        return frozenset(
            f.name
            for f in fields(self)
            if not f.name.endswith("memo") and _is_stated(getattr(self, f.name), f.name)
        )

    @property
    def mask_version(self) -> int | None:
        """Counts the in-place changes of attn_mask; None without one, or where torch does not count."""
        mask = self.attn_mask
        return None if mask is None or mask.is_inference() else mask._version

    @property
    def hides_nothing(self) -> bool:
        """True where no key is masked: no mask, mode "none", or a mask on the host, where a look is free."""
        mask = self.attn_mask
        if mask is None or self.mask_mode == "none":
            return True
        if mask.device.type != "cpu":
            return False
        version, known = self.mask_version, self.__dict__.get("_looked")
        if known is None or known[0] != version:
            known = (version, bool((mask if mask.dtype == torch.bool else mask == 0).all()))
            self.__dict__["_looked"] = known
        return bool(known[1])

    def at_step(
        self, step: int, *, num_steps: int | None = None, sigma: float | None = None
    ) -> AttentionMetadata:
        """The same call at another step; what was prepared from fields that do not change stays prepared."""
        count = self.num_steps if num_steps is None else num_steps
        later = replace(self, step=step, num_steps=count, sigma=sigma)
        object.__setattr__(later, "memo", self.memo)
        return later

    def prepared(self, group_id: str) -> Prepared | None:
        """What was prepared for a group of layers, None if nothing was."""
        return self.memo.get(group_id) or self.step_memo.get(group_id)

    def keep(self, group_id: str, made: Prepared) -> None:
        """Keeps what was prepared, for this step or for all steps, as the builder's `reads` say."""
        (self.step_memo if made.reads & STEP_FIELDS else self.memo)[group_id] = made

    def with_layer_inputs(self, **tensors: torch.Tensor) -> AttentionMetadata:
        """The same call with tensors of one layer beside it (`gate_compress`); shares all that was prepared."""
        beside = replace(self, layer_inputs={**self.layer_inputs, **tensors})
        object.__setattr__(beside, "memo", self.memo)
        object.__setattr__(beside, "step_memo", self.step_memo)
        return beside


def _is_stated(value: object, name: str) -> bool:
    if name == "validate":
        return value == "values"
    if name in ("joint_tokens", "joint_order"):
        return value not in ((0, 0), "front")
    return value is not None and value is not False and not (isinstance(value, Mapping) and not value)
