"""FLASH_ATTN on Huawei Ascend NPUs, through MindIE-SD.

Variant, package and module:
    mindiesd   mindiesd   mindiesd.attention_forward

Written after the sources of Ascend/MindIE-SD (mindiesd/layers/flash_attn), which run
torch_npu.npu_fusion_attention. The operator is named in each call: MindIE-SD's own choice is a search that times
candidates, and the environment variable MINDIE_SD_FA_TYPE could put one in its place that computes in float16.
Masks are whole bool matrices [B|1, H|1, Sq, Sk]; a float mask would be read as a bool one, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from omni_attn.backends.abstract import AttentionBackend, foreign_metadata
from omni_attn.backends.masked import MaskedImpl, MaskedMetadata, MaskedMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.optional_package import check_keywords, import_symbols
from omni_attn.errors import MetadataError
from omni_attn.facts import BackendFacts, HeadSizes, KernelFacts, PackageRequirement, Variant

MINDIE_PACKAGE = PackageRequirement(
    distribution="mindiesd", module="mindiesd", symbols=("attention_forward",)
)
_FACTS = KernelFacts(
    device_kinds=frozenset({"npu"}),
    packages=(MINDIE_PACKAGE,),
    head_sizes=HeadSizes(multiple_of=16, maximum=256),
    mask_kinds=frozenset({"padding", "arbitrary"}),
    float_masks=False,
    packing=True,
    compile_mode="custom_op",
    sequence_parallel=frozenset({"ulysses", "allgather_kv"}),
)
LABEL = "FLASH_ATTN (mindiesd)"
# The function of the package, for the operator below: an operator's arguments are tensors and numbers.
_functions: dict[str, Callable[..., torch.Tensor]] = {}


@dataclass(frozen=True, eq=False)
class MindieMetadata(MaskedMetadata):
    """M of MindIE-SD: as MaskedMetadata, with a mask that is a whole bool matrix [B|1, H|1, Sq, Sk]."""


class MindieMetadataBuilder(MaskedMetadataBuilder):
    """Masks as whole matrices, made once per step."""

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> MindieMetadata:
        """See MaskedMetadataBuilder.build.

        Raises:
            MetadataError: also for a float mask, and for causal attention or a window.
        """
        if self.causal or self.window is not None:
            raise MetadataError(
                f"{LABEL} cannot do causal attention or a window, found causal={self.causal}, window={self.window}: "
                "choose TORCH_SDPA for this role"
            )
        made = super().build(record, lengths)
        mask = made.mask
        if mask is not None and mask.dtype != torch.bool:
            raise MetadataError(
                f"{LABEL} cannot take attn_mask of dtype {mask.dtype}: needs a bool mask, True = keep. Choose "
                "TORCH_SDPA for this role, or add it as fallback"
            )
        whole = None if mask is None else mask.expand(*mask.shape[:2], *lengths).contiguous()
        return MindieMetadata(whole, made.empty_rows, made.unused_keys, made.segments)


class MindieFlashImpl(MaskedImpl):
    """One layer on MindIE-SD."""

    backend: ClassVar[str] = "FLASH_ATTN"

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self._function = import_symbols(LABEL, MINDIE_PACKAGE)["attention_forward"]
        check_keywords(LABEL, MINDIE_PACKAGE, self._function, "attn_mask", "scale", "head_first", "opt_mode")
        _functions["attention_forward"] = self._function

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: MaskedMetadata,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionImpl.forward."""
        if not isinstance(metadata, MindieMetadata):  # another backend's masks need not be whole
            raise foreign_metadata(self, metadata, MindieMetadata)
        return super().forward(query, key, value, metadata)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        """See MaskedImpl.attend; never causal."""
        if torch.compiler.is_compiling():
            return torch.ops.omni_attn.mindie_attention(query, key, value, mask, self.softmax_scale)  # type: ignore[no-any-return]
        return _call(self._function, query, key, value, mask, self.softmax_scale)

    def attend_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """MindIE-SD gives the output alone.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{LABEL} gives no LSE: its facts say lse=False; choose a backend that has it")


def _call(
    function: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softmax_scale: float,
) -> torch.Tensor:
    """Output [B, H, Sq, D] of query [B, H, Sq, D], key and value [B, H, Sk, D], mask bool [B|1, H|1, Sq, Sk]."""
    return function(
        query,
        key,
        value,
        attn_mask=mask,
        scale=softmax_scale,
        fused=True,
        head_first=True,
        opt_mode="manual",
        op_type="fused_attn_score",
        layout="BNSD",
        use_env_override=False,
    )


@torch.library.custom_op("omni_attn::mindie_attention", mutates_args=())
def _mindie_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softmax_scale: float,
) -> torch.Tensor:
    output = _call(_functions["attention_forward"], query, key, value, mask, softmax_scale)
    return output.contiguous()


@_mindie_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


class MindieFlashBackend(AttentionBackend):
    """torch_npu's fused attention as MindIE-SD calls it."""

    facts: ClassVar[BackendFacts] = BackendFacts.of(
        _FACTS,
        summary="fused attention of MindIE-SD, for Huawei Ascend NPUs",
        variants=(Variant(name="mindiesd", facts=_FACTS),),
    )

    @staticmethod
    def get_name() -> str:
        """FLASH_ATTN."""
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> type[MindieFlashImpl]:
        """MindieFlashImpl."""
        return MindieFlashImpl

    @staticmethod
    def get_builder_cls() -> type[MindieMetadataBuilder]:
        """MindieMetadataBuilder."""
        return MindieMetadataBuilder
