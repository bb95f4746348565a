"""What a Wan transformer is made of, and the published configurations by name.

Field names are those of the `config.json` that diffusers writes beside the weights. This module imports no
torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from omni_attn.calibration import CALIBRATION_SECTION
from omni_attn.config.names import nearest
from omni_attn.errors import ConfigError

TEXT_TOKENS = 512  # prompts are cut or zero-padded to this length; padding rows are attended
CLIP_TOKENS = 257  # one picture through CLIP ViT-H/14: a class token and 16 x 16 patches

Grid = tuple[int, int, int]  # frames, height, width in tokens

# What diffusers leaves out of the config.json of a checkpoint saved before the key existed.
_ABSENT_IN_OLDER_FILES: Mapping[str, Any] = MappingProxyType(
    {"image_dim": None, "added_kv_proj_dim": None, "pos_embed_seq_len": None, "rope_max_seq_len": 1024}
)


@dataclass(frozen=True, kw_only=True)
class WanConfig:
    """Parameters of one Wan transformer. There are no defaults: a model is described whole.

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
        self, grid: Grid, *, text_tokens: int = TEXT_TOKENS, image_tokens: int | None = None
    ) -> dict[str, tuple[int, int]]:
        """Query and key tokens of each role of this model; `image_tokens` is `num_image_tokens` if None."""
        tokens = grid[0] * grid[1] * grid[2]
        lengths = {"self": (tokens, tokens), "cross": (tokens, text_tokens)}
        if self.image_dim is not None:
            lengths["cross.image"] = (tokens, self.num_image_tokens if image_tokens is None else image_tokens)
        return lengths

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "Wan config") -> WanConfig:
        """The configuration in a parsed `config.json`.

        Keys that start with an underscore are diffusers' own notes and are ignored, except that a
        `_class_name` other than `WanTransformer3DModel` is refused. `sparse_attention_config` says nothing
        about the transformer and is read elsewhere (omni_attn.calibration). `out_channels: null` means in_channels,
        as in diffusers.

        Args:
            values: the parsed file.
            source: where it came from, for error texts.

        Raises:
            ConfigError: unknown or missing keys, values that are not supported; all problems at once.
        """
        class_name = values.get("_class_name", "WanTransformer3DModel")
        if class_name != "WanTransformer3DModel":
            raise ConfigError(
                f"{source}: _class_name is {class_name!r}, and only 'WanTransformer3DModel' is a Wan "
                "transformer. Point at the folder of a plain text- or image-to-video transformer."
            )
        fields = [field.name for field in dataclasses.fields(cls)]
        given = {
            key: value
            for key, value in values.items()
            if not key.startswith("_") and key != CALIBRATION_SECTION
        }
        problems = [f"{source}: {_unknown_key(key, fields)}" for key in given if key not in fields]
        complete = {**_ABSENT_IN_OLDER_FILES, **{key: given[key] for key in given if key in fields}}
        problems += [
            f"{source}: {key} is missing. Add it: a Wan transformer has no default."
            for key in fields
            if key not in complete
        ]
        if problems:
            raise ConfigError(*problems)
        if isinstance(complete["patch_size"], list):
            complete["patch_size"] = tuple(complete["patch_size"])
        if complete["out_channels"] is None:
            complete["out_channels"] = complete["in_channels"]
        try:
            return cls(**complete)
        except ConfigError as error:
            raise ConfigError(*(f"{source}: {problem}" for problem in error.problems)) from None


def _unknown_key(key: str, fields: list[str]) -> str:
    guess = nearest(key, fields)
    hint = f"Did you mean {guess!r}?" if guess else f"Known keys: {', '.join(fields)}."
    return f"{key}: unknown key. {hint}"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _type_problems(config: WanConfig) -> list[str]:
    problems = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        match field.name:
            case "patch_size":
                fits = (
                    isinstance(value, tuple) and len(value) == 3 and all(_is_int(p) and p > 0 for p in value)
                )
                wanted = "three positive integers (frames, height, width)"
            case "cross_attn_norm":
                fits, wanted = isinstance(value, bool), "true or false"
            case "qk_norm":
                fits = value == "rms_norm_across_heads"
                wanted = "'rms_norm_across_heads', the only one Wan checkpoints use"
            case "eps":
                fits = isinstance(value, float) and 0 < value < 1
                wanted = "a number between 0 and 1"
            case "image_dim" | "added_kv_proj_dim" | "pos_embed_seq_len":
                fits, wanted = value is None or (_is_int(value) and value > 0), "a positive integer or null"
            case _:
                fits, wanted = _is_int(value) and value > 0, "a positive integer"
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


