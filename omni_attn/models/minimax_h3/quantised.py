"""Kinds of MiniMax-H3 checkpoints that this loader does not read: found by their headers, refused by name.

Quantised and table-driven exports keep the names of the plain weights, so that reading them anyway would either fail
one shape at a time or, worse, succeed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import first_names

_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})  # dtypes of safetensors that weights here may have
_SCALES = (
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".scale_weight",
    ".input_scale",
    ".scales",
)
_MARKS = (*_SCALES, ".comfy_quant", ".absmax", ".quant_map", ".qweight", ".qzeros", ".codebook", "scaled_fp8")
_CURVES = ("adaln_t_table", "time_embedder.table", ".folded_bias")
_WRAPPERS = ("model.diffusion_model.", "diffusion_model.")
_ADVICE = (
    "Use the checkpoint in bfloat16: a transformer's folder as diffusers' save_pretrained writes it, or that of the "
    "first release."
)


def check_supported(
    folder: str | os.PathLike[str], values: Mapping[str, Any], header: Mapping[str, Any]
) -> None:
    """Nothing if the weights of this folder are plain ones.

    Args:
        folder: the transformer's own.
        values: its config.json.
        header: name -> what the safetensors header says about it ("dtype", "shape").

    Raises:
        ConfigError: they are of another kind; the text says which, by what it was known, and what to use.
    """
    found = [
        *_by_config(values),
        *_by_names(header),
        *_by_dtypes(header),
        *_by_files(Path(folder), header),
    ]
    if found:
        raise ConfigError(
            *(f"{folder}: {problem}" for problem in found), f"{folder}: nothing was loaded. {_ADVICE}"
        )


def _by_config(values: Mapping[str, Any]) -> list[str]:
    problems = []
    if (section := values.get("quantization_config")) is not None:
        method = (
            section.get("quant_method") or section.get("quant_type") if isinstance(section, dict) else section
        )
        problems.append(
            f"config.json has a quantization_config (method {method or 'not named'}), and quantised weights are not "
            "read here."
        )
    if values.get("pdd_steps") is not None:
        problems.append(
            f"config.json says pdd_steps {values['pdd_steps']}: a student with that many output heads, fused step by "
            "step, which this model does not have."
        )
    return problems


def _by_names(header: Mapping[str, Any]) -> list[str]:
    problems = []
    if curves := [name for name in header if name.endswith(_CURVES)]:
        problems.append(
            f"{first_names(curves)}: modulation is looked up in a table over the timestep (a pruned export, as for "
            "ComfyUI), and this model computes it."
        )
    if wrapped := [name for name in header if name.startswith(_WRAPPERS)]:
        problems.append(
            f"{first_names(wrapped)}: names of a single-file export (as for ComfyUI), whose attn.qkv_proj rows stand "
            "in another order than in the first release."
        )
    return problems


def _by_dtypes(header: Mapping[str, Any]) -> list[str]:
    marks = [name for name in header if name.endswith(_MARKS)]
    others = [name for name in header if header[name]["dtype"] not in _PLAIN and name not in marks]
    if not marks and not others:
        return []
    kind = _kind({name: header[name]["dtype"] for name in (*marks, *others)})
    shown = [f"{name} ({header[name]['dtype']})" for name in (*others, *marks)]
    return [f"{kind} weights, which are not read here: {first_names(shown)}."]


def _kind(dtypes: Mapping[str, str]) -> str:
    """A quantisation's name from the names and dtypes of what is not plain: weights, scales and marks."""
    scales = {dtype for name, dtype in dtypes.items() if name.endswith(_SCALES)}
    weights = {dtype for name, dtype in dtypes.items() if not name.endswith(_MARKS)}
    has_fp8 = any(dtype.startswith("F8_") for dtype in weights)
    if any(name.endswith(".weight_scale_2") for name in dtypes) or any(d.startswith("F4") for d in weights):
        return "nvfp4"
    if has_fp8 and scales & {"F8_E8M0", "U8"}:
        return "mxfp8"
    if has_fp8:
        return "fp8"
    return "int8" if "I8" in weights else "quantised"


def _by_files(folder: Path, header: Mapping[str, Any]) -> list[str]:
    files = sorted(path.name for path in folder.glob("*.gguf")) if not header else []
    return [f"weights are GGUF files, which are not read here: {first_names(files)}."] if files else []
