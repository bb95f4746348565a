"""FASTVIDEO_VSA as data: what each executor can do, and which one is the fastest where."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omni_attn.backends.sparse_packages import (
    FA3_PAGED_PACKAGES,
    FA4_SPARSE_PACKAGE,
    FASTVIDEO_PACKAGE,
    FLASHINFER_SPARSE_PACKAGE,
)
from omni_attn.backends.triton_package import TRITON_PACKAGES
from omni_attn.config import AttentionSpec, FastVideoVSASpec
from omni_attn.facts import (
    BuildFlag,
    CapabilityHeadSizes,
    CapabilityRange,
    HeadSizes,
    KernelFacts,
    Variant,
)
from omni_attn.facts.backend import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

_PAGED = BuildFlag(name="FLASHATTENTION_DISABLE_PAGEDKV", always="a paged KV cache")

#: What all executors share: self-attention over one video, at the usual scale, without masks.
VSA_FACTS = KernelFacts(
    gqa=True,
    unequal_lengths=False,
    custom_scale=False,
    packed_padding=True,
    needs_video_grid=True,
    compile_mode="custom_op",
    cudagraph=True,
    sequence_parallel=frozenset({"ulysses"}),
)
_TRITON_DEVICES = replace(
    VSA_FACTS,
    device_kinds=frozenset({"cuda", "rocm", "xpu"}),
    capabilities=(CapabilityRange(minimum=(8, 0)),),
    packages=TRITON_PACKAGES,
    dtypes=frozenset({FLOAT16, BFLOAT16, FLOAT32}),
)
_CUDA = replace(VSA_FACTS, device_kinds=frozenset({"cuda"}))

_H200 = ("sm_90 (H200)",)

#: Every executor takes every tile: those on others' kernels cut a tile into blocks of 64 or 128 rows, and what a last
#: block lacks is padding there.
VSA_VARIANTS = (
    Variant(
        name="triton",
        facts=replace(
            _TRITON_DEVICES,
            head_sizes=HeadSizes(multiple_of=16, minimum=16, maximum=256),
            value_head_size=True,
            backward=True,
            tested_on=_H200,
        ),
    ),
    Variant(
        name="fa3",
        facts=replace(
            _CUDA,
            capabilities=(CapabilityRange(minimum=(9, 0), below=(10, 0)),),
            packages=tuple(
                replace(package, flags=(*package.flags, _PAGED)) for package in FA3_PAGED_PACKAGES
            ),
            head_sizes=HeadSizes(multiple_of=8, maximum=256),
            tested_on=_H200,
        ),
    ),
    Variant(
        name="fa4",
        facts=replace(
            _CUDA,
            capabilities=(CapabilityRange(minimum=(9, 0), below=(12, 0)),),
            packages=(FA4_SPARSE_PACKAGE,),
            head_sizes=HeadSizes(multiple_of=8, maximum=256),
            capability_head_sizes=(
                CapabilityHeadSizes(
                    capabilities=CapabilityRange(minimum=(10, 0), below=(12, 0)),
                    head_sizes=HeadSizes(multiple_of=8, maximum=128),
                ),
            ),
            tested_on=_H200,
        ),
    ),
    Variant(
        name="fastvideo",
        facts=replace(
            _CUDA,
            capabilities=(CapabilityRange(minimum=(8, 0)),),
            packages=(FASTVIDEO_PACKAGE,),
            dtypes=frozenset({BFLOAT16}),
            head_sizes=HeadSizes(allowed=(64, 128)),
            tested_on=_H200,
        ),
    ),
    Variant(
        name="flashinfer",
        facts=replace(
            _CUDA,
            capabilities=(
                CapabilityRange(minimum=(10, 0), below=(10, 1)),
                CapabilityRange(minimum=(10, 3), below=(10, 4)),
                CapabilityRange(minimum=(12, 0), below=(12, 2)),
            ),
            packages=(FLASHINFER_SPARSE_PACKAGE,),
            # Its kernel for small tiles on compute capability 10 has no float16.
            dtypes=frozenset({BFLOAT16}),
            head_sizes=HeadSizes(allowed=(128,)),
        ),
    ),
    Variant(
        name="flex",
        facts=replace(_TRITON_DEVICES, head_sizes=HeadSizes(minimum=16, maximum=256), tested_on=_H200),
    ),
    Variant(
        name="torch",
        facts=replace(
            VSA_FACTS,
            dtypes=frozenset({FLOAT16, BFLOAT16, FLOAT32, FLOAT64}),
            value_head_size=True,
            backward=True,
            tested_on=("cpu", *_H200),
        ),
    ),
)


@dataclass(frozen=True)
class ExecutorOrder:
    """Variants, fastest first, for tiles of `min_volume` tokens and more on devices of `capabilities` (None = all)."""

    order: tuple[str, ...]
    capabilities: CapabilityRange | None = None
    min_volume: int = 1

    def holds(self, capability: tuple[int, int] | None, volume: int) -> bool:
        """Whether the row is meant for a device and a tile."""
        here = self.capabilities is None or (capability is not None and capability in self.capabilities)
        return here and volume >= self.min_volume


_ANYWHERE = ("triton", "flex", "torch")
_HOPPER = CapabilityRange(minimum=(9, 0), below=(10, 0))
#: The first row that holds decides; explicit variants do not look at it. Every variant that no row names runs only
#: where it is chosen by name. Measured on an H200, 10 % of random tiles, raster order to raster order, in ms
#: (benchmarks/notes/2026-11-30-vsa-h200.md): tile 4 x 8 x 8 at Wan 720p fa3 19.7, triton 21.2, fa4 24.0, fastvideo
#: 28.5; at 480p 1.32, 1.34, 1.60, 3.1. Tile 4 x 4 x 4 at 720p triton 26.6, fa3 36.8, fastvideo 47.2, fa4 144; at 480p
#: 1.77, 2.45, 3.7, 8.4; flex 6.1. Elsewhere ours leads unmeasured.
EXECUTOR_ORDERS = (
    ExecutorOrder(("fa3", "triton", "fa4", "fastvideo", "flex", "torch"), _HOPPER, min_volume=128),
    ExecutorOrder(("triton", "fa3", "fastvideo", "flex", "torch"), _HOPPER),
    ExecutorOrder(_ANYWHERE),
)


def options_of(spec: AttentionSpec | None) -> FastVideoVSASpec:
    """The options that hold; the block's defaults where nobody gave any."""
    found = None if spec is None else spec.fastvideo_vsa
    return FastVideoVSASpec() if found is None else found


def fastest_first(
    variants: tuple[Variant, ...], capability: tuple[int, int] | None, volume: int
) -> tuple[Variant, ...]:
    """The variants that run tiles of `volume` tokens where nobody chose one, fastest first."""
    order = next(row.order for row in EXECUTOR_ORDERS if row.holds(capability, volume))
    by_name = {variant.name: variant for variant in variants}
    return tuple(by_name[name] for name in order if name in by_name)
