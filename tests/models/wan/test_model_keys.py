"""Names, shapes and sizes of the published models, without their weights."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel

from omni_attn.models.wan.loading import keeps_float32
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.presets import WAN_PRESETS

# Billions of parameters of one transformer.
PUBLISHED = {
    "wan2.1-t2v-1.3b": 1.419,
    "wan2.1-t2v-14b": 14.288,
    "wan2.1-i2v-14b": 16.395,
    "wan2.1-flf2v-14b": 16.396,
    "wan2.2-t2v-a14b": 14.288,
    "wan2.2-i2v-a14b": 14.289,
    "wan2.2-ti2v-5b": 5.000,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_shapes_and_number_of_parameters(name: str) -> None:
    config = WAN_PRESETS[name].transformer
    with torch.device("meta"):
        ours = WanModel(config).state_dict()
        theirs = WanTransformer3DModel(**config.to_diffusers()).state_dict()
    assert {key: tensor.shape for key, tensor in ours.items()} == {
        key: tensor.shape for key, tensor in theirs.items()
    }
    assert all(tensor.device.type == "meta" for tensor in ours.values())
    assert sum(tensor.numel() for tensor in ours.values()) / 1e9 == pytest.approx(PUBLISHED[name], abs=6e-4)


def test_the_tiny_preset_is_small() -> None:
    with torch.device("meta"):
        model = WanModel(WAN_PRESETS["wan-tiny"].transformer)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e6


def test_what_stays_in_float32_is_what_diffusers_keeps() -> None:
    with torch.device("meta"):
        names = WanModel(WAN_PRESETS["wan2.1-flf2v-14b"].transformer).state_dict()
    theirs = {
        name for name in names if set(WanTransformer3DModel._keep_in_fp32_modules) & set(name.split("."))
    }
    assert {name for name in names if keeps_float32(name)} == theirs
