"""The FlashAttention packages over a paged KV cache, as data.

Variants, functions and pages:
    fa3   flash_attn_with_kvcache of flash_attn_interface   any page size
    fa4   flash_attn_varlen_func of flash_attn.cute         any page size
Version 2 takes pages of multiples of 256 tokens only and is left out.
"""

from __future__ import annotations

from dataclasses import replace

from omni_attn.backends.flash_packages import FA3_PACKAGES, FA4_PACKAGES, FLASH_FACTS
from omni_attn.facts import (
    AttentionCGSupport,
    BackendFacts,
    BuildFlag,
    CacheFacts,
    CapabilityHeadSizes,
    CapabilityRange,
    HeadSizes,
    MultipleOf,
    PackageRequirement,
    Variant,
)

PAGED_FUNCTIONS = {"fa3": "flash_attn_with_kvcache", "fa4": "flash_attn_varlen_func"}
_CACHE = "a paged KV cache"
_CACHE_FLAGS = (
    BuildFlag(name="FLASHATTENTION_DISABLE_PAGEDKV", always=_CACHE),
    BuildFlag(name="FLASHATTENTION_DISABLE_VARLEN", always=_CACHE),
)


def _with_cache(package: PackageRequirement) -> PackageRequirement:
    lacks_pages = package.distribution == "fa3-fwd"  # its published wheel
    return replace(
        package,
        symbols=(PAGED_FUNCTIONS["fa3"],),
        flags=(*package.flags, *_CACHE_FLAGS),
        known_flags=package.known_flags | ({_CACHE_FLAGS[0].name} if lacks_pages else set()),
    )


PAGED_FA3_PACKAGES = tuple(map(_with_cache, FA3_PACKAGES))
PAGED_FA4_PACKAGES = tuple(replace(package, symbols=(PAGED_FUNCTIONS["fa4"],)) for package in FA4_PACKAGES)

_PAGED = replace(
    FLASH_FACTS,
    mask_kinds=frozenset(),
    lse=False,
    backward=False,
    sequence_parallel=frozenset(),
    cache=CacheFacts(
        # Pages that hold a whole tile of keys (64 to 192 tokens, by head size) are fetched by TMA, behind the last key
        # too, where anything may stand: a weight of 0 times NaN is NaN. Smaller ones are fetched row by row up to the
        # last key, which costs nothing: see platforms/cuda.py.
        block_sizes=(MultipleOf(base=1, maximum=63),),
        cudagraph=AttentionCGSupport.ALWAYS,
    ),
)
FLASH_PAGED_FACTS = BackendFacts.of(
    _PAGED,
    summary="FlashAttention 3 and 4 over the pages of a KV cache",
    error="2.3e-3",
    # In the order of the paged table on Hopper: platforms/cuda.py has the figures.
    variants=(
        Variant(
            name="fa3",
            facts=replace(
                _PAGED,
                capabilities=(CapabilityRange(minimum=(9, 0), below=(10, 0)),),
                packages=PAGED_FA3_PACKAGES,
                tested_on=("sm_90 (H200)",),
            ),
        ),
        Variant(
            name="fa4",
            facts=replace(
                _PAGED,
                # Its kernels for compute capability 8 and 12 have no pages; of head size 256 on 10 only whole tiles.
                capabilities=(CapabilityRange(minimum=(9, 0), below=(12, 0)),),
                capability_head_sizes=(
                    CapabilityHeadSizes(
                        capabilities=CapabilityRange(minimum=(10, 0), below=(12, 0)),
                        head_sizes=HeadSizes(multiple_of=8, maximum=128),
                    ),
                ),
                packages=PAGED_FA4_PACKAGES,
                tested_on=("sm_90 (H200)",),
            ),
        ),
    ),
)
