"""Where a Wan pipeline comes from: a preset's name or a diffusers-format folder, described in one record.

Reads only small JSON files and the names of weights: no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from omni_attn.config import GenerationConfig
from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import stored_names
from omni_attn.models.folders import WEIGHTS, find_folder, is_listed, read_index, read_part
from omni_attn.models.gates import has_gates
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.presets import DMD_FLOW_SHIFT, WAN_PRESETS

_DMD_CLASS = "WanDMDPipeline"
PIPELINE_CLASSES = ("WanPipeline", "WanImageToVideoPipeline", _DMD_CLASS)
_VAE_CLASS = "AutoencoderKLWan"
_OPTIONAL_PARTS = ("text_encoder", "tokenizer", "vae", "image_encoder", "image_processor")


@dataclass(frozen=True)
class VideoGeometry:
    """Sizes of one request: `latent` is (frames, height, width) of the latents, `grid` the same in tokens."""

    num_frames: int
    height: int
    width: int
    latent: tuple[int, int, int]
    grid: tuple[int, int, int]

    @property
    def num_tokens(self) -> int:
        frames, height, width = self.grid
        return frames * height * width


@dataclass(frozen=True, kw_only=True)
class WanSource:
    """A Wan pipeline before anything is built.

    `experts` holds one transformer's parameters, or two: high noise, then low noise. `folder` is None for a preset,
    and `parts` names what a folder has beside transformers and scheduler. `flow_shift` is None for a folder whose
    scheduler knows it. `is_dmd`: distilled to a few steps (FastWan), see `omni_attn.models.wan.dmd`.
    """

    name: str
    experts: tuple[WanConfig, ...]
    boundary_ratio: float | None
    expand_timesteps: bool
    vae_spatial: int
    vae_temporal: int
    flow_shift: float | None
    is_dmd: bool = False
    folder: Path | None = None
    parts: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def transformer(self) -> WanConfig:
        return self.experts[0]

    @property
    def latent_channels(self) -> int:
        return self.transformer.out_channels

    @property
    def condition_channels(self) -> int:
        """Channels concatenated behind the noisy latent: mask and condition latent; 0 without them."""
        return self.transformer.in_channels - self.transformer.out_channels

    @property
    def needs_image(self) -> bool:
        """True for models that cannot run without an image condition (TI2V can)."""
        return self.condition_channels > 0 or self.transformer.image_dim is not None

    @property
    def num_image_tokens(self) -> int:
        return self.transformer.num_image_tokens

    @property
    def has_last_frame(self) -> bool:
        """True for first-and-last-frame models: image tokens of two pictures."""
        return self.transformer.pos_embed_seq_len is not None

    def geometry(self, generation: GenerationConfig) -> VideoGeometry:
        """Latent and token grid of a request.

        Raises:
            ConfigError: a size is not a multiple of what VAE and patches need; all of them at once.
        """
        patch_frames, patch_height, patch_width = self.transformer.patch_size
        frame_step = (
            self.vae_temporal * patch_frames
        )  # (frames - 1) / vae_temporal + 1 latent frames, in whole patches
        frame_offset = (1 - self.vae_temporal * (patch_frames - 1)) % frame_step
        problems = [
            _size_problem(self.name, "height", generation.height, self.vae_spatial * patch_height, 0),
            _size_problem(self.name, "width", generation.width, self.vae_spatial * patch_width, 0),
            _size_problem(self.name, "num_frames", generation.num_frames, frame_step, frame_offset),
        ]
        if found := [problem for problem in problems if problem]:
            raise ConfigError(*found)
        latent = (
            (generation.num_frames - 1) // self.vae_temporal + 1,
            generation.height // self.vae_spatial,
            generation.width // self.vae_spatial,
        )
        grid = self.transformer.token_grid(*latent)
        return VideoGeometry(generation.num_frames, generation.height, generation.width, latent, grid)

    def attention_lengths(self, generation: GenerationConfig) -> dict[str, tuple[int, int]]:
        """Role -> (query tokens, key tokens) for every kind of attention call in these transformers."""
        return self.transformer.attention_lengths(self.geometry(generation).grid)


def load_source(model: str) -> WanSource:
    """The description of a preset, or of a checkpoint folder.

    Raises:
        ConfigError: neither; or a folder whose files are missing, broken or of another kind of model.
    """
    if model in WAN_PRESETS:
        preset = WAN_PRESETS[model]
        return WanSource(
            name=preset.name,
            experts=(preset.transformer,) * preset.num_experts,
            boundary_ratio=preset.boundary_ratio,
            expand_timesteps=preset.expand_timesteps,
            vae_spatial=preset.vae_spatial,
            vae_temporal=preset.vae_temporal,
            flow_shift=preset.flow_shift,
            is_dmd=preset.is_dmd,
        )
    return _load_folder(find_folder(model, WAN_PRESETS))


def _load_folder(folder: Path) -> WanSource:
    index = read_index(folder, "WanModel")
    class_name = index.get("_class_name")
    if class_name == "WanCausalDMDPipeline":
        raise ConfigError(
            f"{folder / 'model_index.json'}: a {class_name} makes a video piece by piece with a key-value cache, which "
            f"this pipeline does not. Use a {_DMD_CLASS} or WanPipeline checkpoint."
        )
    if class_name not in PIPELINE_CLASSES:
        raise ConfigError(
            f"{folder / 'model_index.json'}: _class_name is {class_name!r}; this pipeline runs "
            f"{', '.join(PIPELINE_CLASSES)}. Choose such a checkpoint."
        )
    is_dmd = class_name == _DMD_CLASS
    names = ["transformer"] + (["transformer_2"] if is_listed(index, "transformer_2") else [])
    experts = tuple(_read_expert(folder / name) for name in names)
    if is_dmd and len(experts) == 2:
        raise ConfigError(
            f"{folder / 'model_index.json'}: a {_DMD_CLASS} with transformer_2, and how two distilled experts share "
            "three steps is not known here. Use a distilled checkpoint with one transformer."
        )
    if not is_dmd:  # whose sampler is its own
        read_part(folder / "scheduler" / "scheduler_config.json")
    boundary_ratio = index.get("boundary_ratio")
    _check_experts(folder, experts, boundary_ratio)
    parts = frozenset(part for part in _OPTIONAL_PARTS if is_listed(index, part) and (folder / part).is_dir())
    vae_spatial, vae_temporal, notes = _vae_factors(folder, parts, experts[0])
    return WanSource(
        name=str(folder),
        experts=experts,
        boundary_ratio=boundary_ratio,
        expand_timesteps=bool(index.get("expand_timesteps", False)),
        vae_spatial=vae_spatial,
        vae_temporal=vae_temporal,
        flow_shift=DMD_FLOW_SHIFT if is_dmd else None,
        is_dmd=is_dmd,
        folder=folder,
        parts=parts,
        notes=notes,
    )


def _read_expert(folder: Path) -> WanConfig:
    """A transformer's parameters: those in config.json, and whether its weights have gates."""
    values = read_part(folder / "config.json")
    config = WanConfig.from_dict(values, source=str(folder / "config.json"))
    if "gate_compress" in values:
        return config
    return replace(config, gate_compress=has_gates(stored_names(folder, WEIGHTS)))


