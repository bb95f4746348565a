"""CUDNN_ATTN: cuDNN's fused attention, called as torch's own operator.

torch.nn.attention.sdpa_kernel would pin it too, at the price of a context manager per call, which costs more on the
host than the whole dispatch. The operator below is what that context would lead to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.masked import MaskedImpl, MaskedMetadataBuilder
from omni_attn.errors import BackendImportError
from omni_attn.facts import BackendFacts, CapabilityRange, CudnnFloor, HeadSizes
from omni_attn.ops.layout import unit_stride
from omni_attn.ops.masks import as_additive, lowest


def cudnn_operator() -> Callable[..., Any]:
    """torch's operator for cuDNN's fused attention.

    Raises:
        BackendImportError: this torch has none.
    """
    packet = getattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", None)
    if packet is None:
        raise BackendImportError(
            f"CUDNN_ATTN: torch {torch.__version__} has no operator aten::_scaled_dot_product_cudnn_attention; "
            "needs torch >= 2.5 (`pip install -U torch`)"
        )
    operator: Callable[..., Any] = packet.default
    return operator


class CuDNNAttentionImpl(MaskedImpl):
    """One layer on cuDNN."""

    backend: ClassVar[str] = "CUDNN_ATTN"

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self._operator = cudnn_operator()
        self._default_scale = self.softmax_scale == self.head_size**-0.5

    def __getstate__(self) -> dict[str, Any]:
        """An operator cannot be pickled; it is looked up again."""
        return {name: value for name, value in self.__dict__.items() if name != "_operator"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _operator=cudnn_operator())

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        """See MaskedImpl.attend."""
        for_backward = torch.is_grad_enabled() and (
            query.requires_grad or key.requires_grad or value.requires_grad
        )
        output: torch.Tensor = self._call(query, key, value, mask, is_causal, for_backward)[0]
        return output

    def attend_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See MaskedImpl.attend_with_lse."""
        output, lse = self._call(query, key, value, mask, is_causal, True)[:2]
        return output, lse.reshape(query.shape[:3])

    def _call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        with_lse: bool,
    ) -> Any:
        query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
        if mask is None and not is_causal and self._default_scale:
            # The hot path of diffusion models: each argument left out saves host time.
            return self._operator(query, key, value, None, with_lse)
        bias = None if mask is None else _finite_bias(mask, query.dtype)
        return self._operator(
            query, key, value, bias, with_lse, 0.0, is_causal, False, scale=self.softmax_scale
        )


def _finite_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An additive mask without -inf, which cuDNN turns into NaN; rows without any key are cleared afterwards."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest(dtype))
    return as_additive(mask, dtype).clamp(min=lowest(dtype))


class CuDNNAttentionBackend(AttentionBackend):
    """cuDNN's fused attention through torch."""

    facts: ClassVar[BackendFacts] = BackendFacts(
        summary="cuDNN fused attention through torch's operator",
        device_kinds=frozenset({"cuda"}),
        capabilities=(CapabilityRange(minimum=(8, 0)),),
        cudnn=(
            CudnnFloor(capabilities=CapabilityRange(minimum=(8, 0), below=(10, 0)), version=90000),
            CudnnFloor(capabilities=CapabilityRange(minimum=(10, 0)), version=90500),
        ),
        head_sizes=HeadSizes(multiple_of=8, maximum=256),
        mask_kinds=frozenset({"padding", "arbitrary"}),
        causal=True,
        causal_with_mask=True,
        gqa=True,
        packing=True,
        window=True,
        lse=True,
        backward=True,
        compiled_backward=True,
        compile_mode="traceable",
        cudagraph=True,
        error="2.3e-3",
        sequence_parallel=frozenset({"ulysses", "ring", "ulysses_ring", "allgather_kv"}),
        tested_on=("sm_90 (H200)",),
    )

    @staticmethod
    def get_name() -> str:
        """CUDNN_ATTN."""
        return "CUDNN_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CuDNNAttentionImpl]:
        """CuDNNAttentionImpl."""
        return CuDNNAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MaskedMetadataBuilder]:
        """MaskedMetadataBuilder."""
        return MaskedMetadataBuilder