@dataclass(frozen=True, kw_only=True)
class WanPreset:
    """A published Wan pipeline: its transformer(s), and what the pipeline around them must know.

    `boundary_ratio` is the fraction of the 1000 training steps from which the high-noise expert works (None:
    one expert). `expand_timesteps`: every token has its own timestep (TI2V). `flow_shift` is the scheduler's
    shift. `vae_spatial` and `vae_temporal` are pixels and frames per latent pixel and latent frame. An
    image-conditioned model with 36 input channels reads [latent 16, mask 4, condition latent 16] in that
    order.
    """

    name: str
    transformer: WanConfig
    boundary_ratio: float | None
    expand_timesteps: bool
    vae_spatial: int
    vae_temporal: int
    flow_shift: float

    @property
    def num_experts(self) -> int:
        return 1 if self.boundary_ratio is None else 2


def _wan(
    heads: int, ffn_dim: int, layers: int, *, in_channels: int = 16, out_channels: int = 16
) -> WanConfig:
    return WanConfig(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=128,
        in_channels=in_channels,
        out_channels=out_channels,
        text_dim=4096,
        freq_dim=256,
        ffn_dim=ffn_dim,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        eps=1e-6,
        image_dim=None,
        added_kv_proj_dim=None,
        rope_max_seq_len=1024,
        pos_embed_seq_len=None,
    )


def _preset(
    name: str,
    transformer: WanConfig,
    *,
    flow_shift: float,
    boundary_ratio: float | None = None,
    expand_timesteps: bool = False,
    vae_spatial: int = 8,
) -> WanPreset:
    return WanPreset(
        name=name,
        transformer=transformer,
        boundary_ratio=boundary_ratio,
        expand_timesteps=expand_timesteps,
        vae_spatial=vae_spatial,
        vae_temporal=4,
        flow_shift=flow_shift,
    )


_T2V_14B = _wan(40, 13824, 40)
_I2V_A14B = _wan(40, 13824, 40, in_channels=36)  # 2.2 conditions on channels alone
_I2V_14B = dataclasses.replace(_I2V_A14B, image_dim=1280, added_kv_proj_dim=5120)
_FLF2V_14B = dataclasses.replace(_I2V_14B, pos_embed_seq_len=2 * CLIP_TOKENS)
_TINY = dataclasses.replace(_wan(4, 256, 4), attention_head_dim=32, text_dim=64, freq_dim=64)

# Shifts are those of 480p, except the first-last-frame and A14B models, which were published for 720p.
WAN_PRESETS: Mapping[str, WanPreset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            _preset("wan2.1-t2v-1.3b", _wan(12, 8960, 30), flow_shift=3.0),
            _preset("wan2.1-t2v-14b", _T2V_14B, flow_shift=3.0),
            _preset("wan2.1-i2v-14b", _I2V_14B, flow_shift=3.0),
            _preset("wan2.1-flf2v-14b", _FLF2V_14B, flow_shift=5.0),
            _preset("wan2.2-t2v-a14b", _T2V_14B, flow_shift=12.0, boundary_ratio=0.875),
            _preset("wan2.2-i2v-a14b", _I2V_A14B, flow_shift=5.0, boundary_ratio=0.9),
            _preset(
                "wan2.2-ti2v-5b",
                _wan(24, 14336, 30, in_channels=48, out_channels=48),
                flow_shift=5.0,
                expand_timesteps=True,
                vae_spatial=16,
            ),
            _preset("wan-tiny", _TINY, flow_shift=3.0),
        )
    }
)
