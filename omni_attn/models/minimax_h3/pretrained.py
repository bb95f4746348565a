"""A MiniMax-H3 transformer from its own folder: what is built, from which weights, in which dtypes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from omni_attn.calibration import read_calibration
from omni_attn.models.calibration import calibrate
from omni_attn.models.checkpoint import assign_weights, read_json, resolve_float, stored_dtype, stored_header
from omni_attn.models.gates import has_gates
from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from omni_attn.models.minimax_h3.gate import look_at_gates
from omni_attn.models.minimax_h3.loading import (
    convert_config,
    keeps_float32,
    read_weights,
    weights_stem,
)
from omni_attn.models.minimax_h3.quantised import check_supported
from omni_attn.models.runtime import select_for

Model = TypeVar("Model", bound=nn.Module)


def load_pretrained(
    build: Callable[[MiniMaxH3Config], Model],
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | str | None,
    adapter: str | os.PathLike[str] | None,
) -> Model:
    """The model that `build` makes of the folder's config.json, with the folder's weights; for inference.

    Args:
        folder, device, dtype, adapter: see MiniMaxH3Model.from_pretrained.

    Raises:
        ConfigError: as there.
    """
    target = None if dtype is None else resolve_float(dtype)
    source, values = os.path.join(folder, "config.json"), read_json(folder, "config.json")
    # First: a quantised checkpoint is told as such, whatever else its config.json says.
    check_supported(folder, values, stored_header(Path(folder), weights_stem(folder)))
    calibration = read_calibration(values, source)
    config = MiniMaxH3Config.from_dict(convert_config(values, source=source), source=source)
    state, finish = read_weights(folder, config, adapter=adapter)
    if "gate_compress" not in values:
        config = replace(config, gate_compress=has_gates(state))
    stored = stored_dtype(state, "context_embedder.weight")
    with torch.device("meta"), select_for(device, target or stored):
        model = build(config)
    if calibration is not None:
        calibrate(model, {"": calibration})
    assign_weights(
        model,
        state,
        device=device,
        dtype=target,
        keeps_float32=partial(keeps_float32, is_factorised=config.adaln_rank is not None),
        source=str(folder),
        finish=finish,
    )
    look_at_gates(model)
    return model.eval()
