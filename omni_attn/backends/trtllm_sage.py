"""FlashInfer's SAGE quantiser, in each of the calling conventions that it has had.

Legend: T packed tokens, H heads, G kv heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from omni_attn.backends.trtllm_lengths import Lengths

QUANT_DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class SageQuantiser:
    """Queries and keys with one scale per block of tokens, values in fp8 with one scale per head and channel.

    Attributes:
        function: trtllm_sage_attention_quantize.
        takes_lengths: it keeps the blocks of different sequences apart; without that they run over all tokens.
        smooths_keys: it subtracts the mean of the keys itself.
    """

    function: Callable[..., Any]
    takes_lengths: bool
    smooths_keys: bool

    @classmethod
    def around(cls, function: Callable[..., Any]) -> SageQuantiser:
        """Looks at the signature once."""
        names = inspect.signature(function).parameters
        return cls(function, "cum_seq_lens_q" in names, "smooth_k" in names)

    def straddles(self, lengths: Lengths, q_block: int, k_block: int) -> bool:
        """Whether a block of the whole batch would hold tokens of two sequences."""
        if self.takes_lengths or lengths.batch_size == 1:
            return False
        sides = zip(lengths.mirrors.values(), (q_block, k_block), strict=True)
        return any(bool((lens % block).any()) for lens, block in sides)

    def __call__(
        self,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        lengths: Lengths,
        dtype: str,
        q_block: int,
        k_block: int,
    ) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Quantised query, key and value; and the arguments that tell the kernel of their scales.

        The mean of the keys is taken away first: softmax does not see what all keys of a sequence share, and the rest
        fits into eight bits better.
        """
        options: dict[str, Any] = {}
        if self.smooths_keys:
            options["smooth_k"] = True
        else:
            key_TGD = (key_TGD.float() - key_TGD.float().mean(0, keepdim=True)).to(key_TGD.dtype)
        if self.takes_lengths:
            options |= {"cum_seq_lens_q": lengths.cu_q, "cum_seq_lens_kv": lengths.cu_k}
        made = self.function(
            query_THD,
            key_TGD,
            value_TGD,
            q_block_size=q_block,
            k_block_size=k_block,
            qk_quant_dtype=QUANT_DTYPES[dtype],
            **options,
        )
        q_scales, k_scales, v_scales = made[3:6]  # the mean of the keys comes seventh
        return list(made[:3]), {
            "sage_attn_sfs": (q_scales, k_scales, None, v_scales),
            "num_elts_per_sage_attn_blk": (q_block, k_block, 0, 1),
        }
