"""Seeded weights for a preset, so that a run needs no download. Untrained: they show colour fields, no subject.

Ordinary random weights would leave noise as noise, since their velocity has nothing to do with the latents. These make
the model a crude denoiser, which keeps latents finite and of a sane size and gives frames something to look at:

- The patch embedding has orthonormal columns and the output projection is its transpose, so that without blocks the
  velocity is proportional to the latent, and noise decays. A constant direction (`anchor`), which the patch embedding's
  bias adds to every token, keeps the last norm from blowing small latents up again.
- Blocks write only into directions that all pixels of a patch share.
- Constant biases of the self-attention queries and keys, in channel pairs that rotary positions turn by about 0.2 per
  token, make near tokens attend to one another. What attention adds is therefore smooth in space and time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from omni_attn.models.runtime import Progress, no_progress
from omni_attn.models.seeding import fill_weights
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.loading import keeps_float32
from omni_attn.models.wan.rope import rope_axis_dims
from omni_attn.models.wan.transformer import Model

# Found by looking at the frames of wan-tiny; the tests hold the size of the latents for other shapes.
_DECAY = 4.0  # how fast noise decays over the schedule: exp(-4) of it is left
_ANCHOR = 2.0  # size of the constant direction against a token of unit noise
_FEEDBACK = 3.0  # strength with which smooth fields grow: all self-attention layers together
_CONTENT = 0.5  # size of queries and keys that depend on content, against their constant part
_REACH = 1.0  # tokens: the standard deviation of the attended neighbourhood
_TURN = 0.2  # radians per token of the channel pairs that carry positions
_FEED_FORWARD, _CROSS, _TIME, _TABLE = 0.3, 0.05, 0.1, 0.02  # small, so that they colour the result only
_GATE = 0.2  # of video sparse attention: its coarse output is the same all over a tile, and tiles would show


def materialise_seeded(
    model: Model, generator: torch.Generator, dtype: str, progress: Progress = no_progress
) -> Model:
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

    `patch` [dim, in_channels * pixels] carries the features of a patch, `mean` [dim, out_channels] what all pixels of
    a patch share, `anchor` [dim] the constant; all are orthogonal to the vector of ones, which norms remove.
    """

    patch: torch.Tensor
    mean: torch.Tensor
    anchor: torch.Tensor

    @classmethod
    def build(cls, config: WanConfig, seed: int) -> _Frame:
        pixels = math.prod(config.patch_size)
        features = config.in_channels * pixels
        directions = torch.randn(config.dim, features + 2, generator=torch.Generator().manual_seed(seed))
        directions[:, 0] = 1
        basis = torch.linalg.qr(directions.double()).Q.float()
        patch = basis[:, 2:]
        mean = patch.unflatten(1, (config.in_channels, pixels))[:, : config.out_channels].sum(2) / math.sqrt(
            pixels
        )
        return cls(patch, mean, basis[:, 1])


def _fill(
    weight: torch.Tensor, name: str, config: WanConfig, frame: _Frame, generator: torch.Generator
) -> torch.Tensor:
    """The weight of this name, in place."""
    module, _, kind = name.rpartition(".")
    features = frame.patch.shape[1]
    if name == "patch_embedding.weight":
        return weight.copy_((frame.patch * math.sqrt(config.dim / features)).view_as(weight))
    if name == "patch_embedding.bias":
        return weight.copy_(frame.anchor * _ANCHOR * math.sqrt(config.dim))
    if name == "proj_out.weight":
        return weight.copy_(_output_rows(config, frame))
    if kind == "scale_shift_table":
        weight.normal_(0, _TABLE, generator=generator)
        if weight.shape[1] == 6:
            weight[:, [2, 5]] += 1  # the gates of a block
        return weight
    if kind == "pos_embed":
        return weight.normal_(0, 1, generator=generator)
    if module.endswith(("attn1.to_q", "attn1.to_k")) and kind == "bias":
        return weight.copy_(_position_bias(config).repeat(config.num_attention_heads))
    if module.endswith(("attn1.norm_q", "attn1.norm_k")):
        return weight.fill_(_position_gain(config))
    if weight.dim() == 1:
        return weight.fill_(0.0 if kind == "bias" else 1.0)
    if ".blocks." in f".{name}" and (gain := _writing_gain(module, config)) is not None:
        rows = torch.empty(config.out_channels, weight.shape[1], device=weight.device)
        rows.normal_(
            0, gain * math.sqrt(config.dim / config.out_channels / weight.shape[1]), generator=generator
        )
        return weight.copy_(frame.mean.to(weight.device) @ rows)
    gain = _TIME if module.endswith(("time_embedder.linear_2", "time_proj")) else 1.0
    gain = _GATE if module.endswith("to_gate_compress") else gain
    weight.normal_(0, gain / math.sqrt(weight[0].numel()), generator=generator)
    if module.endswith(("attn1.to_v", "ffn.net.0.proj")):  # what is constant would only shift all colours
        anchor = frame.anchor.to(weight.device, weight.dtype)
        weight -= torch.outer(weight @ anchor, anchor)
    return weight


def _writing_gain(module: str, config: WanConfig) -> float | None:
    """How strongly a projection writes into the residual stream; None for projections that do not."""
    gains = {
        "attn1.to_out.0": _FEEDBACK * math.sqrt(1 + _ANCHOR**2),
        "attn2.to_out.0": _CROSS,
        "ffn.net.2": _FEED_FORWARD,
    }
    for suffix, gain in gains.items():
        if module.endswith(suffix):
            return gain / math.sqrt(config.num_layers)
    return None


def _output_rows(config: WanConfig, frame: _Frame) -> torch.Tensor:
    """Transpose of the patch embedding, with features in the order of the output: channel fastest."""
    pixels = math.prod(config.patch_size)
    scale = _DECAY * math.sqrt(1 + _ANCHOR**2) * math.sqrt(frame.patch.shape[1] / config.dim)
    by_channel = frame.patch.T.reshape(config.in_channels, pixels, config.dim)[: config.out_channels]
    return by_channel.transpose(0, 1).reshape(-1, config.dim) * scale


def _position_pairs(config: WanConfig) -> list[tuple[int, float]]:
    """For each axis: the channel where the pair begins that turns by about _TURN per token, and its frequency."""
    pairs, start = [], 0
    for axis_dim in rope_axis_dims(config.attention_head_dim):
        frequencies = [10000.0 ** (-2 * pair / axis_dim) for pair in range(axis_dim // 2)]
        nearest = min(range(len(frequencies)), key=lambda pair: abs(math.log(frequencies[pair] / _TURN)))
        pairs.append((start + 2 * nearest, frequencies[nearest]))
        start += axis_dim
    return pairs


def _position_bias(config: WanConfig) -> torch.Tensor:
    """One head's constant query and key, [D]; its mean square is 1 / _CONTENT ** 2."""
    bias = torch.zeros(config.attention_head_dim)
    pairs = _position_pairs(config)
    for channel, _ in pairs:
        bias[channel : channel + 2] = math.sqrt(config.attention_head_dim / (2 * len(pairs))) / _CONTENT
    return bias


def _position_gain(config: WanConfig) -> float:
    """Weight of both qk-norms: scores then fall by distance ** 2 / (2 * _REACH ** 2) around a token.

    With constant parts of gain g, an axis adds g^2 * sqrt(D) / 3 * cos(frequency * distance) to a score.
    """
    pairs = _position_pairs(config)
    curvature = sum(frequency**2 for _, frequency in pairs) / len(pairs)
    return math.sqrt(len(pairs) / (math.sqrt(config.attention_head_dim) * curvature)) / _REACH
