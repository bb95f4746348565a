"""Whole Wan pipelines of diffusers, small and seeded, that can be run beside ours or saved as a checkpoint folder."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.models.wan.tiny_models import BASE, seed_weights

HEIGHT, WIDTH, FRAMES = 32, 48, 9
LATENT = (3, 4, 6)
Z = 4  # latent channels
CLIP_TOKENS = 5  # a picture of 4 x 4 pixels in patches of 2, and the class token
WORDS = ("a", "red", "fox", "jumps", "over", "the", "blue", "river", "blurry")

# Transformers of pipelines whose latents have Z channels.
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "t2v": {},
    "ti2v": {},
    "i2v": {"in_channels": 3 * Z, "image_dim": 6, "added_kv_proj_dim": 24},
    "flf2v": {
        "in_channels": 3 * Z,
        "image_dim": 6,
        "added_kv_proj_dim": 24,
        "pos_embed_seq_len": 2 * CLIP_TOKENS,
    },
    "i2v_2.2": {"in_channels": 3 * Z},
}


def build_transformer(kind: str, seed: int = 0) -> WanTransformer3DModel:
    transformer = WanTransformer3DModel(**(BASE | TRANSFORMERS[kind])).eval()
    seed_weights(transformer, seed)
    return transformer


def build_scheduler(flow_shift: float = 3.0) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    )


def build_vae() -> AutoencoderKLWan:
    torch.manual_seed(3)
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=Z,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[0.5, 0.7, 0.9, 0.6],
    ).eval()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, and an end mark, as UMT5's tokenizer has it."""
    vocabulary = {word: index for index, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def build_text_encoder() -> UMT5EncoderModel:
    torch.manual_seed(4)
    size = {"vocab_size": 3 + len(WORDS), "d_model": BASE["text_dim"], "d_kv": 8, "d_ff": 32}
    encoder = UMT5EncoderModel(UMT5Config(**size, num_layers=2, num_heads=4)).eval()
    torch.nn.init.normal_(encoder.shared.weight)
    return encoder


def build_image_encoder() -> dict[str, Any]:
    torch.manual_seed(5)
    config = CLIPVisionConfig(
        hidden_size=6,
        intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=4,
        patch_size=2,
    )
    size = {"height": 4, "width": 4}
    return {
        "image_encoder": CLIPVisionModel(config).eval(),
        "image_processor": CLIPImageProcessor(size={"shortest_edge": 4}, crop_size=size),
    }


def build_pipeline(kind: str, *, with_text: bool = False, with_vae: bool = False) -> Any:
    """diffusers' own pipeline of this kind: t2v, two_experts, ti2v, ti2v_image, i2v, flf2v, i2v_2.2."""
    parts: dict[str, Any] = {
        "tokenizer": build_tokenizer() if with_text else None,
        "text_encoder": build_text_encoder() if with_text else None,
        "vae": build_vae() if with_vae else None,
        "scheduler": build_scheduler(),
    }
    if kind in ("two_experts", "i2v_2.2"):
        base = "t2v" if kind == "two_experts" else kind
        parts |= {"transformer": build_transformer(base), "transformer_2": build_transformer(base, seed=7)}
        parts["boundary_ratio"] = 0.8
    else:
        parts["transformer"] = build_transformer(kind.removesuffix("_image"))
    parts["expand_timesteps"] = kind.startswith("ti2v")
    if kind in ("i2v", "flf2v"):
        parts |= build_image_encoder()
    is_image = kind in ("i2v", "flf2v", "i2v_2.2", "ti2v_image")
    pipeline = (WanImageToVideoPipeline if is_image else WanPipeline)(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