def _check_experts(folder: Path, experts: tuple[WanConfig, ...], boundary_ratio: float | None) -> None:
    is_number = isinstance(boundary_ratio, (int, float)) and not isinstance(boundary_ratio, bool)
    if boundary_ratio is not None and not (is_number and 0 <= boundary_ratio <= 1):
        raise ConfigError(
            f"{folder / 'model_index.json'}: boundary_ratio is {boundary_ratio!r}, and must be a number from 0 to 1, "
            "or null. Correct it, or fetch the checkpoint again."
        )
    if (boundary_ratio is not None) != (len(experts) == 2):
        raise ConfigError(
            f"{folder / 'model_index.json'}: boundary_ratio is {boundary_ratio} with {len(experts)} transformer(s). "
            "Two experts need both transformer_2/ and a boundary_ratio, one expert has neither; complete the folder."
        )
    if len(experts) == 2 and (experts[0].in_channels, experts[0].out_channels) != (
        experts[1].in_channels,
        experts[1].out_channels,
    ):
        raise ConfigError(
            f"{folder}: transformer reads {experts[0].in_channels} channels and gives {experts[0].out_channels}, "
            f"transformer_2 {experts[1].in_channels} and {experts[1].out_channels}. Experts of one pipeline share "
            "both; take the two folders from the same checkpoint."
        )


def _vae_factors(
    folder: Path, parts: frozenset[str], transformer: WanConfig
) -> tuple[int, int, tuple[str, ...]]:
    """Pixels and frames per latent pixel and frame, from vae/config.json or else from the latent channels."""
    if "vae" in parts:
        config = read_part(folder / "vae" / "config.json")
        if (class_name := config.get("_class_name", _VAE_CLASS)) != _VAE_CLASS:
            raise ConfigError(
                f"{folder / 'vae' / 'config.json'}: _class_name is {class_name!r}, and latents of Wan are decoded by "
                f"{_VAE_CLASS}. Take vae/ from a Wan checkpoint."
            )
        factors = [config.get("scale_factor_spatial", 8), config.get("scale_factor_temporal", 4)]
        if not all(isinstance(factor, int) and factor > 0 for factor in factors):
            raise ConfigError(
                f"{folder / 'vae' / 'config.json'}: scale_factor_spatial and scale_factor_temporal are {factors}, and "
                "must be positive integers. Fetch or save the checkpoint again."
            )
        return factors[0], factors[1], ()
    spatial = (
        16 if transformer.out_channels == 48 else 8
    )  # the two Wan VAEs: 48 channels at 1/16, 16 channels at 1/8
    note = (
        f"{folder} has no vae/: sizes are computed for a VAE with {spatial} pixels and 4 frames per latent "
        f"({transformer.out_channels} latent channels), and no pixels can be decoded"
    )
    return spatial, 4, (note,)


def _size_problem(model: str, name: str, value: int, step: int, offset: int) -> str | None:
    """None if the value is positive and step * n + offset, else the error text with the nearest sizes that are."""
    if (value - offset) % step == 0 and value > 0:
        return None
    below = (value - offset) // step * step + offset
    choices = [size for size in (below, below + step) if size > 0]
    rule = f"a multiple of {step}" if offset == 0 else f"a multiple of {step} plus {offset}"
    return (
        f"generation.{name}: {value} does not fit {model}, which needs {rule}. "
        f"Nearest: {' or '.join(map(str, choices))}."
    )
