"""MiniMax-H3 weights: from the names and layouts of other repositories to the model's, which are diffusers'.

The first release ("native") fuses projections: rows of `attn.qkv_proj` are interleaved per head, and the halves of
`mlp.fc1` stand the other way round. Facts: `scripts/convert_minimax_h3_to_diffusers.py` in diffusers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import read_safetensors
from omni_attn.models.folders import WEIGHTS
from omni_attn.models.gates import GATE, check_gate_names
from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from omni_attn.models.minimax_h3.fasth3 import open_adapter

_NATIVE_WEIGHTS = "model"  # what the first release calls files of weights

# Modules whose parameters are float32 in the published mixed-precision checkpoints.
_FLOAT32_MODULES = frozenset({"proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out"})
# Those that are kept exact where AdaLN is factorised: published in float16, which bfloat16 would round again.
_ADALN = re.compile(r"adaln_basis\.|norm_out\.linear\.|transformer_blocks\.\d+\.adaln_proj\.")

# (what a native name begins with, what it begins with here); all that fit apply, in this order.
_ALIASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"video_patch_proj\.", "proj_in."),
        (r"audio_patch_proj\.", "audio_proj_in."),
        (r"condition_proj\.", "context_embedder."),
        (r"time_embedder\.proj_in\.", "time_embedder.linear_1."),
        (r"time_embedder\.proj_out\.", "time_embedder.linear_2."),
        (r"final_layer\.norm\.", "norm_out.norm."),
        (r"final_layer\.adaln_proj\.linear\.", "norm_out.linear."),
        (r"final_layer\.video_out\.", "proj_out."),
        (r"final_layer\.audio_out\.", "audio_proj_out."),
        (r"blocks\.(\d+)\.", r"transformer_blocks.\1."),
        (r"token_refiner\.blocks\.(\d+)\.", r"token_refiner.refiner_blocks.\1."),
        (r"(.+_blocks\.\d+)\.attn\.([qk])_norm\.", r"\1.attn.norm_\2."),
        (r"(.+_blocks\.\d+)\.attn\.out_proj\.", r"\1.attn.to_out.0."),
        (r"(.+_blocks\.\d+)\.mlp\.fc2\.", r"\1.ff.net.2."),
    )
)
_QKV = re.compile(r"(.+_blocks\.\d+\.attn)\.qkv_proj\.weight$")
_FUSED = re.compile(
    r"(.+_blocks\.\d+\.attn)\.to_qkv\.weight$"
)  # by diffusers' fuse_projections: not interleaved
_GATE_AND_VALUE = re.compile(r"(.+_blocks\.\d+)\.mlp\.fc1\.weight$")
_FREQUENCIES = "rope.inv_freq"

# config.json of the first release: its name of a key -> diffusers'.
_CONFIG_ALIASES: Mapping[str, str] = {
    "token_refiner_num_layers": "num_refiner_layers",
    "ffn_hidden_size": "ffn_dim",
    "latents_dim": "in_channels",
    "audio_latents_dim": "audio_in_channels",
    "timestep_input_dim": "freq_dim",
    "time_embed_hidden_size": "time_embed_hidden_dim",
    "rope_inv_freq_len": "rope_freq_dim",
}
# Keys of it that say in other words what hidden_size says -> how many times hidden_size.
_DERIVED: Mapping[str, int] = {"adaln_out_features": 18, "final_adaln_out_features": 2}
_ROPE_THETA = 10000.0  # which it does not state

Finish = Callable[[str, Tensor], Tensor]


def keeps_float32(name: str, *, is_factorised: bool = False) -> bool:
    """Whether the parameter of this name is float32 whatever dtype the model has.

    Args:
        name: in the model's spelling.
        is_factorised: the model has an `adaln_rank`.
    """
    is_adaln = is_factorised and _ADALN.match(name) is not None
    return is_adaln or name.partition(".")[0] in _FLOAT32_MODULES


def check_gates(config: MiniMaxH3Config, names: Collection[str], source: str) -> None:
    """Nothing if there are gates in all main blocks of this model, or in none.

    Args:
        config: the model.
        names: of all weights, in the model's spelling.
        source: where they come from, for the error text.

    Raises:
        ConfigError: some are missing; the text names them.
    """
    wanted = [f"transformer_blocks.{block}.attn.{GATE}.weight" for block in range(config.num_layers)]
    check_gate_names(wanted, names, config.num_layers, source)


def convert_config(values: Mapping[str, Any], *, source: str = "config.json") -> dict[str, Any]:
    """A parsed config.json under diffusers' names; one of diffusers passes unchanged.

    Raises:
        ConfigError: a key is there under both names, or a derived size is not the one that follows.
    """
    if not any(key in values for key in (*_CONFIG_ALIASES, *_DERIVED)):
        return dict(values)
    problems = [
        f"{source}: {native} and {name} name one thing. Keep one."
        for native, name in _CONFIG_ALIASES.items()
        if native in values and name in values
    ]
    hidden = values.get("hidden_size")
    problems += [
        f"{source}: {key} is {values[key]!r}, and hidden_size {hidden} needs {times * hidden}. Fetch it again."
        for key, times in _DERIVED.items()
        if key in values and isinstance(hidden, int) and values[key] != times * hidden
    ]
    if problems:
        raise ConfigError(*problems)
    renamed = {
        _CONFIG_ALIASES.get(key, key): value
        for key, value in values.items()
        if key not in _DERIVED and key != "_class_name"  # of a class that is not diffusers'
    }
    return {"rope_theta": _ROPE_THETA, **renamed}


def weights_stem(folder: str | os.PathLike[str]) -> str:
    """What the files of weights in a transformer's folder are called: diffusers' name, else the first release's."""
    names = (f"{WEIGHTS}.safetensors", f"{WEIGHTS}.safetensors.index.json")
    native = (f"{_NATIVE_WEIGHTS}.safetensors", f"{_NATIVE_WEIGHTS}.safetensors.index.json")
    if any((Path(folder) / name).is_file() for name in names):
        return WEIGHTS
    return _NATIVE_WEIGHTS if any((Path(folder) / name).is_file() for name in native) else WEIGHTS


