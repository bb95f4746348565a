"""A causal transformer's config.json: parameters of a Wan transformer, and the chunks that it was trained with.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_attn.config import WanCausalGenerationConfig
from omni_attn.errors import ConfigError
from omni_attn.models.config_file import is_count
from omni_attn.models.wan.config import WanConfig

# What a transformer's config.json may say of chunks. A window counts its sink there, and -1 is no window; the size of a
# cache is what a request needs here.
_CHUNK_KEYS = ("num_frames_per_block", "local_attn_size", "sink_size", "sliding_window_num_frames")
_CAUSAL_TRANSFORMER = "CausalWanTransformer3DModel"


def read_causal_config(values: Mapping[str, Any], *, source: str) -> WanConfig:
    """The transformer's parameters in a parsed config.json that may also tell of chunks; see WanConfig.from_dict."""
    plain = {key: value for key, value in values.items() if key not in _CHUNK_KEYS}
    if plain.get("_class_name") == _CAUSAL_TRANSFORMER:
        del plain["_class_name"]
    return WanConfig.from_dict(plain, source=source)


def check_causal(config: WanConfig, source: str = "this transformer") -> None:
    """Nothing if a transformer of this kind can make its video chunk by chunk.

    Raises:
        ConfigError: it cannot.
    """
    problems = []
    if config.image_dim is not None or config.in_channels != config.out_channels:
        problems.append(
            f"{source} reads {config.in_channels} channels and gives {config.out_channels}, with image_dim "
            f"{config.image_dim}: it continues pictures that lie beside the whole video. Choose a text-to-video one."
        )
    if config.patch_size[0] != 1:
        problems.append(
            f"{source} has patches of {config.patch_size[0]} latent frames, and chunks are counted in tokens of one. "
            "Choose a transformer with patch_size (1, h, w)."
        )
    if problems:
        raise ConfigError(*problems)


def trained_chunks(values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """What a parsed config.json says of chunks, in the terms of CachePlan; nothing if it says nothing.

    Raises:
        ConfigError: a number is none that there can be.
    """
    frames, window, sink = (values.get(key) for key in _CHUNK_KEYS[:3])
    problems = []
    if frames is not None and not is_count(frames):
        problems.append(f"num_frames_per_block is {frames!r}; it must be a positive integer.")
    if sink is not None and sink != 0 and not is_count(sink):
        problems.append(f"sink_size is {sink!r}; it must be 0 or a positive integer.")
    if window is not None and window != -1 and not is_count(window):
        problems.append(f"local_attn_size is {window!r}; it must be a positive integer, or -1 for no window.")
    if problems:
        raise ConfigError(*(f"{source}: {problem}" for problem in problems))
    has_window = window not in (None, -1)
    if frames is None and not has_window:
        return {}
    return {
        "chunk_frames": frames or WanCausalGenerationConfig.model_fields["chunk_frames"].default,
        "window_frames": window - (sink or 0) if has_window and window is not None else None,
        "sink_frames": sink or 0 if has_window else 0,
    }
