"""Skip-softmax calibration as checkpoints publish it: pure reading of a component's config.json.

A calibrated checkpoint holds, beside its weights, the two coefficients of a curve that turns a target sparsity into the
number that kernels take, and the names of layers that are to stay dense. The format is that of NVIDIA's Model Optimizer
(`sparse_attention_config`).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from omni_attn.errors import ConfigError

FORMULA = "a * exp(b * target_sparsity)"
CALIBRATION_SECTION = "sparse_attention_config"


@dataclass(frozen=True)
class SkipSoftmaxCurve:
    """factor = a * exp(b * target_sparsity); a tile is skipped below factor / key tokens of the running maximum."""

    a: float
    b: float

    def factor(self, target_sparsity: float) -> float:
        """The threshold scale factor that reaches a target sparsity, the number that kernels take."""
        return self.a * math.exp(self.b * target_sparsity)


#: What a checkpoint says about one layer: its curve, or that it stays dense.
LayerCalibration = SkipSoftmaxCurve | Literal["dense"]


@dataclass(frozen=True)
class SkipSoftmaxCalibration:
    """One component's calibration: its curve, and shell patterns of the layers that stay dense."""

    curve: SkipSoftmaxCurve
    ignore: tuple[str, ...] = ()

    def of_layer(self, name: str, component: str | None = None) -> LayerCalibration:
        """What holds for the layer of a module name.

        A pattern is held against the whole name, the name without torch.compile's `_orig_mod.`, and that without the
        component's prefix; a pattern that names a module also covers what lies inside it.
        """
        plain = name.replace("_orig_mod.", "")
        names = {name, plain, plain.removeprefix(f"{component}.") if component else plain}
        patterns = [form for pattern in self.ignore for form in (pattern, f"{pattern}.*")]
        ignored = any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)
        return "dense" if ignored else self.curve


def component_of(name: str, components: Mapping[str, object]) -> str | None:
    """The component that a module name belongs to: the longest one that is its prefix, None if none is."""
    fitting = [c for c in components if name == c or name.startswith(f"{c}.")]
    return max(fitting, key=len, default=None)


def read_calibration(config: Mapping[str, Any], source: str = "config.json") -> SkipSoftmaxCalibration | None:
    """The skip-softmax calibration in a component's parsed config.json, None if it has none.

    Targets, sparsity and timestep gate that the file suggests are ignored: those are the person's to choose.

    Args:
        config: the parsed file.
        source: where it came from, for error texts.

    Raises:
        ConfigError: the section is there and cannot be used: another formula, or numbers that are none.
    """
    section = config.get(CALIBRATION_SECTION)
    if section is None:
        return None
    groups = list(_skip_softmax_groups(section, f"{source}: {CALIBRATION_SECTION}"))
    if not groups:
        return None
    if len(groups) > 1:
        raise ConfigError(
            f"{groups[0][0]} and {groups[1][0]} both calibrate skip-softmax, and one group can. Fetch or save the "
            "checkpoint again"
        )
    ((where, group),) = groups
    scale = _mapping(group.get("threshold_scale_factor"), f"{where}.threshold_scale_factor")
    formula = scale.get("formula")
    if not isinstance(formula, str) or "".join(formula.split()) != "".join(FORMULA.split()):
        raise ConfigError(
            f"{where}.threshold_scale_factor.formula is {formula!r}, and only {FORMULA!r} is known here. Use a "
            "checkpoint that was calibrated with it, or give skip_softmax.threshold"
        )
    key = "coefficients" if "coefficients" in scale else "prefill"  # prefill: as older files call it
    pair = _mapping(scale.get(key), f"{where}.threshold_scale_factor.{key}")
    curve = SkipSoftmaxCurve(*(_number(pair.get(n), f"{where} coefficient {n}") for n in ("a", "b")))
    if curve.a <= 0:
        raise ConfigError(f"{where} coefficient a is {curve.a}, and must be above 0: a factor is positive")
    return SkipSoftmaxCalibration(curve, (*_patterns(section, where), *_patterns(group, where)))


def _skip_softmax_groups(section: object, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    groups = _mapping(_mapping(section, where).get("config_groups", {}), f"{where}.config_groups")
    for name, group in groups.items():
        place = f"{where}.config_groups.{name}"
        group = _mapping(group, place)
        if group.get("algorithm") == "skip_softmax" or "threshold_scale_factor" in group:
            yield place, group


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}, and must be a mapping. Fetch or save the checkpoint again")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{where} is {value!r}, and must be a finite number. Fetch the checkpoint again")
    return float(value)


def _patterns(holder: Mapping[str, Any], where: str) -> tuple[str, ...]:
    patterns = holder.get("ignore") or ()
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"{where}: ignore is {patterns!r}, and must be a list of module name patterns")
    return tuple(patterns)
