"""What `omni_attn.models.minimax_h3` offers."""

from __future__ import annotations

import pytest

import omni_attn.models.minimax_h3 as minimax_h3


def test_every_public_name_is_there() -> None:
    assert all(getattr(minimax_h3, name) is not None for name in minimax_h3.__all__)
    assert set(minimax_h3.__all__) == set(minimax_h3._HOME)
    assert minimax_h3.MiniMaxH3Model.__name__ == "MiniMaxH3Model"
    assert minimax_h3.MiniMaxH3Pipeline.__name__ == "MiniMaxH3Pipeline"
    preset = minimax_h3.MINIMAX_H3_PRESETS["minimax-h3-tiny"]
    assert isinstance(preset, minimax_h3.MiniMaxH3Preset)
    assert isinstance(preset.transformer, minimax_h3.MiniMaxH3Config)
    with pytest.raises(AttributeError, match="MiniMaxH3Modle"):
        _ = minimax_h3.MiniMaxH3Modle
