"""The packages with kernels for block-sparse attention, as data."""

from __future__ import annotations

from dataclasses import replace

from omni_attn.backends.flash_packages import FA3_PACKAGES, FA4_PACKAGES
from omni_attn.facts import PackageRequirement

#: FlashAttention 3 with its paged cache; the builds without it ship another module.
FA3_PAGED_PACKAGES = tuple(
    replace(package, symbols=("flash_attn_with_kvcache",))
    for package in FA3_PACKAGES
    if package.module == "flash_attn_interface"
)

#: FlashAttention 4, and what a rule of ours for its kernels is written in.
FA4_SPARSE_PACKAGE = replace(FA4_PACKAGES[0], symbols=("flash_attn_func",))
FA4_LISTS_PACKAGE = replace(
    FA4_SPARSE_PACKAGE, module="flash_attn.cute.block_sparsity", symbols=("BlockSparseTensorsTorch",)
)
FA4_UTILS_PACKAGE = replace(FA4_SPARSE_PACKAGE, module="flash_attn.cute.utils", symbols=("scalar_to_ssa",))
CUTLASS_PACKAGE = PackageRequirement(
    distribution="nvidia-cutlass-dsl", module="cutlass", symbols=("Int32",), minimum="4.6.2"
)
CUTE_PACKAGE = replace(CUTLASS_PACKAGE, module="cutlass.cute", symbols=("jit",))

FASTVIDEO_PACKAGE = PackageRequirement(
    distribution="fastvideo-kernel",
    module="fastvideo_kernel",
    symbols=("block_sparse_attn_from_indices",),
    minimum="0.3.5",
    install='pip install "omni-attn[fastvideo]"',
)


def flashinfer_package(module: str, function: str) -> PackageRequirement:
    """FlashInfer with one of its block-sparse functions."""
    return PackageRequirement(
        distribution="flashinfer-python",
        module=f"flashinfer.cute_dsl.sparse.{module}",
        symbols=(function,),
        minimum="0.6.18",
        install='pip install "omni-attn[flashinfer]"',
    )


#: What stands for all of them where only the distribution is asked for.
FLASHINFER_SPARSE_PACKAGE = flashinfer_package("bsa_attn_sm100_blk64", "bsa_attn_sm100_blk64_fwd")
