"""What a Wan transformer is made of, and the published configurations by name.

Field names are those of the `config.json` that diffusers writes beside the weights; `gate_compress` is ours. This
module imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from omni_attn.errors import ConfigError
from omni_attn.models.config_file import build_record, complete_values, is_count

TEXT_TOKENS = 512  # prompts are cut or zero-padded to this length; padding rows are attended
CLIP_TOKENS = 257  # one picture through CLIP ViT-H/14: a class token and 16 x 16 patches

Grid = tuple[int, int, int]  # frames, height, width in tokens

_OURS = "gate_compress"
# What a config.json leaves out: keys younger than the checkpoint, and what only the weights tell.
_ABSENT_IN_FILES: Mapping[str, Any] = MappingProxyType(
    {
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
        "rope_max_seq_len": 1024,
        _OURS: False,
    }
)


@dataclass(frozen=True, kw_only=True)
class WanConfig:
    """Parameters of one Wan transformer. What diffusers knows has no defaults: a model is described whole.

    `gate_compress`: self-attention has learned gates of video sparse attention (FastWan). Files do not say so, weights
    do: see `omni_attn.models.gates`.

    Raises:
        ConfigError: a value has the wrong type, is not supported, or contradicts another one; all problems at
            once.
    """

    patch_size: tuple[int, int, int]
    num_attention_heads: int
    attention_head_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int
    ffn_dim: int
    num_layers: int
    cross_attn_norm: bool
    qk_norm: str
    eps: float
    image_dim: int | None
    added_kv_proj_dim: int | None
    rope_max_seq_len: int
    pos_embed_seq_len: int | None
    gate_compress: bool = False

    def __post_init__(self) -> None:
        if problems := (_type_problems(self) or _value_problems(self)):
            raise ConfigError(*problems)

    @property
    def dim(self) -> int:
        """Width of the residual stream: heads times head size."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def num_image_tokens(self) -> int:
        """Image tokens that cross-attention reads: 0 without an image branch, 514 of two pictures."""
        if self.image_dim is None:
            return 0
        return CLIP_TOKENS if self.pos_embed_seq_len is None else self.pos_embed_seq_len

    def token_grid(self, frames: int, height: int, width: int) -> Grid:
        """Tokens of a latent of this size on each axis; they run in raster order, width fastest."""
        patch_frames, patch_height, patch_width = self.patch_size
        return frames // patch_frames, height // patch_height, width // patch_width

    def attention_lengths(
        self,
        grid: Grid,
        *,
        text_tokens: int = TEXT_TOKENS,
        image_tokens: int | None = None,
        own_tokens: int | None = None,
    ) -> dict[str, tuple[int, int]]:
        """Query and key tokens of each role of this model.

        Args:
            grid: of the whole video.
            text_tokens: keys of cross-attention.
            image_tokens: those of its image branch; `num_image_tokens` if None.
            own_tokens: of the video that one rank has, where several share it; None = all. Self-attention is among the
                whole video, and cross-attention each rank's own affair.
        """
        tokens = grid[0] * grid[1] * grid[2]
        own = tokens if own_tokens is None else own_tokens
        lengths = {"self": (tokens, tokens), "cross": (own, text_tokens)}
        if self.image_dim is not None:
            lengths["cross.image"] = (own, self.num_image_tokens if image_tokens is None else image_tokens)
        return lengths

    def to_diffusers(self) -> dict[str, Any]:
        """Arguments of diffusers' WanTransformer3DModel, which has no gates."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != _OURS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "Wan config") -> WanConfig:
        """The configuration in a parsed `config.json`.

        See `omni_attn.models.config_file` for the keys that are no parameters. `out_channels: null` means in_channels,
        as in diffusers. `gate_compress` may be there; without it, weights decide.

        Args:
            values: the parsed file.
            source: where it came from, for error texts.

        Raises:
            ConfigError: unknown or missing keys, values that are not supported; all problems at once.
        """
        complete = complete_values(
            cls,
            values,
            class_name="WanTransformer3DModel",
            model="a Wan transformer",
            where="Point at the folder of a plain text- or image-to-video transformer.",
            absent=_ABSENT_IN_FILES,
            source=source,
        )
        if complete["out_channels"] is None:
            complete["out_channels"] = complete["in_channels"]
        return build_record(cls, complete, source)


def _type_problems(config: WanConfig) -> list[str]:
    problems = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        match field.name:
            case "patch_size":
                fits = isinstance(value, tuple) and len(value) == 3 and all(map(is_count, value))
                wanted = "three positive integers (frames, height, width)"
            case "cross_attn_norm" | "gate_compress":
                fits, wanted = isinstance(value, bool), "true or false"
            case "qk_norm":
                fits = value == "rms_norm_across_heads"
                wanted = "'rms_norm_across_heads', the only one Wan checkpoints use"
            case "eps":
                fits = isinstance(value, float) and 0 < value < 1
                wanted = "a number between 0 and 1"
            case "image_dim" | "added_kv_proj_dim" | "pos_embed_seq_len":
                fits, wanted = value is None or is_count(value), "a positive integer or null"
            case _:
                fits, wanted = is_count(value), "a positive integer"
        if not fits:
            problems.append(f"{field.name} is {value!r}; it must be {wanted}.")
    return problems


def _value_problems(config: WanConfig) -> list[str]:
    problems = []
    if config.attention_head_dim % 2 or config.attention_head_dim < 6:
        problems.append(
            f"attention_head_dim is {config.attention_head_dim}; rotary embedding of three axes needs an "
            "even number of at least 6."
        )
    if config.freq_dim % 2:
        problems.append(
            f"freq_dim is {config.freq_dim}; cosines and sines come in pairs, so it must be even."
        )
    if (config.image_dim is None) != (config.added_kv_proj_dim is None):
        problems.append(
            f"image_dim is {config.image_dim} and added_kv_proj_dim is {config.added_kv_proj_dim}; an image "
            "branch needs both, a model without one has neither."
        )
    elif config.added_kv_proj_dim not in (None, config.dim):
        problems.append(
            f"added_kv_proj_dim is {config.added_kv_proj_dim}, but the image embedder gives "
            f"num_attention_heads * attention_head_dim = {config.dim} features; both must be equal."
        )
    if config.pos_embed_seq_len is not None and config.image_dim is None:
        problems.append(
            f"pos_embed_seq_len is {config.pos_embed_seq_len} without an image_dim; positions are added to "
            "image tokens only. Set it to null."
        )
    return problems
