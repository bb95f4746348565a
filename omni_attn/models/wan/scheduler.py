"""The sampler of a pipeline: diffusers' own classes, chosen by the preset or by the checkpoint's file."""

from __future__ import annotations

from typing import Any

from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import load_part, read_json
from omni_attn.models.runtime import import_extra
from omni_attn.models.wan.dmd import build_dmd_scheduler
from omni_attn.models.wan.source import WanSource


def load_scheduler(source: WanSource) -> Any:
    """A diffusers scheduler for flow velocities: UniPC for presets, what scheduler/ names for a folder.

    Distilled checkpoints have a sampler of their own (see `omni_attn.models.wan.dmd`), whatever scheduler/ says.

    Raises:
        ConfigError: diffusers has no such scheduler or cannot load it, or it reads something else than a flow velocity.
        MissingExtraError: diffusers is not installed.
    """
    diffusers = import_extra("diffusers", "Sampling")
    if source.is_dmd:
        assert source.flow_shift is not None  # the source of a distilled checkpoint states it
        return build_dmd_scheduler(source.flow_shift)
    if source.folder is None:
        return diffusers.UniPCMultistepScheduler(
            num_train_timesteps=1000,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=source.flow_shift,
        )
    folder = source.folder / "scheduler"
    class_name = read_json(folder, "scheduler_config.json").get("_class_name")
    found: Any = getattr(diffusers, str(class_name), None)
    if not (isinstance(found, type) and issubclass(found, diffusers.SchedulerMixin)):
        raise ConfigError(
            f"{folder / 'scheduler_config.json'}: _class_name is {class_name!r}, and diffusers "
            f"{diffusers.__version__} has no such scheduler. Update diffusers, or save the pipeline with another one."
        )
    loader: Any = found
    scheduler: Any = load_part(loader.from_pretrained, folder)
    prediction = scheduler.config.get("prediction_type", "flow_prediction")
    if prediction != "flow_prediction":
        raise ConfigError(
            f"{folder / 'scheduler_config.json'}: prediction_type is {prediction!r}, and a Wan transformer gives a "
            "flow velocity. Set it to 'flow_prediction', with use_flow_sigmas, or use a flow-matching scheduler."
        )
    return scheduler
