"""Latents to rows of the packed sequence and back. A row of video is one patch, its channels slowest.

Shape letters: B batch, N rows, C channels, T H W latent frames, height and width; A audio latents of one channel.
"""

from __future__ import annotations

from torch import Tensor

from omni_attn.errors import MetadataError
from omni_attn.models.minimax_h3.sizes import AUDIO_CHANNELS, Patch, token_grid


def patchify(latents_BCTHW: Tensor, patch: Patch = (1, 2, 2)) -> Tensor:
    """[B, N, C * patch]: the patches in raster order; the features of one are (channel, frame, row, column).

    Raises:
        MetadataError: not five dimensions, or an axis is no multiple of the patch.
    """
    if latents_BCTHW.ndim != 5:
        raise MetadataError(
            f"video latents have shape {list(latents_BCTHW.shape)}; needs [batch, channels, frames, height, width]."
        )
    batch, channels, *size = latents_BCTHW.shape
    (frames, rows, columns), (pt, ph, pw) = token_grid((size[0], size[1], size[2]), patch), patch
    cut = latents_BCTHW.reshape(batch, channels, frames, pt, rows, ph, columns, pw)
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, frames * rows * columns, -1)


def unpatchify(rows_BNF: Tensor, grid: tuple[int, int, int], patch: Patch = (1, 2, 2)) -> Tensor:
    """[B, C, T, H, W], contiguous: what `patchify` cut.

    Raises:
        MetadataError: other rows than the grid has, or features that are no whole channels.
    """
    (frames, rows, columns), (pt, ph, pw) = grid, patch
    if (
        rows_BNF.ndim != 3
        or rows_BNF.shape[1] != frames * rows * columns
        or rows_BNF.shape[2] % (pt * ph * pw)
    ):
        raise MetadataError(
            f"video rows have shape {list(rows_BNF.shape)}; a grid of {frames} x {rows} x {columns} needs [batch, "
            f"{frames * rows * columns}, channels * {pt * ph * pw}]."
        )
    batch = rows_BNF.shape[0]
    cut = rows_BNF.reshape(batch, frames, rows, columns, -1, pt, ph, pw).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return cut.reshape(batch, -1, frames * pt, rows * ph, columns * pw).contiguous()


def audio_to_rows(latents_B2CA: Tensor) -> Tensor:
    """[B, 2 * A, C]: all of the first channel of sound, then all of the second.

    Raises:
        MetadataError: not four dimensions, or not two channels of sound.
    """
    if latents_B2CA.ndim != 4 or latents_B2CA.shape[1] != AUDIO_CHANNELS:
        raise MetadataError(
            f"audio latents have shape {list(latents_B2CA.shape)}; needs [batch, {AUDIO_CHANNELS}, channels, latents]."
        )
    return latents_B2CA.transpose(2, 3).flatten(1, 2)


def rows_to_audio(rows_BNC: Tensor) -> Tensor:
    """[B, 2, C, A], contiguous: what `audio_to_rows` laid out; the audio VAE takes its two channels as a batch.

    Raises:
        MetadataError: not three dimensions, or an odd number of rows.
    """
    if rows_BNC.ndim != 3 or rows_BNC.shape[1] % AUDIO_CHANNELS:
        raise MetadataError(
            f"audio rows have shape {list(rows_BNC.shape)}; needs [batch, {AUDIO_CHANNELS} * latents, channels]."
        )
    batch, rows, channels = rows_BNC.shape
    apart = rows_BNC.reshape(batch, AUDIO_CHANNELS, rows // AUDIO_CHANNELS, channels)
    return apart.transpose(2, 3).contiguous()
