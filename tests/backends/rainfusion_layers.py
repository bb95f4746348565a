"""Layers on RAINFUSION_ATTN, the sequence that most of its tests attend to, and blocks small enough for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from omni_attn import Attention, VideoLayout, use_attention_config
from omni_attn.backends.rainfusion_builder import RainFusionMetadataBuilder
from omni_attn.config import AttentionConfig
from tests.ops.block_inputs import HEADS, SIZE

SPARSE = "RAINFUSION_ATTN (torch): RAINFUSION"
DENSE = "RAINFUSION_ATTN (torch): SDPA"
#: 40 tokens of text, then a video of 192.
JOINT = VideoLayout((30, 10), ((3, 8, 8),), 232)


@contextmanager
def blocks_of(size: int = 32) -> Iterator[None]:
    """Blocks of so many tokens, and no video too short for them."""
    with patch.multiple(RainFusionMetadataBuilder, block_size=size, min_video_blocks=0):
        yield


def config(**block_sparse: Any) -> AttentionConfig:
    spec = {"backend": "RAINFUSION_ATTN", "block_sparse": block_sparse}
    return AttentionConfig.model_validate({"per_role": {"self": spec}})


def layer(*, prefix: str = "", heads: int = HEADS, size: int = SIZE, **block_sparse: Any) -> Attention:
    with use_attention_config(config(**block_sparse), device="cpu"):
        return Attention(heads, size, role="self", video_grid=True, prefix=prefix)


def told(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """What was told about routes at a level."""
    return [r.getMessage() for r in caplog.records if r.levelno == level and "route" in r.getMessage()]
