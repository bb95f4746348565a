"""BLOCK_SUMMARY_ATTN as data: which executors know summary keys, in order of preference."""

from __future__ import annotations

from dataclasses import replace

from omni_attn.backends.fastvideo_vsa_facts import VSA_VARIANTS
from omni_attn.facts import KernelFacts, Variant

#: What all variants share: self-attention over any sequence, in the order it has, without masks.
SUMMARY_FACTS = KernelFacts(
    value_head_size=True,
    gqa=True,
    unequal_lengths=False,
    self_attention_only=True,
    packed_padding=True,
    backward=True,
    compile_mode="custom_op",
    cudagraph=True,
    sequence_parallel=frozenset({"ulysses"}),
)
#: Hardware that the summary keys themselves were tested on; the executors' own list is of selected blocks alone.
_TESTED_ON = {"triton": ("sm_90 (H200)",), "torch": ("cpu", "sm_90 (H200)")}

SUMMARY_VARIANTS = tuple(
    Variant(
        name=name,
        facts=replace(
            SUMMARY_FACTS,
            # Where they run, and with what tensors, is told where FASTVIDEO_VSA names them.
            **{
                field: getattr(variant.facts, field)
                for field in ("device_kinds", "capabilities", "packages", "dtypes", "head_sizes")
            },
            tested_on=tested_on,
        ),
    )
    for name, tested_on in _TESTED_ON.items()
    for variant in VSA_VARIANTS
    if variant.name == name
)
