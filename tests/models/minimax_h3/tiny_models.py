"""Small MiniMax-H3 models with seeded weights that are far from zero, ours and diffusers', and sequences for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor, nn

from omni_attn.backends.metadata import VideoLayout
from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from omni_attn.models.minimax_h3.loading import keeps_float32
from omni_attn.models.minimax_h3.model import MiniMaxH3Model

# As in the real one, heads times head size is another number than the hidden size, and not all of a head turns.
BASE: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "hidden_size": 48,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "ffn_dim": 80,
    "in_channels": 6,
    "audio_in_channels": 10,
    "patch_size": (1, 2, 2),
    "text_dim": 40,
    "freq_dim": 16,
    "time_embed_hidden_dim": 56,
    "time_embed_dim": 32,
    "rope_freq_dim": 4,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "qk_norm_eps": 1e-5,
    "final_norm_eps": 1e-5,
}
REAL: dict[str, Any] = {
    "num_attention_heads": 56,
    "attention_head_dim": 128,
    "hidden_size": 5376,
    "num_layers": 50,
    "num_refiner_layers": 2,
    "ffn_dim": 14336,
    "in_channels": 24,
    "audio_in_channels": 32,
    "patch_size": (1, 2, 2),
    "text_dim": 5120,
    "freq_dim": 256,
    "time_embed_hidden_dim": 5376,
    "time_embed_dim": 2688,
    "rope_freq_dim": 16,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "qk_norm_eps": 1e-5,
    "final_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Kind:
    """A packed sequence: text, condition video, condition audio, target audio, target video, in this order."""

    grid: tuple[int, int, int] = (2, 3, 4)
    text: int = 5
    condition_video: int = 0
    condition_audio: int = 0
    audio: int = 6

    @property
    def segments(self) -> tuple[int, ...]:
        return (self.text, self.condition_video, self.condition_audio, self.audio)

    @property
    def rows(self) -> int:
        return sum(self.segments) + prod(self.grid)

    @property
    def layout(self) -> VideoLayout:
        return VideoLayout(self.segments, (self.grid,), self.rows)


KINDS = {
    "t2va": Kind(),
    "fl2va": Kind(condition_video=12),
    "ref2va": Kind(condition_video=7, condition_audio=8),
    "no audio": Kind(audio=0),
}


def config_of(**changes: Any) -> MiniMaxH3Config:
    return MiniMaxH3Config(**(BASE | changes))


def seed_weights(model: nn.Module, seed: int = 0) -> None:
    """Fresh transformers start with small or zero weights, which would hide a wrong order of parts."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)


def build_reference() -> MiniMaxH3Transformer3DModel:
    reference = MiniMaxH3Transformer3DModel(**BASE).eval()
    seed_weights(reference)
    return reference


def build_model(**changes: Any) -> MiniMaxH3Model:
    model = MiniMaxH3Model(config_of(**changes)).eval()
    seed_weights(model)
    return model


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if keeps_float32(name) else dtype)


def build_inputs(
    kind: str | Kind = "fl2va", *, batch: int = 2, padded_len: int | None = None
) -> dict[str, Tensor]:
    """Arguments of one call; the second row of the text is one that a text encoder makes of a picture (tag 0)."""
    sequence = KINDS[kind] if isinstance(kind, str) else kind
    generator = torch.Generator().manual_seed(1)
    text, condition_video, condition_audio, audio = sequence.segments
    video = prod(sequence.grid)
    tags = [1] * text + [0] * condition_video + [2] * (condition_audio + audio) + [0] * video
    tags[1] = 0
    # Four times that differ: condition video and audio, target audio, target video with the text.
    times = [1] * text + [2] * condition_video + [3] * condition_audio + [0] * audio + [1] * video
    padding = 0 if padded_len is None else padded_len - sequence.rows
    places = torch.arange(sequence.rows).split([text, condition_video, condition_audio, audio, video])

    def noise(rows: int, channels: int) -> Tensor:
        return torch.randn(batch, rows, channels, generator=generator)

    return {
        "hidden_states": noise(condition_video + video, BASE["in_channels"] * 4),
        "audio_hidden_states": noise(condition_audio + audio, BASE["audio_in_channels"]),
        "encoder_hidden_states": noise(text, BASE["text_dim"]),
        "timestep": torch.tensor([0.25, 0.5, 0.999, 1.0]),
        "timestep_indices": torch.tensor(times + [0] * padding),
        "token_tags": torch.tensor(tags + [-1] * padding),
        "position_ids": torch.rand(sequence.rows + padding, 3, dtype=torch.float64, generator=generator) * 40,
        "video_indices": torch.cat([places[1], places[4]]),
        "audio_indices": torch.cat([places[2], places[3]]),
        "text_indices": places[0],
    }


def shuffled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same rows at other places of the sequence: rows of a kind need not lie together."""
    order = torch.randperm(inputs["token_tags"].shape[0], generator=torch.Generator().manual_seed(2))
    places = order.argsort()
    moved = {name: inputs[name][order] for name in ("timestep_indices", "token_tags", "position_ids")}
    moved |= {name: places[inputs[name]] for name in ("video_indices", "audio_indices", "text_indices")}
    return inputs | moved
