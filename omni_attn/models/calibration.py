"""Skip-softmax calibration of a pipeline's transformers: read from their folders, given to their attention layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from omni_attn.calibration import SkipSoftmaxCalibration, component_of, read_calibration
from omni_attn.errors import ConfigError
from omni_attn.layer import Attention
from omni_attn.models.checkpoint import read_json

_LOG = logging.getLogger("omni_attn")
_logged: set[str] = set()


def calibrate(model: nn.Module, calibrations: Mapping[str, SkipSoftmaxCalibration | None]) -> None:
    """Gives each layer with a target sparsity its component's curve; ignored layers stay dense.

    A component without calibration beside one that has it stays dense as well, with one warning.

    Args:
        model: holds the components as children of these names; "" = the model is the component.
        calibrations: component -> what its config.json says.

    Raises:
        ConfigError: layers ask for a target sparsity, and no component is calibrated.
    """
    layers = {name: layer for name, layer in _layers(model).items() if _target_sparsity(layer) is not None}
    if layers and not any(calibrations.values()):
        layer = next(iter(layers.values()))
        raise ConfigError(
            f'role "{layer.role}": skip_softmax.target_sparsity is {_target_sparsity(layer)}, and the model has no '
            "calibration that translates it: its config.json holds no sparse_attention_config. Use a calibrated "
            "checkpoint, or give skip_softmax.threshold instead"
        )
    for name, layer in layers.items():
        component = component_of(name, calibrations)
        calibration = calibrations.get("" if component is None else component)
        if calibration is None:
            _warn_once(
                f"{component or 'the model'} has no skip-softmax calibration: its attention stays dense"
            )
        layer.calibrate("dense" if calibration is None else calibration.of_layer(name, component))


def calibrate_pipeline(model: nn.ModuleDict, folder: Path | None) -> None:
    """Calibrates the layers of all transformers of a pipeline, which are called as their folders; see `calibrate`.

    Args:
        model: the transformers.
        folder: holds their folders; None for a preset, which has no calibration.

    Raises:
        ConfigError: see `calibrate` and `read_calibrations`.
    """
    names = list(model)
    calibrate(model, read_calibrations(folder, names) if folder else dict.fromkeys(names))


def read_calibrations(folder: Path, components: Sequence[str]) -> dict[str, SkipSoftmaxCalibration | None]:
    """Component -> calibration, from the config.json of each.

    The first component's file has to be readable; another one that is not counts as uncalibrated, with one warning.

    Raises:
        ConfigError: the first file cannot be read, or any of them holds a calibration of a kind nobody knows.
    """
    found: dict[str, SkipSoftmaxCalibration | None] = {}
    for component in components:
        place = folder / component
        try:
            config = read_json(place, "config.json")
        except ConfigError as error:
            if component == components[0]:
                raise
            _warn_once(f"{component}: its calibration cannot be read: {error}")
            config = {}
        found[component] = read_calibration(config, str(place / "config.json"))
    return found


def _layers(model: nn.Module) -> dict[str, Attention]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Attention)}


def _target_sparsity(layer: Attention) -> float | None:
    """What a person asks of the layer, or of one of its fallbacks."""
    spec = layer.selection.spec if layer.selection else None
    specs = (spec, *spec.fallback) if spec else ()
    asked = (spec.skip_softmax.target_sparsity for spec in specs if spec.skip_softmax)
    return next((sparsity for sparsity in asked if sparsity is not None), None)


def _warn_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        _LOG.warning(text)