def read_weights(
    folder: str | os.PathLike[str],
    config: MiniMaxH3Config,
    *,
    adapter: str | os.PathLike[str] | None = None,
) -> tuple[dict[str, Tensor], Finish | None]:
    """Every weight of a transformer's folder under the model's names, and what `assign_weights` finishes them with.

    Weights are views of mapped files where their layout is the model's. An adapter is fused into one weight at a time,
    by the second value, so that nothing is held twice.

    Args:
        folder: as diffusers' `save_pretrained` writes it, or the first release's; `check_supported` has seen it.
        config: its config.json, parsed.
        adapter: of `omni_attn.models.minimax_h3.fasth3`.

    Raises:
        ConfigError: no weights, weights of another model, gates in part, or an adapter that does not fit.
    """
    state = convert_state_dict(read_safetensors(folder, weights_stem(folder)), config)
    finish = None
    if adapter is not None:
        opened = open_adapter(adapter)
        state, finish = opened.fit(state), opened.fuse
    check_gates(config, state, str(folder) if adapter is None else f"{folder} with {adapter}")
    return state, finish


def convert_state_dict(state: Mapping[str, Tensor], config: MiniMaxH3Config) -> dict[str, Tensor]:
    """The same weights under the model's names and in its layouts.

    Names of diffusers pass unchanged, native ones are translated, unknown ones pass, for the loader to refuse. Native
    weights are those of the first release; single-file exports of it for other programs have rows of another order
    under the same names, which nothing tells apart.

    Raises:
        ConfigError: two keys give one weight different values; fused projections have another number of rows than the
            model; or frequencies are not those of the model.
    """
    converted: dict[str, Tensor] = {}
    for key, tensor in state.items():
        for name, part in _convert(key, tensor, config):
            if name in converted and not torch.equal(converted[name], part):
                raise ConfigError(
                    f"two keys of the checkpoint give {name} different values, the second is {key}. Keep one: it is "
                    "unclear which of the two was trained."
                )
            converted[name] = part
    return converted


def _convert(key: str, tensor: Tensor, config: MiniMaxH3Config) -> list[tuple[str, Tensor]]:
    if key == _FREQUENCIES:
        _check_frequencies(tensor, config)
        return []
    name = key
    for pattern, replacement in _ALIASES:
        if match := pattern.match(name):
            name = match.expand(replacement) + name[match.end() :]
    if fused := _QKV.match(name) or _FUSED.match(name):
        heads, head_size = config.num_attention_heads, config.attention_head_dim
        _check_rows(key, tensor, 3 * heads * head_size, f"3 x {heads} heads x {head_size}")
        parts = (
            tensor.reshape(heads, 3, head_size, *tensor.shape[1:]).unbind(1)
            if _QKV.match(name)
            else tensor.chunk(3)
        )
        return [
            (f"{fused[1]}.to_{letter}.weight", part.reshape(-1, *tensor.shape[1:]))
            for letter, part in zip("qkv", parts, strict=True)
        ]
    if halves := _GATE_AND_VALUE.match(name):
        _check_rows(key, tensor, 2 * config.ffn_dim, f"2 x ffn_dim {config.ffn_dim}")
        return [(f"{halves[1]}.ff.net.0.proj.weight", tensor.roll(config.ffn_dim, 0))]
    return [(name, tensor)]


def _check_rows(key: str, tensor: Tensor, rows: int, reason: str) -> None:
    found = tensor.shape[0] if tensor.ndim else 0
    if found != rows:
        raise ConfigError(
            f"{key} has {found} rows, and config.json needs {rows} = {reason}. Take both from one checkpoint."
        )


def _check_frequencies(found: Tensor, config: MiniMaxH3Config) -> None:
    """The model computes them itself; stored ones must say the same, up to the rounding of bfloat16."""
    exponent = torch.arange(config.rope_freq_dim, dtype=torch.float32) / config.rope_freq_dim
    wanted = config.rope_theta**-exponent
    if found.shape != wanted.shape or not torch.allclose(found.float(), wanted, rtol=2**-8, atol=0):
        raise ConfigError(
            f"{_FREQUENCIES} holds {found.numel()} numbers that are not the {wanted.numel()} frequencies of rope_theta "
            f"{config.rope_theta} and rope_freq_dim {config.rope_freq_dim}. Take weights and config.json from one "
            "checkpoint."
        )
