"""Seeded weights for a preset, so that a run needs no download. Untrained: they show colour fields, no subject.

Ordinary random weights would leave noise as noise, since their velocity has nothing to do with the latents. These make
the model a crude denoiser, which keeps latents finite and of a sane size and gives frames something to look at:

- The input projections of video and audio have orthonormal columns, orthogonal to one another, and each output
  projection is minus the transpose of its own, so that without blocks the velocity, which points to the data, is
  proportional to minus the latent, and noise decays. A constant direction (`anchor`), which their biases add to every
  row, keeps the last norm from blowing small latents up again.
- A clock, one channel of the time embedding, makes the last norm's scale grow as noise fades: schedules of this model
  end with large steps, and a step from noise level s to the data needs a velocity of about 1 / s.
- Blocks write only into directions that all pixels of a patch share, and into those of audio.
- What queries and keys read from the anchor, in channel pairs that rotary positions turn slowly, makes near rows attend
  to one another. What attention adds is therefore smooth in space and time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from omni_attn.models.minimax_h3.loading import keeps_float32
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.models.runtime import Progress, no_progress
from omni_attn.models.seeding import fill_weights

# Found by looking at the frames of minimax-h3-tiny; the tests hold the size of the latents for other shapes.
_DECAY = 1.0  # velocity of noise at the start of the schedule, in latents per unit of noise level
_CLOCK, _TICK = 4.0, 0.8  # size of the clock's input, and how strongly it scales the last norm
_ANCHOR = 2.0  # size of the constant direction against a row of unit noise
_FEEDBACK = 3.0  # strength with which smooth fields grow: all attention layers together
_CONTENT = 0.5  # size of queries and keys that depend on content, against their constant part
_REACH = 3.0  # positions: the standard deviation of the attended neighbourhood; a square picture is 32 wide
_TURN = 0.1  # radians per position of the channel pairs that carry positions
_FEED_FORWARD, _TIME, _TABLE = 0.3, 0.1, 0.02  # small, so that they colour the result only
_GATE = 0.2  # of video sparse attention: its coarse output is the same all over a tile, and tiles would show


def materialise_seeded(
    model: MiniMaxH3Model, generator: torch.Generator, dtype: str, progress: Progress = no_progress
) -> MiniMaxH3Model:
    """The model, built on the meta device, with weights drawn on the generator's device; see `fill_weights`.

    Equal seeds give equal weights on the same kind of device.
    """
    config, frame = model.config, _Frame.build(model.config, generator.initial_seed())

    def fill(weight: torch.Tensor, name: str) -> torch.Tensor:
        return _fill(weight, name, config, frame, generator)

    return fill_weights(model, generator.device, dtype, keeps_float32, fill, progress)


@dataclass(frozen=True, eq=False)
class _Frame:
    """Orthonormal directions of the residual stream, on the CPU in float32.

    `patch` [C, in_channels * pixels] carries the features of a video row, `mean` [C, in_channels] what all pixels of a
    patch share, `audio` [C, audio_in_channels] the features of an audio row, `anchor` [C] the constant.
    """

    patch: torch.Tensor
    mean: torch.Tensor
    audio: torch.Tensor
    anchor: torch.Tensor

    @classmethod
    def build(cls, config: MiniMaxH3Config, seed: int) -> _Frame:
        pixels = math.prod(config.patch_size)
        counts = (config.in_channels * pixels, config.audio_in_channels, 1)
        assert sum(counts) <= config.hidden_size, "presets are wide enough for all directions"
        directions = torch.randn(
            config.hidden_size, sum(counts), generator=torch.Generator().manual_seed(seed)
        )
        patch, audio, anchor = torch.linalg.qr(directions.double()).Q.float().split(counts, dim=1)
        mean = patch.unflatten(1, (config.in_channels, pixels)).sum(2) / math.sqrt(pixels)
        return cls(patch, mean, audio, anchor[:, 0])


def _fill(
    weight: torch.Tensor, name: str, config: MiniMaxH3Config, frame: _Frame, generator: torch.Generator
) -> torch.Tensor:
    """The weight of this name, in place."""
    module, _, kind = name.rpartition(".")
    in_block = name.startswith("transformer_blocks.")
    if module in ("proj_in", "audio_proj_in"):
        if kind == "bias":
            return weight.copy_(frame.anchor * _ANCHOR * math.sqrt(config.hidden_size))
        directions = frame.patch if module == "proj_in" else frame.audio
        return weight.copy_(directions * math.sqrt(config.hidden_size / directions.shape[1]))
    if module in ("proj_out", "audio_proj_out") and kind == "weight":
        directions = frame.patch if module == "proj_out" else frame.audio
        scale = _DECAY * math.sqrt(1 + _ANCHOR**2) * math.sqrt(directions.shape[1] / config.hidden_size)
        return weight.copy_(-scale * directions.T)
    if module.endswith("adaln_proj.linear") and kind == "bias":
        weight.zero_().view(-1, 6, config.hidden_size)[:, [2, 5]] = (
            1  # the gates of a block, of each modality
        )
        return weight
    if in_block and module.endswith(("attn.norm_q", "attn.norm_k")):
        return weight.fill_(_position_gain(config))
    if weight.dim() == 1:
        return weight.fill_(0.0 if kind == "bias" else 1.0)
    if in_block and (gain := _writing_gain(module, config)) is not None:
        return _fill_writing(weight, gain, config, frame, generator)
    weight.normal_(0, _gain(module) / math.sqrt(weight.shape[1]), generator=generator)
    if in_block and module.endswith(("attn.to_q", "attn.to_k", "attn.to_v", "ff.net.0.proj")):
        anchor = frame.anchor.to(weight.device, weight.dtype)
        weight -= torch.outer(weight @ anchor, anchor)  # what is constant would only shift all colours
        if module.endswith(("to_q", "to_k")):
            constant = _position_channels(config).repeat(config.num_attention_heads).to(anchor)
            size = math.sqrt(
                config.hidden_size * _ANCHOR**2 / (1 + _ANCHOR**2)
            )  # of the anchor behind a norm
            weight += torch.outer(constant / size, anchor)
    return _set_clock(weight, module, config)


def _gain(module: str) -> float:
    gains = {
        "time_embedder.linear_2": _TIME,
        "adaln_proj.linear": _TABLE,
        "norm_out.linear": _TABLE,
        "to_gate_compress": _GATE,
    }
    return next((gain for suffix, gain in gains.items() if module.endswith(suffix)), 1.0)


def _writing_gain(module: str, config: MiniMaxH3Config) -> float | None:
    """How strongly a projection writes into the residual stream; None for projections that do not."""
    gains = {"attn.to_out.0": _FEEDBACK * math.sqrt(1 + _ANCHOR**2), "ff.net.2": _FEED_FORWARD}
    for suffix, gain in gains.items():
        if module.endswith(suffix):
            return gain / math.sqrt(config.num_layers)
    return None


def _fill_writing(
    weight: torch.Tensor, gain: float, config: MiniMaxH3Config, frame: _Frame, generator: torch.Generator
) -> torch.Tensor:
    """A projection into what all pixels of a patch share, and into the directions of audio."""
    weight.zero_()
    for directions in (frame.mean, frame.audio):
        channels = directions.shape[1]
        rows = torch.empty(channels, weight.shape[1], device=weight.device)
        deviation = gain * math.sqrt(config.hidden_size / channels / weight.shape[1])
        weight += directions.to(weight.device) @ rows.normal_(0, deviation, generator=generator)
    return weight


def _set_clock(weight: torch.Tensor, module: str, config: MiniMaxH3Config) -> torch.Tensor:
    """The weight with the clock in it: channel 0 of the time embedding, which grows with the model's time 0..1."""
    if module == "time_embedder.linear_1":
        weight[0] = 0
        weight[0, config.freq_dim // 2] = _CLOCK  # the sine of the time itself
    elif module == "time_embedder.linear_2":
        weight[0] = 0
        weight[0, 0] = 1
    elif module == "norm_out.linear":
        weight[config.hidden_size :, 0] = _TICK
    return weight


def _position_pairs(config: MiniMaxH3Config) -> list[tuple[int, int, float]]:
    """For each axis: both channels of the pair that turns by about _TURN per position, and its frequency."""
    count = config.rope_freq_dim
    frequencies = [config.rope_theta ** (-index / count) for index in range(count)]
    nearest = min(range(count), key=lambda index: abs(math.log(frequencies[index] / _TURN)))
    channels = [axis * count + nearest for axis in range(3)]
    return [(channel, channel + 3 * count, frequencies[nearest]) for channel in channels]


def _position_channels(config: MiniMaxH3Config) -> torch.Tensor:
    """One head's constant query and key, [D]; its mean square is 1 / _CONTENT ** 2."""
    constant = torch.zeros(config.attention_head_dim)
    pairs = _position_pairs(config)
    for first, second, _ in pairs:
        constant[[first, second]] = math.sqrt(config.attention_head_dim / (2 * len(pairs))) / _CONTENT
    return constant


def _position_gain(config: MiniMaxH3Config) -> float:
    """Weight of both qk-norms: scores then fall by distance ** 2 / (2 * _REACH ** 2) around a row.

    With constant parts of gain g, an axis adds g^2 * sqrt(D) / 3 * cos(frequency * distance) to a score.
    """
    pairs = _position_pairs(config)
    curvature = sum(frequency**2 for *_, frequency in pairs) / len(pairs)
    return math.sqrt(len(pairs) / (math.sqrt(config.attention_head_dim) * curvature)) / _REACH
