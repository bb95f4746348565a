"""What a MiniMax-H3 sequence is made from: an encoded prompt and keyframes; from files, or seeded where
nobody gave any.

Dimensions in names: B batch, N rows of text, E features, C channels, H and W latent height and width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from omni_attn.errors import ConfigError
from omni_attn.models.minimax_h3.sequence import CONDITION_VIDEO_TIME, TEXT_TAG, VIDEO_TAG
from omni_attn.models.seeding import Stream, seeded_generator
from omni_attn.models.tensor_files import check_numbers, read_tensors


@dataclass(frozen=True, eq=False)
class Prompt:
    """An encoded prompt.

    Attributes:
        embeds: [1 or B, N, E].
        tags: int64 [N], 1 for a row of text and 0 for one that the encoder made of a picture; None = all text.
    """

    embeds: Tensor
    tags: Tensor | None = None

    @property
    def packed_rows(self) -> int | Tensor:
        """What a packing wants to know about the text."""
        return self.embeds.shape[1] if self.tags is None else self.tags


@dataclass(frozen=True, eq=False)
class Keyframes:
    """The first and the last frame of a video, either of them or both: latents [1 or B, C, 1, H, W] float32."""

    first: Tensor | None = None
    last: Tensor | None = None

    @property
    def given(self) -> tuple[Tensor, ...]:
        """Those there are, in packed order."""
        return tuple(frame for frame in (self.first, self.last) if frame is not None)

    def noised(self, generator: torch.Generator) -> Keyframes:
        """The same with the trace of noise that the model was trained with; drawn before all other noise."""

        def mixed(frame: Tensor | None) -> Tensor | None:
            if frame is None:
                return None
            noise = torch.randn(frame.shape, generator=generator).to(frame.device)
            return CONDITION_VIDEO_TIME * frame + (1 - CONDITION_VIDEO_TIME) * noise

        return replace(self, first=mixed(self.first), last=mixed(self.last))


def seeded_prompt(rows: int, text_dim: int, seed: int) -> Prompt:
    """Normal noise in place of an encoded prompt."""
    return Prompt(torch.randn(1, rows, text_dim, generator=seeded_generator(seed, Stream.PROMPT)))


def load_prompt(path: str, text_dim: int) -> Prompt:
    """Prompt embeddings from a file: `prompt_embeds` [1, N, E] or [N, E], and `text_token_tags` [N] if there are any.

    Raises:
        ConfigError: no such file, keys, shapes or tags; the text holds those found and those expected.
    """
    field = "generation.prompt_embeds"
    expected = f"prompt_embeds of shape [1, rows, {text_dim}] (and optionally text_token_tags [rows])"
    tensors = read_tensors(path, field, {"prompt_embeds"}, {"text_token_tags"}, expected)
    embeds = tensors["prompt_embeds"]
    rows = embeds[None] if embeds.dim() == 2 else embeds
    if rows.dim() != 3 or rows.shape[0] != 1 or not rows.shape[1] or rows.shape[2] != text_dim:
        raise ConfigError(
            f"{field}: prompt_embeds in {path} has shape {list(embeds.shape)}; expected [1, rows, {text_dim}]. Encode "
            "the prompt with the text encoder of this model."
        )
    check_numbers(field, path, "prompt_embeds", embeds)
    tags = tensors.get("text_token_tags")
    if tags is not None:
        known = not tags.is_floating_point() and bool(((tags == TEXT_TAG) | (tags == VIDEO_TAG)).all())
        if list(tags.shape) != [rows.shape[1]] or not known:
            raise ConfigError(
                f"{field}: text_token_tags in {path} is {tags.dtype} of shape {list(tags.shape)}; expected "
                f"{rows.shape[1]} integers, {TEXT_TAG} for text and {VIDEO_TAG} for a row made of a picture."
            )
    return Prompt(rows.float(), tags)


def seeded_keyframe(shape: tuple[int, ...], seed: int, stream: Stream) -> Tensor:
    """A made-up picture's latents: a field that changes slowly, [1, C, 1, H, W] float32 of unit size."""
    coarse = torch.randn(1, shape[1], 4, 4, generator=seeded_generator(seed, stream))
    field = torch.nn.functional.interpolate(coarse, shape[3:], mode="bicubic", align_corners=True)
    return (field / field.std())[:, :, None]


def load_keyframe(path: str, field: str, shape: tuple[int, ...]) -> Tensor:
    """A keyframe's normalised latents, [1, C, 1, H, W], from a file with the key `condition_latents`.

    Raises:
        ConfigError: no such file, keys or shapes; the text holds those found and those expected.
    """
    expected = f"condition_latents of shape {list(shape)}"
    latents = read_tensors(path, field, {"condition_latents"}, set(), expected)["condition_latents"]
    if tuple(latents.shape) != shape:
        raise ConfigError(
            f"{field}: condition_latents in {path} has shape {list(latents.shape)}; expected {list(shape)}. Encode the "
            "picture at the height and width of the video."
        )
    check_numbers(field, path, "condition_latents", latents)
    return latents.float()
