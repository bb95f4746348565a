"""Checkpoint folders of MiniMax-H3 as diffusers writes them, small and seeded, with encoders and VAEs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Scheduler
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.models.minimax_h3.tiny_pipelines import build_reference

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = ("a", "red", "fox", "jumps", "over", "the", "river", "<", ">", ":", "Picture", "1", "2")
TEXT_DIM = 64


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, and the marks that Qwen's tokenizer has around pictures."""
    vocabulary = {word: index for index, word in enumerate(("<unk>", "<pad>", *MARKS, *WORDS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=list(MARKS),
    )


def build_processor() -> Qwen2VLImageProcessorPil:
    """Its part for pictures: the one for videos needs torchvision."""
    return Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, min_pixels=32**2, max_pixels=96**2)


def build_text_encoder(layers: int = 51, width: int = TEXT_DIM) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(4)
    ids = {name: 2 + index for index, name in enumerate(("vision_start", "vision_end", "image", "video"))}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 2 + len(MARKS) + len(WORDS),
            "hidden_size": width,
            "intermediate_size": 64,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": width,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **{f"{name}_token_id": ids[name] for name in ids},
    )
    return Qwen3VLForConditionalGeneration(config).eval()


def build_vae() -> AutoencoderKLMiniMaxH3:
    torch.manual_seed(5)
    return AutoencoderKLMiniMaxH3(
        block_out_channels=(8, 8, 8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=32,
        latents_mean=tuple(0.01 * index for index in range(24)),
        latents_std=tuple(0.5 + 0.02 * index for index in range(24)),
    ).eval()


def build_audio_vae() -> AutoencoderKLMiniMaxH3Audio:
    torch.manual_seed(6)
    return AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        latent_dim=64,
        num_attention_heads=2,
        decoder_dim=128,
        latents_mean=[0.02 * index for index in range(32)],
        latents_std=[0.9] * 32,
    ).eval()


def build_parts(*names: str) -> dict[str, Any]:
    """The encoders and VAEs of these names."""
    makers: dict[str, Callable[[], Any]] = {
        "tokenizer": build_tokenizer,
        "processor": build_processor,
        "text_encoder": build_text_encoder,
        "vae": build_vae,
        "audio_vae": build_audio_vae,
    }
    return {name: makers[name]() for name in names}


def save_folder(
    folder: Path,
    parts: dict[str, Any] | None = None,
    *,
    index: str = "modular_model_index.json",
    class_name: str = "MiniMaxH3ModularPipeline",
    transformer: str = "transformer",
    shifts: tuple[float, float | None] = (12.0, 3.0),
    contract: dict[str, Any] | None = None,
) -> Path:
    """A folder with these parts beside transformer and schedulers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / index).write_text(json.dumps({"_class_name": class_name}))
    build_reference().save_pretrained(folder / transformer)
    for name, shift in zip(("scheduler", "audio_scheduler"), shifts, strict=True):
        if shift is not None:
            MiniMaxH3Scheduler(shift=shift).save_pretrained(folder / name)
    for name, part in (parts or {}).items():
        part.save_pretrained(folder / name)
    if contract is not None:
        (folder / "fastvideo_inference.json").write_text(json.dumps(contract))
    return folder
