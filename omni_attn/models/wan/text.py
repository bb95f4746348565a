"""Text prompts to embeddings, with the text encoder and tokenizer of a checkpoint folder."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import torch

from omni_attn.models.checkpoint import load_part
from omni_attn.models.runtime import import_extra
from omni_attn.models.wan.conditions import PromptEmbeddings
from omni_attn.models.wan.config import TEXT_TOKENS


@torch.inference_mode()
def encode_prompts(
    folder: Path, prompt: str, negative_prompt: str | None, device: torch.device, dtype: torch.dtype
) -> PromptEmbeddings:
    """Embeddings of both prompts, [1, 512, E] float32 on the CPU; a negative prompt of None is not encoded.

    The encoder is loaded from the folder's text_encoder/ and released again: it is larger than many a transformer.

    Args:
        folder: holds text_encoder/ (a transformers UMT5EncoderModel) and tokenizer/.
        prompt: any text; cut to 512 tokens.
        negative_prompt: may be empty, which is what guidance compares with when a person gives none.
        device: where the encoder runs.
        dtype: what it runs in.

    Raises:
        ConfigError: tokenizer or encoder cannot be loaded.
    """
    transformers = import_extra("transformers", "Encoding a text prompt")
    tokenizer = load_part(transformers.AutoTokenizer.from_pretrained, folder / "tokenizer")
    encoder = load_part(transformers.UMT5EncoderModel.from_pretrained, folder / "text_encoder", dtype=dtype)
    encoder = encoder.to(device).eval()
    positive = _encode(tokenizer, encoder, prompt, device)
    negative = None if negative_prompt is None else _encode(tokenizer, encoder, negative_prompt, device)
    return PromptEmbeddings(positive, negative)


def _encode(tokenizer: Any, encoder: Any, prompt: str, device: torch.device) -> torch.Tensor:
    """[1, 512, E] float32: hidden states of the real tokens, and zeros where the prompt was padded.

    Padding is attended by the transformer, and Wan was trained with zeros there.
    """
    tokens = tokenizer(
        [clean_prompt(prompt)],
        padding="max_length",
        max_length=TEXT_TOKENS,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    mask = tokens.attention_mask.to(device)
    states = encoder(tokens.input_ids.to(device), mask).last_hidden_state
    embeddings: torch.Tensor = torch.where(mask[:, :, None] > 0, states.float(), 0.0)
    return embeddings.cpu()


def clean_prompt(prompt: str) -> str:
    """The prompt as Wan's encoder was trained to see it: mended encoding, no HTML entities, single spaces.

    ftfy mends wrongly decoded characters and straightens quotes (diffusers' WanPipeline, prompt_clean).
    """
    ftfy = import_extra("ftfy", "Encoding a text prompt")
    mended = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return " ".join(mended.split())
