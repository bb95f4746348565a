"""Text prompts, and the keyframes beside them, to what MiniMax-H3 reads: a hidden state of Qwen3-VL.

A prompt goes in as it is, without a chat template. Before it each keyframe is shown as "<Picture 1>: " and the picture;
rows of the picture are tagged as video. Facts: `modular_pipelines/minimax_h3/encoders.py` in diffusers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import load_part
from omni_attn.models.minimax_h3.conditions import Prompt
from omni_attn.models.minimax_h3.sequence import TEXT_TAG, VIDEO_TAG
from omni_attn.models.runtime import import_extra

_LAYER = 50  # whose output the model was trained on; the state behind the last layer is normed, and another


@torch.inference_mode()
def encode_prompt(
    folder: Path,
    prompt: str,
    pictures: Sequence[Any],
    text_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Prompt:
    """The prompt's embeddings, [1, N, E] float32 on the CPU, and the tags of its rows.

    The encoder is loaded from the folder's text_encoder/ and released again: it is as large as the transformer.

    Args:
        folder: holds text_encoder/ (a transformers Qwen3VLForConditionalGeneration), tokenizer/ and, for pictures,
            processor/.
        prompt: not empty.
        pictures: Pillow's, at the size of the video, in the order of the keyframes.
        text_dim: features that the transformer reads.
        device: where the encoder runs.
        dtype: what it runs in.

    Raises:
        ConfigError: a part cannot be loaded, has too few layers or other features.
        MissingExtraError: transformers is not installed.
    """
    transformers = import_extra("transformers", "Encoding a text prompt")
    tokenizer = load_part(transformers.AutoTokenizer.from_pretrained, folder / "tokenizer")
    loader = transformers.Qwen3VLForConditionalGeneration.from_pretrained
    encoder = load_part(loader, folder / "text_encoder", dtype=dtype)
    _check_encoder(encoder, text_dim, folder / "text_encoder")
    seen: dict[str, Tensor] = {}
    patches: list[int] = []
    if pictures:
        processor = load_part(transformers.AutoImageProcessor.from_pretrained, folder / "processor")
        seen = dict(processor(images=list(pictures), return_tensors="pt"))
        seen["pixel_values"] = seen["pixel_values"].to(dtype)
        patches = [int(grid.prod()) // processor.merge_size**2 for grid in seen["image_grid_thw"]]
    shown = _present(tokenizer, prompt, patches)
    inputs = {
        "input_ids": torch.tensor([shown.token_ids]),
        "attention_mask": torch.ones(1, len(shown.token_ids), dtype=torch.int64),
        "mm_token_type_ids": torch.tensor([shown.is_pixels], dtype=torch.int64),
        **seen,
    }
    model = encoder.to(device).eval().model
    on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
    states = model(**on_device, use_cache=False, output_hidden_states=True).hidden_states
    embeds: Tensor = states[_LAYER].float().cpu()
    return Prompt(embeds, torch.tensor(shown.tags))


def _check_encoder(encoder: Any, text_dim: int, folder: Path) -> None:
    config = encoder.config.text_config
    if config.num_hidden_layers <= _LAYER:
        raise ConfigError(
            f"{folder}: has {config.num_hidden_layers} layers, and the transformer reads the state behind layer "
            f"{_LAYER} of more. Take text_encoder/ from a MiniMax-H3 checkpoint."
        )
    if config.hidden_size != text_dim:
        raise ConfigError(
            f"{folder}: gives {config.hidden_size} features, and the transformer reads {text_dim}. Take both from one "
            "checkpoint."
        )


@dataclass(frozen=True)
class _Presentation:
    """What the encoder is shown, token by token: its id, the transformer's tag, and whether pixels take its place."""

    token_ids: list[int]
    tags: list[int]
    is_pixels: list[bool]


def _present(tokenizer: Any, prompt: str, patches: Sequence[int]) -> _Presentation:
    """Keyframes, of which each takes so many patches, and the prompt behind them."""
    shown = _Presentation([], [], [])

    def add(ids: list[int], tag: int, is_pixels: bool = False) -> None:
        shown.token_ids.extend(ids)
        shown.tags.extend([tag] * len(ids))
        shown.is_pixels.extend([is_pixels] * len(ids))

    def add_text(text: str) -> None:
        add(tokenizer(text, add_special_tokens=False)["input_ids"], TEXT_TAG)

    start, pad, end = (
        tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "image_pad", "vision_end")
    )
    for number, count in enumerate(patches, 1):
        add_text(f"<Picture {number}>: ")
        add([start], VIDEO_TAG)
        add([pad] * count, VIDEO_TAG, is_pixels=True)
        add([end], VIDEO_TAG)
    add_text(prompt)
    return shown
