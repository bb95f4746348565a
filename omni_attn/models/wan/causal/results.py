"""What a streaming run writes: after each chunk all that there is by then, so that a folder can be watched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from omni_attn.config import PipelineConfig, WanCausalGenerationConfig
from omni_attn.models.artifacts import (
    latents_to_frames,
    save_contact_sheet,
    save_frames,
    save_latents,
    video_to_frames,
)
from omni_attn.models.results import PRINCIPAL_COMPONENTS, caption_lines, result_header
from omni_attn.models.wan.causal.decoding import ChunkDecoder
from omni_attn.report import attention_report


class ChunkResults:
    """Writes `latents.safetensors`, `contact_sheet.png` and, with a VAE, `frame_0000.png` and on.

    Args:
        folder: exists.
        config: what was asked for.
        vae: what decodes the latents; None shows them as they are.
        model: that runs.
        title: of the sheet.
        scheduler_name: class of the sampler.
        details, notes: lines of the sheet's caption.

    Attributes:
        files: what was written, in the order of writing.
    """

    def __init__(
        self,
        folder: Path,
        config: PipelineConfig,
        vae: Any | None,
        model: nn.Module,
        *,
        title: str,
        scheduler_name: str,
        details: Sequence[str],
        notes: Sequence[str],
    ) -> None:
        report = attention_report(model)
        self._folder, self._title = folder, title
        self._header = result_header(config, report, scheduler_name)
        self._caption = [*caption_lines(config, report, scheduler_name, *details), *notes]
        if vae is None:
            self._caption.append(PRINCIPAL_COMPONENTS)
        self._decoder = None if vae is None else ChunkDecoder(vae)
        self._latents: list[Tensor] = []
        self._frames: list[Tensor] = []
        self._written: dict[Path, None] = {}

    @property
    def files(self) -> tuple[Path, ...]:
        """See the class."""
        return tuple(self._written)

    def add(self, chunk: Tensor) -> None:
        """Writes what the next chunk [1, C, f, H, W] brings."""
        self._latents.append(chunk.float().cpu())
        latents = torch.cat(self._latents, dim=2)
        # First: it is what took the time.
        self._wrote(save_latents(self._folder / "latents.safetensors", latents, self._header))
        if self._decoder is None:
            frames, unit = latents_to_frames(latents[0]), "latent frame"
        else:
            new = video_to_frames(self._decoder(chunk))
            self._wrote(*save_frames(self._folder, new, first=sum(map(len, self._frames))))
            self._frames.append(new)
            frames, unit = torch.cat(self._frames), "frame"
        sheet = self._folder / "contact_sheet.png"
        self._wrote(save_contact_sheet(sheet, frames, title=self._title, caption=self._caption, unit=unit))

    def _wrote(self, *paths: Path) -> None:
        self._written.update(dict.fromkeys(paths))


def chunk_details(generation: WanCausalGenerationConfig) -> tuple[str, ...]:
    """What the caption of a sheet says of chunks and guidance."""
    seen = "all before" if generation.window_frames is None else f"a window of {generation.window_frames}"
    if generation.sink_frames:
        seen += f" and the first {generation.sink_frames}"
    return (
        f"chunks of {generation.chunk_frames} latent frames, {seen}",
        f"guidance {generation.guidance_scale:g}",
    )
