"""FlashInfer's TRT-LLM kernels: what each can do, how it is imported, and one calling convention for both.

ragged    trtllm_ragged_attention_deepseek   prebuilt kernels for compute capability 10.x, fetched on first use
fmha_v2   trtllm_fmha_v2_prefill             compiled on first use; here for 9.0

Read against FlashInfer 0.6.18, whose signatures have changed from build to build: they are looked at once, when a layer
is built, and what is there is used.

Legend: B batch, S sequence, T packed tokens, H heads, G kv heads, D head size.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from omni_attn.backends.optional_package import broken, import_symbols
from omni_attn.backends.trtllm_facts import TRTLLM_VARIANTS
from omni_attn.backends.trtllm_lengths import Lengths, workspace
from omni_attn.backends.trtllm_sage import SageQuantiser
from omni_attn.errors import BackendImportError
from omni_attn.facts import PackageRequirement

QUANTISER = "trtllm_sage_attention_quantize"
# The size that serving engines give trtllm-gen; its ragged kernels use little of it.
RAGGED_WORKSPACE = 394 * 2**20
# fmha_v2 keeps one tile counter there.
FMHA_V2_WORKSPACE = 2**20


class Quantisation(NamedTuple):
    """How a call is quantised: the type of queries and keys, and the tokens that share a scale."""

    dtype: str
    q_block: int
    k_block: int


@dataclass(frozen=True)
class RaggedKernel:
    """trtllm_ragged_attention_deepseek.

    Attributes:
        function: it.
        quantiser: for calls that are quantised; None where FlashInfer has none.
        skips_check, takes_mirrors: how it can be told that no sequence is empty; otherwise it asks the device.
    """

    function: Callable[..., Any]
    quantiser: SageQuantiser | None
    skips_check: bool
    takes_mirrors: bool

    @classmethod
    def around(cls, module: Any, function: Callable[..., Any]) -> RaggedKernel:
        """Looks at the signature once."""
        names = inspect.signature(function).parameters
        quantise = getattr(module, QUANTISER, None)
        return cls(
            function,
            None if quantise is None else SageQuantiser.around(quantise),
            skips_check="skip_all_rows_active_check" in names,
            takes_mirrors="q_seq_lens_cpu" in names,
        )

    def attend(
        self,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        lengths: Lengths,
        softmax_scale: float,
        causal: bool,
        factor: float | None,
        quant: Quantisation | None,
    ) -> torch.Tensor:
        """Output [T, H, D]; rows of no sequence hold anything."""
        dtype, scales = query_THD.dtype, _NOTHING
        if quant is not None:
            assert self.quantiser is not None
            tensors, scales = self.quantiser(query_THD, key_TGD, value_TGD, lengths, *quant)
            query_THD, key_TGD, value_TGD = tensors
        output: torch.Tensor = self.function(
            query_THD,
            key_TGD,
            value_TGD,
            workspace(query_THD.device, RAGGED_WORKSPACE),
            lengths.seq_lens,
            lengths.max_q,
            lengths.max_k,
            softmax_scale,
            1.0,
            -1.0,
            lengths.batch_size,
            -1,
            lengths.cu_q,
            lengths.cu_k,
            False,
            causal,
            False,
            skip_softmax_threshold_scale_factor=factor,
            **self._known(lengths),
            **scales,
        )
        return output.to(dtype)

    def _known(self, lengths: Lengths) -> Mapping[str, Any]:
        """That no sequence is empty: the host knows it, as empty ones were left out."""
        if self.skips_check:
            return _CHECK_SKIPPED
        return lengths.mirrors if self.takes_mirrors else _NOTHING


_NOTHING: Mapping[str, Any] = {}
_CHECK_SKIPPED = {"skip_all_rows_active_check": True}


@dataclass(frozen=True)
class FmhaV2Kernel:
    """trtllm_fmha_v2_prefill with separate queries, keys and values."""

    function: Callable[..., Any]
    quantiser: None = None

    @classmethod
    def around(cls, module: Any, function: Callable[..., Any]) -> FmhaV2Kernel:
        """See RaggedKernel.around; there is nothing to look at."""
        return cls(function)

    def attend(
        self,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        lengths: Lengths,
        softmax_scale: float,
        causal: bool,
        factor: float | None,
        quant: Quantisation | None,
    ) -> torch.Tensor:
        """Output [T, H, D]; rows of no sequence, and of one without keys, hold anything."""
        assert quant is None
        output: torch.Tensor = self.function(
            (query_THD, key_TGD, value_TGD),
            "SEPARATE_Q_K_V",
            workspace(query_THD.device, FMHA_V2_WORKSPACE),
            lengths.seq_lens,
            lengths.max_q,
            lengths.max_k,
            softmax_scale,
            1.0,
            lengths.batch_size,
            lengths.cu_q,
            lengths.cu_k,
            mask_mode="causal" if causal else "padding",
            skip_softmax_threshold_scale_factor=factor or 0.0,
        )
        return output


TrtllmKernel = RaggedKernel | FmhaV2Kernel
_KINDS: Mapping[str, type[RaggedKernel] | type[FmhaV2Kernel]] = {
    "ragged": RaggedKernel,
    "fmha_v2": FmhaV2Kernel,
}


def import_trtllm_kernel(variant: str, quantised: bool) -> TrtllmKernel:
    """Imports the function of a variant, and prepares what it loads.

    Args:
        quantised: its calls will be quantised.

    Raises:
        BackendImportError: FlashInfer is not installed, or importing it or loading its kernels fails, or it lacks the
            function, or the quantiser.
    """
    label = f"TRTLLM_ATTN ({variant})"
    package = next(v.facts.packages[0] for v in TRTLLM_VARIANTS if v.name == variant)
    symbols = import_symbols(label, package, *([QUANTISER] if quantised else []))
    module = sys.modules[package.module]
    loader = getattr(module, "get_trtllm_gen_fmha_module", None) if variant == "ragged" else None
    if loader is not None:
        _load(label, package, module, loader)
    return _KINDS[variant].around(module, symbols[package.symbols[0]])


# What went wrong in a module's loader. Without a network it fails after a wait; the next layer need not wait again.
_failed_loads: WeakKeyDictionary[ModuleType, Exception] = WeakKeyDictionary()


def _load(label: str, package: PackageRequirement, module: ModuleType, loader: Callable[[], Any]) -> None:
    """Compiles or finds the launcher and fetches the list of kernels: better now than in a step."""
    try:
        if module in _failed_loads:
            raise _failed_loads[module]
        loader()
    except Exception as error:
        _failed_loads[module] = error
        raise BackendImportError(
            f"{broken(label, package, error)}. Its kernels have to be at hand: flashinfer-cubin, or a network"
        ) from error
