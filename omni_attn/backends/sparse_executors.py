"""The executors of block-sparse attention by name, each loaded when it is first asked for.

Those on other people's kernels lie beside this module, because only backends import kernel packages; every backend
that computes block-sparse attention takes its executors from here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from omni_attn.backends.optional_package import import_symbols
from omni_attn.backends.triton_package import TRITON
from omni_attn.ops.block_sparse.executor import Executor

#: Name -> "module:Class". An executor on a package takes the label that heads its error texts.
EXECUTORS: Mapping[str, str] = MappingProxyType(
    {
        "torch": "omni_attn.ops.block_sparse.torch_executor:TorchExecutor",
        "triton": "omni_attn.ops.block_sparse.triton_executor:TritonExecutor",
        "flex": "omni_attn.backends.sparse_flex:FlexExecutor",
        "fa3": "omni_attn.backends.sparse_fa3:Fa3Executor",
        "fa4": "omni_attn.backends.sparse_fa4:Fa4Executor",
        "fastvideo": "omni_attn.backends.sparse_fastvideo:FastVideoExecutor",
        "flashinfer": "omni_attn.backends.sparse_flashinfer:FlashInferExecutor",
    }
)
_made: dict[str, Executor] = {}


def make_executor(name: str, label: str) -> Executor:
    """The executor of a name: one object per process, which serves every layer and device.

    Args:
        label: backend and variant, for the text of an import that fails.

    Raises:
        BackendImportError: its package is missing, broken, or lacks what it calls.
    """
    if name == "triton":  # ours, whose module imports Triton as it is loaded
        import_symbols(label, TRITON)
    if name not in _made:
        module, _, class_name = EXECUTORS[name].partition(":")
        executor_cls = getattr(importlib.import_module(module), class_name)
        _made[name] = executor_cls() if module.startswith("omni_attn.ops.") else executor_cls(label)
    return _made[name]
