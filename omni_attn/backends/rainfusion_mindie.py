"""RainFusion as MindIE-SD computes it on Huawei Ascend NPUs: one call orders, selects, attends and orders back.

Written after the sources of Ascend/MindIE-SD (mindiesd/layers/flash_attn/sparse_flash_attn.py). Its rules differ from
ours in two places: blocks are ranked by means in the inputs' dtype, and of a prefix that starts inside a block only the
blocks behind that one are protected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from omni_attn.backends.optional_package import import_symbols
from omni_attn.backends.rainfusion_facts import MINDIE_PACKAGE
from omni_attn.errors import BackendImportError, ConfigError
from omni_attn.ops.block_sparse.rainfusion import RainFusionCall
from omni_attn.ops.block_sparse.selection import BlockSelection

#: inner_precise of the package: 0 is the exact mode of rf_v2, 4 the one mode of rf_v3.
_EXACT, _RF_V3 = 0, 4


class MindieRainFusion:
    """mindiesd.sparse_attention, checked for what it will be asked.

    Args:
        label: backend and variant, to head an error text.
        precision: "bf16", "fp8" or "mix".

    Raises:
        BackendImportError: the package is missing or broken, or its function takes no argument of that name. It takes
            any keyword, and leaves those that it does not know unread.
    """

    def __init__(self, label: str, precision: str) -> None:
        self._label = label
        function: Callable[..., torch.Tensor] = import_symbols(label, MINDIE_PACKAGE)["sparse_attention"]
        needed = {"video_spans"} if precision == "bf16" else {"video_spans", "precision"}
        if lacking := sorted(needed - inspect.signature(function).parameters.keys()):
            raise BackendImportError(
                f"{label}: mindiesd.sparse_attention takes no {', '.join(lacking)}; needs a newer mindiesd: "
                f"`{MINDIE_PACKAGE.install_command}`"
            )
        self._function = function
        # What is not bf16 belongs to rf_v3; rf_v2 would leave it unread.
        self._mode: dict[str, Any] = {"sparse_type": "rf_v2", "inner_precise": _EXACT}
        if precision != "bf16":
            self._mode = {"sparse_type": "rf_v3", "inner_precise": _RF_V3, "precision": precision}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: RainFusionCall,
    ) -> torch.Tensor:
        """Output [B, S, H, D], contiguous, of query, key and value [B, S, H, D], the tokens in use."""
        layout = call.layout
        ((start, grid), *later) = layout.spans
        if later or start + layout.video_rows != layout.used_len:
            where: dict[str, Any] = {
                "video_spans": [{"start": start, "latent_shape": list(grid)} for start, grid in layout.spans]
            }
        else:
            where = {"txt_len": start, "latent_shape_q": list(grid), "latent_shape_k": list(grid)}
        return self._function(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            scale=call.softmax_scale,
            head_num=query.shape[2],
            input_layout="BSND",
            block_size=call.block_size,
            sparsity=call.sparsity,
            **self._mode,
            **where,
        ).contiguous()

    def select(self, *_: object) -> BlockSelection:
        """Nothing: the package selects inside of its call.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{self._label}: which blocks a call selected cannot be shown, because mindiesd.sparse_attention selects "
            "them inside and gives only the output. Choose variant torch for a look, which ranks by means in float32 "
            "instead of the inputs' dtype"
        )
