"""SageAttention 1 and 2: what each can do, how it is imported, and one calling convention for both.

Both come as distribution and module `sageattention`; the version tells them apart, and so does the module: only 2 has
its kernels under names of their own.

Legend: B batch, S sequence, H heads, G kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from omni_attn.backends.optional_package import check_keywords, import_symbols
from omni_attn.facts import CapabilityRange, HeadSizes, KernelFacts, PackageRequirement, Variant
from omni_attn.facts.backend import BFLOAT16, FLOAT16, FLOAT32
from omni_attn.ops.layout import fits_int32, item_by_item, unit_stride

# Rows of queries that SageAttention 1 works on at a time, and keys.
QUERY_TILE, KEY_TILE = 128, 64
# What SageAttention 2 dispatches on; it raises for any other capability, data-centre Blackwell (10.x) included. Its own
# Triton kernels, which descend from those of 1, are held to the same list.
_CAPABILITIES = (
    CapabilityRange(minimum=(8, 0), below=(8, 1)),
    CapabilityRange(minimum=(8, 6), below=(8, 7)),
    CapabilityRange(minimum=(8, 9), below=(8, 10)),
    CapabilityRange(minimum=(9, 0), below=(9, 1)),
    CapabilityRange(minimum=(12, 0), below=(12, 1)),
    CapabilityRange(minimum=(12, 1), below=(12, 2)),
)

SAGE_FACTS = KernelFacts(
    device_kinds=frozenset({"cuda"}),
    capabilities=_CAPABILITIES,
    head_sizes=HeadSizes(multiple_of=8, maximum=128),
    causal=True,
    # Both mask key j for query i where j > i: aligned at the top left, and documented for equal lengths only.
    causal_unequal_lengths=False,
    gqa=True,
    packing=True,
    # sageattn_varlen sizes its scales by a number it reads back from the device, and centres all sequences at once.
    device_boundaries=False,
    # The Triton kernels (all of SageAttention 1; of 2 the one for 8.6) give the keys that are missing in the last tile
    # the score 0 instead of none. Keys are centred, so that by Jensen's inequality the sum of exponentials is at least
    # the number of keys S, and the output is too small by at most missing / S: 1.5 % at 4096 keys, as much as the
    # quantisation itself. For 2 there is an open report of NaN for lengths that are no multiple of a block.
    key_tile=KEY_TILE,
    min_ragged_keys=4096,
    compile_mode="custom_op",
    sequence_parallel=frozenset({"ulysses", "allgather_kv"}),
)
SAGE_VARIANTS = (
    Variant(
        name="sage2",
        facts=replace(
            SAGE_FACTS,
            dtypes=frozenset({FLOAT16, BFLOAT16}),
            # Its kernels were made for at least one whole block; the largest is 128 x 128 (the keys on 9.0).
            min_query_tokens=128,
            min_key_tokens=128,
            packages=(
                PackageRequirement(
                    distribution="sageattention",
                    module="sageattention",
                    symbols=("sageattn", "sageattn_qk_int8_pv_fp16_triton"),
                    minimum="2",
                    install="pip install --no-build-isolation git+https://github.com/thu-ml/SageAttention",
                ),
            ),
        ),
    ),
    Variant(
        name="sage1",
        facts=replace(
            SAGE_FACTS,
            dtypes=frozenset({FLOAT16, BFLOAT16, FLOAT32}),
            head_sizes=HeadSizes(allowed=(64, 96, 128)),
            cudagraph=True,
            tested_on=("sm_90 (H200)",),
            packages=(
                PackageRequirement(
                    distribution="sageattention",
                    module="sageattention",
                    symbols=("sageattn",),
                    minimum="1.0.6",
                    below="2",
                    install='pip install "omni-attn[sage]"',
                ),
            ),
        ),
    ),
)

Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class SageKernel:
    """One installed generation of sageattn; `call` knows its habits."""

    variant: str
    sageattn: Callable[..., torch.Tensor]
    call: Call

    def attend_op(self, *arguments: Any) -> torch.Tensor:
        """attend as one opaque operator, for torch.compile."""
        return torch.ops.omni_attn.sage_attn(*arguments, self.variant)  # type: ignore[no-any-return]

    def attend(
        self,
        query_BSHD: torch.Tensor,
        key_BSGD: torch.Tensor,
        value_BSGD: torch.Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> torch.Tensor:
        """Output [B, Sq, H, D], contiguous. The kernels compute offsets in 32 bits, so large batches run in parts."""
        query, key, value = unit_stride(query_BSHD), unit_stride(key_BSGD), unit_stride(value_BSGD)
        if fits_int32(query, key, value):
            return self.call(self.sageattn, query, key, value, softmax_scale, causal)
        one_item = partial(self.call, self.sageattn, softmax_scale=softmax_scale, causal=causal)
        return item_by_item(one_item, query, key, value)


def _call_sage1(
    sageattn: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> torch.Tensor:
    # With smooth_k=True it would centre the caller's own keys, in place. The sum is the same, done on a new tensor.
    key = unit_stride(key - key.mean(dim=1, keepdim=True))
    length = query.shape[1]
    if causal and 0 < length % QUERY_TILE <= KEY_TILE:
        # The last tile of queries covers two tiles of keys, and reads a scale for both; here only one of them exists.
        # Zeros behind the end make the other one exist, and the causal mask hides them.
        behind = (0, 0, 0, 0, 0, QUERY_TILE - length % QUERY_TILE)
        query, key, value = F.pad(query, behind), F.pad(key, behind), F.pad(value, behind)
    output = sageattn(
        query, key, value, tensor_layout="NHD", is_causal=causal, sm_scale=softmax_scale, smooth_k=False
    )
    return output if output.shape[1] == length else output[:, :length].contiguous()


def _call_sage2(
    sageattn: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> torch.Tensor:
    # It centres keys on a tensor of its own, and cuts what it padded the head size by off again, as a strided view.
    output = sageattn(query, key, value, tensor_layout="NHD", is_causal=causal, sm_scale=softmax_scale)
    return output.contiguous()


_CALLS: dict[str, tuple[Call, tuple[str, ...]]] = {
    "sage1": (_call_sage1, ("tensor_layout", "is_causal", "sm_scale", "smooth_k")),
    "sage2": (_call_sage2, ("tensor_layout", "is_causal", "sm_scale")),
}
# Kernels by variant, for the operator below: an operator's arguments are tensors, numbers and text.
_kernels: dict[str, SageKernel] = {}


def sage_variant(name: str | None) -> Variant:
    """The variant of a name; the first one where none was chosen."""
    return next(v for v in SAGE_VARIANTS if name in (None, v.name))


def sage_label(variant: str | None) -> str:
    """Backend and variant, to head an error text."""
    return f"SAGE_ATTN ({sage_variant(variant).name})"


def import_sage_kernel(variant: str | None) -> SageKernel:
    """The installed sageattn, as the variant calls it.

    Raises:
        BackendImportError: the package is not installed, importing it fails, it is of the other generation, or its
            function takes other arguments.
    """
    chosen, label = sage_variant(variant), sage_label(variant)
    [package] = chosen.facts.packages
    sageattn = import_symbols(label, package)["sageattn"]
    call, keywords = _CALLS[chosen.name]
    check_keywords(label, package, sageattn, *keywords)
    kernel = SageKernel(chosen.name, sageattn, call)
    _kernels[chosen.name] = kernel
    return kernel


@torch.library.custom_op("omni_attn::sage_attn", mutates_args=())
def _sage_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    variant: str,
) -> torch.Tensor:
    return _kernels[variant].attend(query, key, value, softmax_scale, causal)


@_sage_attn.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)
