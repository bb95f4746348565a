"""Where a Wan pipeline comes from: a preset's name or a diffusers-format folder, described in one record.

Reads only small JSON files and the names of weights: no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from omni_attn.config import GenerationConfig
from omni_attn.errors import ConfigError
from omni_attn.models.folders import find_folder, is_listed, read_index, read_part
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.experts import ReadConfig, check_experts, read_expert, vae_factors
from omni_attn.models.wan.presets import DMD_FLOW_SHIFT, WAN_PRESETS, WanPreset
from omni_attn.parallel.shards import Shards

DMD_CLASS, CAUSAL_DMD_CLASS = "WanDMDPipeline", "WanCausalDMDPipeline"
PIPELINE_CLASSES = ("WanPipeline", "WanImageToVideoPipeline", DMD_CLASS)
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

    def attention_lengths(self, generation: GenerationConfig, ranks: int = 1) -> dict[str, tuple[int, int]]:
        """Role -> (query tokens, key tokens) for every kind of attention call in these transformers.

        Of a video that several ranks share, cross-attention has the largest of their pieces: what is selected by these
        lengths has to be the same on all of them.
        """
        geometry = self.geometry(generation)
        own = max(Shards.even(geometry.num_tokens, ranks).sizes)
        return self.transformer.attention_lengths(geometry.grid, own_tokens=own)


def load_source(model: str) -> WanSource:
    """The description of a preset, or of a checkpoint folder.

    Raises:
        ConfigError: neither; or a folder whose files are missing, broken or of another kind of model.
    """
    if model in WAN_PRESETS:
        return preset_source(WAN_PRESETS[model])
    return load_folder(find_folder(model, WAN_PRESETS))


def preset_source(preset: WanPreset) -> WanSource:
    """The description of a preset."""
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


def load_folder(
    folder: Path,
    *,
    classes: tuple[str, ...] = PIPELINE_CLASSES,
    distilled: Mapping[str, float] = MappingProxyType({DMD_CLASS: DMD_FLOW_SHIFT}),
    read: ReadConfig = WanConfig.from_dict,
) -> WanSource:
    """The description of a checkpoint folder.

    Args:
        folder: exists.
        classes: of pipelines that are wanted.
        distilled: those of them that are distilled to a few steps, and the shift of the schedule distilled on.
        read: (parsed config.json of a transformer, where it came from) -> its parameters.

    Raises:
        ConfigError: files are missing, broken or of another kind of model.
    """
    index = read_index(folder, "WanModel")
    class_name = index.get("_class_name")
    if class_name not in classes:
        other = ""
        if class_name == CAUSAL_DMD_CLASS:
            other = " A video that is made chunk by chunk, with a key-value cache, is pipeline: wan_causal."
        raise ConfigError(
            f"{folder / 'model_index.json'}: _class_name is {class_name!r}; this pipeline runs "
            f"{', '.join(classes)}. Choose such a checkpoint.{other}"
        )
    is_dmd = class_name in distilled
    names = ["transformer"] + (["transformer_2"] if is_listed(index, "transformer_2") else [])
    experts = tuple(read_expert(folder / name, read) for name in names)
    if is_dmd and len(experts) == 2:
        raise ConfigError(
            f"{folder / 'model_index.json'}: a {class_name} with transformer_2, and how two distilled experts share "
            "their steps is not known here. Use a distilled checkpoint with one transformer."
        )
    if not is_dmd:  # whose sampler is its own
        read_part(folder / "scheduler" / "scheduler_config.json")
    boundary_ratio = index.get("boundary_ratio")
    check_experts(folder, experts, boundary_ratio)
    parts = frozenset(part for part in _OPTIONAL_PARTS if is_listed(index, part) and (folder / part).is_dir())
    vae_spatial, vae_temporal, notes = vae_factors(folder, parts, experts[0])
    return WanSource(
        name=str(folder),
        experts=experts,
        boundary_ratio=boundary_ratio,
        expand_timesteps=bool(index.get("expand_timesteps", False)),
        vae_spatial=vae_spatial,
        vae_temporal=vae_temporal,
        flow_shift=distilled[class_name] if is_dmd else None,
        is_dmd=is_dmd,
        folder=folder,
        parts=parts,
        notes=notes,
    )


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
