"""The denoising loop of MiniMax-H3: video and sound together, one forward a step, keyframes and references held.

Videos are latents [B, C, T, H, W], sounds [B, 2, C, A] (two channels of A latents). Text, pictures and waves are coded
elsewhere. Sampling does what diffusers' modular pipeline does; tests hold the results equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.models.agreement import check_alike
from omni_attn.models.minimax_h3.conditions import Keyframes, Prompt
from omni_attn.models.minimax_h3.config import REFINER_ROLE
from omni_attn.models.minimax_h3.inputs import check_text
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.models.minimax_h3.packing import pack_fl2va, pack_t2va
from omni_attn.models.minimax_h3.patches import audio_to_rows, patchify, rows_to_audio, unpatchify
from omni_attn.models.minimax_h3.schedule import (
    MINIMAX_H3_PLAN,
    JointSchedule,
    JointStep,
    SamplingPlan,
    build_schedulers,
)
from omni_attn.models.minimax_h3.sequence import PackedSequence
from omni_attn.models.runtime import Progress, no_progress
from omni_attn.preparation import prepare_attention


@dataclass(eq=False)
class MiniMaxH3Pipeline:
    """MiniMax-H3 in latent space, with two of diffusers' MiniMaxH3Scheduler.

    Attributes:
        transformer: guidance is distilled into it, so that a step is one forward.
        scheduler, audio_scheduler: each with its modality's shift.
        grid: base grid that a distilled transformer was trained on (see `SamplingPlan`); None = evenly spaced.
    """

    transformer: MiniMaxH3Model
    scheduler: Any
    audio_scheduler: Any
    grid: tuple[float, ...] | None = None

    @classmethod
    def for_plan(cls, transformer: MiniMaxH3Model, plan: SamplingPlan = MINIMAX_H3_PLAN) -> MiniMaxH3Pipeline:
        """A pipeline that samples after this plan.

        Raises:
            ConfigError: diffusers is too old.
            MissingExtraError: diffusers is not installed.
        """
        return cls(transformer, *build_schedulers(plan), plan.grid)

    def __call__(
        self,
        prompt: Prompt | Tensor,
        latents: Tensor,
        audio_latents: Tensor,
        *,
        keyframes: Keyframes | None = None,
        num_inference_steps: int | None = None,
        progress: Progress = no_progress,
    ) -> tuple[Tensor, Tensor]:
        """A denoised video [B, C, T, H, W] and its sound [B, 2, C, A], float32 on the noise's device, on every rank.

        Args:
            prompt: encoded, [1 or B, N, E]; a Prompt where rows of pictures are among them.
            latents: noise to start the video from, [B, C, T, H, W], on the transformer's device.
            audio_latents: noise to start the sound from, [B, 2, C, A].
            keyframes: frames to begin and / or end with, as `Keyframes.noised` makes them; their batch is 1 or B.
            num_inference_steps: points of the schedule, of which the last has no forward; None means 50, or those of
                the grid.
            progress: wraps the loop over steps.

        Raises:
            MetadataError: inputs that do not fit the transformer or one another.
            ConfigError: `num_inference_steps` does not fit the schedule.
        """
        config = self.transformer.config
        if isinstance(prompt, Tensor):
            prompt = Prompt(prompt)
        check_text(prompt.embeds, config.text_dim)
        held = () if keyframes is None else keyframes.given
        batch = self._check_latents(latents, audio_latents, held)
        size, patch = (latents.shape[2], latents.shape[3], latents.shape[4]), config.patch_size
        sounds = audio_latents.shape[3]
        if keyframes is None or not held:
            sequence = pack_t2va(prompt.packed_rows, size, sounds, patch_size=patch)
        else:
            sequence = pack_fl2va(
                prompt.packed_rows,
                size,
                sounds,
                first=keyframes.first is not None,
                last=keyframes.last is not None,
                patch_size=patch,
            )
        frames = [_expand(frame.to(latents.device), batch) for frame in held]
        video, audio = self.denoise_rows(
            sequence,
            prompt.embeds,
            torch.cat([patchify(part.float(), patch) for part in (*frames, latents)], dim=1),
            audio_to_rows(audio_latents.float()),
            num_inference_steps=num_inference_steps,
            progress=progress,
        )
        return unpatchify(video, sequence.grid, patch), rows_to_audio(audio)

    @torch.inference_mode()
    def denoise_rows(
        self,
        sequence: PackedSequence,
        prompt_embeds: Tensor,
        video_rows: Tensor,
        audio_rows: Tensor,
        *,
        num_inference_steps: int | None = None,
        progress: Progress = no_progress,
    ) -> tuple[Tensor, Tensor]:
        """Denoised target rows of video [B, n, F] and sound [B, m, C], for a sequence packed in any way, padded or not.

        Args:
            sequence: see `omni_attn.models.minimax_h3.packing`.
            prompt_embeds: [1 or B, N, E].
            video_rows: conditions, which stay as they are, then noise: [B, Nv, F].
            audio_rows: the same of sound: [B, Na, C].
            num_inference_steps, progress: see `__call__`.

        Raises:
            MetadataError: rows that do not fit the transformer or the sequence, or that differ between ranks.
            ConfigError: `num_inference_steps` does not fit the schedule.
        """
        if self.transformer.parallel is not None:
            given = {"prompt_embeds": prompt_embeds, "video_rows": video_rows, "audio_rows": audio_rows}
            shifts = {
                "scheduler.shift": self.scheduler.shift,
                "audio_scheduler.shift": self.audio_scheduler.shift,
            }
            beside = {"num_inference_steps": num_inference_steps, "sampling grid": self.grid}
            check_alike(self.transformer.parallel, given | beside | shifts | vars(sequence))
        self._check_rows(sequence, prompt_embeds, video_rows, audio_rows)
        device = video_rows.device
        schedule = JointSchedule(
            self.scheduler, self.audio_scheduler, grid=self.grid, num_inference_steps=num_inference_steps
        )
        sequence = sequence.to(device)
        # Made before the loop: a copy to the device waits for what runs there.
        times = [sequence.timesteps(step.video_time, step.audio_time) for step in schedule.steps]
        text_rows = sequence.text_indices.shape[0]
        lengths = self.transformer.config.attention_lengths(sequence.token_tags.shape[0], text_rows)
        records = self.transformer.attention_records(sequence.layout, sequence.padded_len)
        prompt = _expand(prompt_embeds.to(device), video_rows.shape[0])
        refined = self._refine(prompt, records, lengths, schedule)
        held_video, video = _split(video_rows.float(), sequence.target_video)
        held_audio, audio = _split(audio_rows.float(), sequence.target_audio)
        steps = schedule.steps
        for step in progress(steps, len(steps), "denoising"):
            # Each from the one before, so that what was prepared travels along.
            records = {"self": _at(records["self"], step, schedule)}
            prepare_attention(self.transformer, records, lengths=lengths)
            video_velocity, audio_velocity = self.transformer(
                torch.cat([held_video, video], dim=1),
                torch.cat([held_audio, audio], dim=1),
                None,
                *times[step.index],
                sequence.token_tags,
                sequence.position_ids,
                sequence.video_indices,
                sequence.audio_indices,
                sequence.text_indices,
                attention_records=records,
                refined_text=refined,
            )
            velocities = (
                video_velocity[:, sequence.target_video].float(),
                audio_velocity[:, sequence.target_audio].float(),
            )
            video, audio = schedule.step(step, velocities, (video, audio))
        return video, audio

    def _refine(
        self,
        prompt: Tensor,
        records: Mapping[str, AttentionMetadata],
        lengths: Mapping[str, tuple[int, int]],
        schedule: JointSchedule,
    ) -> Tensor:
        """The text as every step reads it; its attention belongs to the first step."""
        first = {REFINER_ROLE: _at(records[REFINER_ROLE], schedule.steps[0], schedule)}
        prepare_attention(self.transformer, first, lengths=lengths)
        return self.transformer.refine_text(prompt, attention_records=first)

    def _check_rows(self, sequence: PackedSequence, text: Tensor, video: Tensor, audio: Tensor) -> None:
        config = self.transformer.config
        for name, rows, indices, channels in (
            ("prompt_embeds", text, sequence.text_indices, config.text_dim),
            ("video_rows", video, sequence.video_indices, config.patch_dim),
            ("audio_rows", audio, sequence.audio_indices, config.audio_in_channels),
        ):
            wanted = [indices.shape[0], channels]
            if rows.dim() != 3 or list(rows.shape[1:]) != wanted:
                raise MetadataError(
                    f"{name} has shape {list(rows.shape)}; this sequence and transformer need [batch, {wanted[0]}, "
                    f"{wanted[1]}]."
                )

    def _check_latents(self, latents: Tensor, audio: Tensor, held: tuple[Tensor, ...]) -> int:
        """The batch size."""
        config = self.transformer.config
        if latents.dim() != 5 or latents.shape[1] != config.in_channels:
            raise MetadataError(
                f"latents have shape {list(latents.shape)}; this transformer denoises [batch, {config.in_channels}, "
                "frames, height, width]."
            )
        wanted = [latents.shape[0], 2, config.audio_in_channels]
        if audio.dim() != 4 or list(audio.shape[:3]) != wanted:
            raise MetadataError(
                f"audio_latents have shape {list(audio.shape)}; beside latents of {latents.shape[0]} videos they need "
                f"[{wanted[0]}, {wanted[1]}, {wanted[2]}, latents]."
            )
        frame = [config.in_channels, 1, *latents.shape[3:]]
        for given in held:
            if list(given.shape[1:]) != frame:
                raise MetadataError(
                    f"a keyframe has shape {list(given.shape)}; these latents need [{latents.shape[0]}, "
                    f"{', '.join(map(str, frame))}]."
                )
        return latents.shape[0]


def _at(record: AttentionMetadata, step: JointStep, schedule: JointSchedule) -> AttentionMetadata:
    return record.at_step(step.index, num_steps=len(schedule.steps), sigma=step.sigma)


def _split(rows: Tensor, target: slice) -> tuple[Tensor, Tensor]:
    """Rows of conditions, and those to generate."""
    return rows[:, : target.start], rows[:, target]


def _expand(tensor: Tensor, batch_size: int) -> Tensor:
    if tensor.shape[0] not in (1, batch_size):
        raise MetadataError(
            f"An input of shape {list(tensor.shape)} was given for {batch_size} videos; its first dimension must be 1 "
            f"(the same for all) or {batch_size}."
        )
    return tensor.expand(batch_size, *tensor.shape[1:])
