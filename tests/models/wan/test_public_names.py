"""What `omni_attn.models.wan` offers."""

from __future__ import annotations

import pytest

import omni_attn.models.wan as wan


def test_every_public_name_is_there() -> None:
    assert wan.WanModel.__name__ == "WanModel" and wan.Wan22Pipeline.__name__ == "Wan22Pipeline"
    assert isinstance(wan.WAN_PRESETS["wan-tiny"], wan.WanPreset)
    assert isinstance(wan.WAN_PRESETS["wan-tiny"].transformer, wan.WanConfig)
    with pytest.raises(AttributeError, match="WanModle"):
        _ = wan.WanModle
