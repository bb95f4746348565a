"""RAINFUSION_ATTN as data: what can run its sparse attention, in order of preference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from omni_attn.backends.fastvideo_vsa_facts import VSA_VARIANTS
from omni_attn.config import BlockSparseSpec
from omni_attn.facts import HeadSizes, KernelFacts, PackageRequirement, Variant

MINDIE = "mindiesd"
MINDIE_PACKAGE = PackageRequirement(distribution="mindiesd", module="mindiesd", symbols=("sparse_attention",))

#: What all variants share: self-attention over a sequence with a video in it, without masks.
RAINFUSION_FACTS = KernelFacts(
    unequal_lengths=False,
    packed_padding=True,
    needs_video_grid=True,
    compile_mode="custom_op",
    sequence_parallel=frozenset({"ulysses"}),
)
#: Executors of FASTVIDEO_VSA, which take blocks of 128 tokens and different numbers of them as well. `torch` runs
#: everywhere, so that those behind it run by name only.
_EXECUTORS = ("triton", "fa4", "fa3", "flex", "fastvideo", "torch", "flashinfer")
#: Within this backend.
_UNTESTED = ("fa3", "flashinfer")

RAINFUSION_VARIANTS = (
    Variant(
        name=MINDIE,
        facts=replace(
            RAINFUSION_FACTS,
            device_kinds=frozenset({"npu"}),
            packages=(MINDIE_PACKAGE,),
            head_sizes=HeadSizes(allowed=(64, 96, 128, 192, 256)),
        ),
    ),
    *(
        # What they can do is told where FASTVIDEO_VSA names them; that scale is VSA's rule, and one package's.
        replace(
            variant,
            facts=replace(
                variant.facts,
                custom_scale=name != "fastvideo",
                tested_on=() if name in _UNTESTED else variant.facts.tested_on,
            ),
        )
        for name in _EXECUTORS
        for variant in VSA_VARIANTS
        if variant.name == name
    ),
)


def precision_reasons(variant: str, options: BlockSparseSpec) -> Iterator[str]:
    """Why a variant cannot compute in the precision asked for, "needs X, found Y"."""
    if options.precision != "bf16" and variant != MINDIE:
        yield f"needs variant {MINDIE} for block_sparse.precision {options.precision}, found {variant}"
