"""One call of a pipeline, looked at: everything that `omni-attn inspect` shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.config import PipelineConfig
from omni_attn.errors import ConfigError
from omni_attn.inspection.capture import CapturedCall, capture
from omni_attn.inspection.figures import Figures, figures_of_all, figures_of_heads, relative_error
from omni_attn.inspection.mass import Comparison, compare_with_dense
from omni_attn.inspection.speed import Speed, dense_layer, measure_speed, tokens_in_use
from omni_attn.inspection.target import Target, check_selects_blocks, check_target
from omni_attn.models.runtime import Progress, no_progress
from omni_attn.ops.block_sparse.selection import BlockSelection
from omni_attn.platforms import OmniPlatform, current_omni_platform


@dataclass(frozen=True, eq=False, kw_only=True)
class Inspection:
    """What one sparse call computed, kept and cost.

    Attributes:
        target: the call; name: its layer in the model.
        label: backend and variant; source: where the choice comes from; route: what ran.
        num_steps, sigma: the loop's length, and the noise level of the step.
        grid: the video's token grid, None where the model states none; before: tokens before the video.
        device, dtype: of the tensors.
        selection, compared: what was selected, and what it means beside dense attention.
        heads, total: the figures.
        dense_error: what the measured dense backend itself deviates from dense attention computed here.
        speed: predicted and measured.
        notes: what a reader should know.
    """

    target: Target
    name: str
    label: str
    source: str
    route: str
    num_steps: int | None
    sigma: float | None
    grid: tuple[int, int, int] | None
    device: str
    dtype: str
    selection: BlockSelection
    compared: Comparison
    heads: tuple[Figures, ...]
    total: Figures
    dense_error: float
    speed: Speed
    notes: tuple[str, ...]
    before: int = 0

    @property
    def added(self) -> str | None:
        """What takes part beside the attention over the selected tiles, None = nothing."""
        if self.selection.summaries:
            return "means"
        return "coarse" if self.has_coarse else None

    @property
    def has_coarse(self) -> bool:
        """Whether something is added to the attention over the selected tiles."""
        return self.selection.coarse is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        queries, keys = self.selection.query_blocks, self.selection.key_blocks
        return {
            **asdict(self.target),
            **{
                name: getattr(self, name)
                for name in ("name", "label", "source", "route", "num_steps", "sigma")
            },
            **{name: getattr(self, name) for name in ("grid", "before", "device", "dtype")},
            "query_tokens": queries.tokens,
            "key_tokens": keys.tokens,
            "query_tiles": queries.num_blocks,
            "key_tiles": keys.num_blocks,
            "tile_capacity": keys.capacity,
            "coarse_term": self.has_coarse,
            "summaries": self.selection.summaries,
            "total": self.total.to_dict(),
            "heads": [head.to_dict() for head in self.heads],
            "mass_kept_by_tile": self.compared.kept.mean(0).tolist(),
            "dense_error": self.dense_error,
            "speed": {**asdict(self.speed), "measured": self.speed.measured},
            "notes": list(self.notes),
        }


def inspect_pipeline(
    config: PipelineConfig, target: Target, *, rounds: int = 7, progress: Progress = no_progress
) -> Inspection:
    """Runs a pipeline up to a call and looks at it.

    Raises:
        ConfigError: there is no such layer or step, its attention is dense, or the step is; and what preparing the
            pipeline raises.
    """
    check_target(config, target)
    call, notes = capture(config, target, progress=progress)
    return inspect_call(call, notes=notes, rounds=rounds, progress=progress)


@torch.inference_mode()
def inspect_call(
    call: CapturedCall, *, notes: tuple[str, ...] = (), rounds: int = 7, progress: Progress = no_progress
) -> Inspection:
    """Looks at a captured call; see inspect_pipeline."""
    platform = current_omni_platform(call.query.device)
    selection = select_again(call, platform)
    dense = dense_layer(call, platform)
    speed = measure_speed(call, dense, selection, rounds=rounds, progress=progress)
    compared = compare_with_dense(
        call.query,
        call.key,
        call.value,
        call.output,
        selection,
        _scale(call),
        others={"dense backend": dense(*tokens_in_use(call, selection))},
    )
    total, chosen = figures_of_all(selection, compared), call.layer.selection
    assert chosen is not None
    grid, before = _video(call.record)
    return Inspection(
        target=call.target,
        name=call.name,
        label=chosen.label,
        source=chosen.source,
        route=call.layer.route,
        num_steps=call.record.num_steps,
        sigma=call.record.sigma,
        grid=grid,
        before=before,
        device=str(call.query.device),
        dtype=str(call.query.dtype).removeprefix("torch."),
        selection=selection,
        compared=compared,
        heads=figures_of_heads(selection, compared),
        total=total,
        dense_error=relative_error(compared.deviations["dense backend"], compared.dense),
        speed=speed,
        notes=(*notes, *_remarks(total, call, has_coarse=selection.coarse is not None)),
    )


def select_again(call: CapturedCall, platform: OmniPlatform) -> BlockSelection:
    """What the captured call selected, asked of its impl.

    Raises:
        ConfigError: the call was dense: by the backend's own route, or because a fallback ran.
    """
    layer, target = call.layer, call.target
    where = f"--step {target.step} --layer {target.layer}"
    route, made = layer.active_route, call.record.prepared(layer.group_id)
    if route is None or made is None:
        raise ConfigError(f"{where}: the model brings its own attention for this layer. Choose another one.")
    if layer.fallback_reason is not None and not route.selection.backend_cls.facts.selects_blocks:
        raise ConfigError(
            f"{where}: ran {route.selection.label}, a fallback, which selects no blocks: {layer.fallback_reason}"
        )
    check_selects_blocks(route.selection, platform)
    inputs = {name: x for name, x in call.record.layer_inputs.items() if name in route.layer_inputs}
    selection = route.impl.select_blocks(call.query, call.key, call.value, made.product, **inputs)
    if selection is None:
        why = "" if layer.route_reason is None else f" ({layer.route_reason})"
        raise ConfigError(
            f"{where}: this call is dense, so there is no map to look at: it took the route {layer.route}{why}. Choose "
            "another step or layer, or fewer tiles."
        )
    return selection


def _video(record: AttentionMetadata) -> tuple[tuple[int, int, int] | None, int]:
    """The grid of the video at the end of a sequence, None where the record states none, and the tokens before it."""
    layout = record.video_layout
    if layout is None or not layout.spans:
        return record.vsa_dit_seq_shape, 0
    return layout.spans[-1], layout.used_len - prod(layout.spans[-1])


def _scale(call: CapturedCall) -> float:
    scale = call.layer.request.softmax_scale
    return call.layer.request.head_size**-0.5 if scale is None else scale


def _remarks(total: Figures, call: CapturedCall, *, has_coarse: bool) -> tuple[str, ...]:
    remarks = []
    if total.tiles == 1:
        added = ", plus the coarse term, which is all that `error` shows" if has_coarse else ""
        remarks.append(
            f"every tile is selected, so this call is dense{added}: its route is {call.layer.route}"
        )
    if call.query.device.type != "cuda":
        remarks.append(f"times were taken on {call.query.device}: they say nothing about a GPU")
    return tuple(remarks)
