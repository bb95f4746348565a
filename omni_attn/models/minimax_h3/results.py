"""What a MiniMax-H3 run writes: latents of video and sound; with VAEs frames and a sound file; and a contact sheet."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from omni_attn.config import PipelineConfig
from omni_attn.models.artifacts import save_latents
from omni_attn.models.minimax_h3.pixels import decode_audio, decode_video
from omni_attn.models.minimax_h3.source import MiniMaxH3Source
from omni_attn.models.results import caption_lines, result_header, write_pictures
from omni_attn.report import attention_report


def write_results(
    folder: Path,
    latents: tuple[Tensor, Tensor],
    config: PipelineConfig,
    source: MiniMaxH3Source,
    vaes: tuple[Any | None, Any | None],
    model: nn.Module,
    notes: tuple[str, ...],
) -> tuple[Path, ...]:
    """Write everything into the folder; the paths, in the order of writing.

    Latents come first: they are what took the time. `latents.safetensors` and `audio_latents.safetensors` hold them in
    float32 under "latents" with the header entries model, seed, steps, scheduler and attention (JSON: what each role
    ran).

    Args:
        folder: exists.
        latents: normalised, of the video [1, C, T, H, W] and of the sound [1, 2, C, A].
        config: what was asked for.
        source: the pipeline's description.
        vaes: what decodes them; without the first, the sheet shows latents as they are.
        model: the transformer that ran.
        notes: what was filled in; the sheet's caption repeats them.
    """
    video, sound = latents
    report, scheduler = attention_report(model), "MiniMaxH3Scheduler"
    header = result_header(config, report, scheduler)
    files = [
        save_latents(folder / "latents.safetensors", video, header),
        save_latents(folder / "audio_latents.safetensors", sound, header),
    ]
    if vaes[1] is not None:
        files.append(_save_sound(folder / "sound.wav", *decode_audio(vaes[1], sound)))
    forwards = f"{config.generation.num_inference_steps - 1} forwards"
    caption = [*caption_lines(config, report, scheduler, forwards), *notes]
    frames = None if vaes[0] is None else decode_video(vaes[0], video)
    files += write_pictures(folder, video[0], frames, title=source.name, caption=caption)
    return tuple(files)


def _save_sound(path: Path, sound: Tensor, rate: int) -> Path:
    """Write [2, samples] in -1..1 as 16-bit stereo."""
    samples = (sound.T.cpu() * 32767).round().short().contiguous()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.numpy().astype("<i2").tobytes())
    return path
