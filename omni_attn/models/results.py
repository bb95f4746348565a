"""What the results of every family say and show: header entries, the caption and sheet of frames, notes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from omni_attn.config import PipelineConfig
from omni_attn.models.artifacts import latents_to_frames, save_contact_sheet, save_frames, video_to_frames
from omni_attn.report import AttentionReport

PRINCIPAL_COMPONENTS = "no VAE: latents seen through their first three principal components"
"""Said below frames that were made from latents alone."""


def result_header(config: PipelineConfig, report: AttentionReport, scheduler_name: str) -> dict[str, str]:
    """Header entries of a file of latents: model, seed, steps, scheduler, attention (JSON: what each role ran)."""
    return {
        "model": config.model,
        "seed": str(config.generation.seed),
        "steps": str(config.generation.num_inference_steps),
        "scheduler": scheduler_name,
        "attention": json.dumps(report.to_dict()),
    }


def caption_lines(
    config: PipelineConfig, report: AttentionReport, scheduler_name: str, *details: str
) -> list[str]:
    """What stands below a contact sheet: size, steps, `details` of the family and seed; then what each role ran."""
    generation = config.generation
    kernels = dict.fromkeys(
        f"{row.role}: {row.backend}{f' {row.variant}' if row.variant else ''} ({row.source})"
        for row in report.rows
    )
    made = [
        f"{generation.num_frames} frames of {generation.height} x {generation.width}",
        f"{generation.num_inference_steps} steps of {scheduler_name}",
        *details,
        f"seed {generation.seed}",
    ]
    return [", ".join(made), "   ".join(kernels)]


def write_pictures(
    folder: Path, latents: torch.Tensor, video: torch.Tensor | None, *, title: str, caption: Sequence[str]
) -> list[Path]:
    """Write the frames of a decoded video, if there is one, and a contact sheet; the paths, in the order of writing.

    Args:
        folder: exists.
        latents: [C, T, H, W]; the sheet shows them where no video is given.
        video: [3, N, H, W] in -1..1, or None.
        title, caption: above and below the sheet.
    """
    sheet, lines = folder / "contact_sheet.png", list(caption)
    if video is not None:
        frames = video_to_frames(video)
        return [
            *save_frames(folder, frames),
            save_contact_sheet(sheet, frames, title=title, caption=lines, unit="frame"),
        ]
    lines.append(PRINCIPAL_COMPONENTS)
    frames = latents_to_frames(latents)
    return [save_contact_sheet(sheet, frames, title=title, caption=lines, unit="latent frame")]


def broken_numbers_note(dtype: str, *latents: torch.Tensor) -> tuple[str, ...]:
    """A note if latents hold numbers that are not finite, else nothing; `dtype` is the one they were computed in."""
    if all(bool(tensor.isfinite().all()) for tensor in latents):
        return ()
    return (f"the latents hold numbers that are not finite: {dtype} was too narrow, or a kernel is broken",)
