"""What a MiniMax-H3 transformer is made of.

Field names are those of the `config.json` that diffusers writes beside the weights; `gate_compress` and `adaln_rank`
are what other checkpoints add. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from omni_attn.errors import ConfigError
from omni_attn.models.config_file import build_record, complete_values, is_count
from omni_attn.models.minimax_h3.sizes import token_grid

Grid = tuple[int, int, int]  # frames, height, width in tokens

REFINER_ROLE = "minimax_h3.token_refiner"
NUM_MODALITIES = 3  # video, text, audio: a row's tag in the modulation tables

_OURS: Mapping[str, Any] = {"gate_compress": False, "adaln_rank": None}
_NUMBERS_BELOW_ONE = ("norm_eps", "qk_norm_eps", "final_norm_eps")


@dataclass(frozen=True, kw_only=True)
class MiniMaxH3Config:
    """Parameters of one transformer. What diffusers knows has no defaults: a model is described whole.

    Attributes:
        hidden_size: width of the residual stream; heads times head size is another, larger number.
        rope_freq_dim: frequencies of each of three axes; `6 * rope_freq_dim` channels of a head turn.
        gate_compress: attention of the main blocks has learned gates of video sparse attention. Files do not say so,
            weights do.
        adaln_rank: modulation is projected from this many numbers, which a shared basis makes of the embedded time;
            None = from the embedded time itself.

    Raises:
        ConfigError: a value has the wrong type, is not supported, or contradicts another one; all problems at once.
    """

    num_attention_heads: int
    attention_head_dim: int
    hidden_size: int
    num_layers: int
    num_refiner_layers: int
    ffn_dim: int
    in_channels: int
    audio_in_channels: int
    patch_size: tuple[int, int, int]
    text_dim: int
    freq_dim: int
    time_embed_hidden_dim: int
    time_embed_dim: int
    rope_freq_dim: int
    rope_theta: float
    norm_eps: float
    qk_norm_eps: float
    final_norm_eps: float
    gate_compress: bool = False
    adaln_rank: int | None = None

    def __post_init__(self) -> None:
        if problems := (_type_problems(self) or _value_problems(self)):
            raise ConfigError(*problems)

    @property
    def inner_dim(self) -> int:
        """Width of queries, keys and values: heads times head size."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def patch_dim(self) -> int:
        """Numbers in a row of video: channels of a latent times what a patch covers."""
        return self.in_channels * prod(self.patch_size)

    @property
    def adaln_dim(self) -> int:
        """Numbers that modulation is projected from."""
        return self.time_embed_dim if self.adaln_rank is None else self.adaln_rank

    def token_grid(self, frames: int, height: int, width: int) -> Grid:
        """Tokens of a latent of this size on each axis; they run in raster order, width fastest.

        Raises:
            MetadataError: an axis is no multiple of the patch.
        """
        return token_grid((frames, height, width), self.patch_size)

    def attention_lengths(self, rows: int, text_rows: int) -> dict[str, tuple[int, int]]:
        """Query and key tokens of each role, of a packed sequence with this many rows, padding included."""
        return {"self": (rows, rows), REFINER_ROLE: (text_rows, text_rows)}

    def to_diffusers(self) -> dict[str, Any]:
        """Arguments of diffusers' MiniMaxH3Transformer3DModel, which has neither gates nor factorised modulation."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in _OURS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "MiniMax-H3 config") -> MiniMaxH3Config:
        """The configuration in a parsed `config.json`.

        See `omni_attn.models.config_file` for the keys that are no parameters. `gate_compress` may be there; without
        it, weights decide.

        Args:
            values: the parsed file.
            source: where it came from, for error texts.

        Raises:
            ConfigError: unknown or missing keys, values that are not supported; all problems at once.
        """
        complete = complete_values(
            cls,
            values,
            class_name="MiniMaxH3Transformer3DModel",
            model="a MiniMax-H3 transformer",
            where="Point at the folder `transformer` or `transformer_ref` of a MiniMax-H3 checkpoint.",
            absent=_OURS,
            source=source,
        )
        return build_record(cls, complete, source)


def _type_problems(config: MiniMaxH3Config) -> list[str]:
    problems = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        match field.name:
            case "patch_size":
                fits = isinstance(value, tuple) and len(value) == 3 and all(map(is_count, value))
                wanted = "three positive integers (frames, height, width)"
            case "gate_compress":
                fits, wanted = isinstance(value, bool), "true or false"
            case "rope_theta":
                fits = (isinstance(value, float) or is_count(value)) and value > 1
                wanted = "a number above 1"
            case "adaln_rank":
                fits, wanted = value is None or is_count(value), "a positive integer or null"
            case name if name in _NUMBERS_BELOW_ONE:
                fits, wanted = isinstance(value, float) and 0 < value < 1, "a number between 0 and 1"
            case _:
                fits, wanted = is_count(value), "a positive integer"
        if not fits:
            problems.append(f"{field.name} is {value!r}; it must be {wanted}.")
    return problems


def _value_problems(config: MiniMaxH3Config) -> list[str]:
    problems = []
    if (turning := 6 * config.rope_freq_dim) > config.attention_head_dim:
        problems.append(
            f"rope_freq_dim is {config.rope_freq_dim}, which turns {turning} channels of a head, and "
            f"attention_head_dim is {config.attention_head_dim}: make it at most {config.attention_head_dim // 6}."
        )
    if config.freq_dim % 2:
        problems.append(
            f"freq_dim is {config.freq_dim}; cosines and sines come in pairs, so it must be even."
        )
    if config.adaln_rank is not None and config.adaln_rank > config.time_embed_dim:
        problems.append(
            f"adaln_rank is {config.adaln_rank}, more than the time_embed_dim {config.time_embed_dim} it replaces."
        )
    return problems
