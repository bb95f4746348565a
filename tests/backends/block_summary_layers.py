"""Layers on BLOCK_SUMMARY_ATTN, and blocks small enough for what its tests attend to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from omni_attn import Attention, VideoLayout, use_attention_config
from omni_attn.backends.block_summary_builder import BlockSummaryMetadataBuilder
from omni_attn.config import AttentionConfig
from tests.ops.block_inputs import HEADS, SIZE

SPARSE = "BLOCK_SUMMARY_ATTN (torch): BLOCK_SUMMARY"
DENSE = "BLOCK_SUMMARY_ATTN (torch): SDPA"
#: Two segments, and a video of 33 tokens: 50 of them.
JOINT = VideoLayout((10, 7), ((1, 3, 11),), 50)


@contextmanager
def blocks_of(size: int = 16) -> Iterator[None]:
    """Blocks of so many tokens."""
    with patch.multiple(BlockSummaryMetadataBuilder, block_size=size):
        yield


def config(*, variant: str | None = None, **block_sparse: Any) -> AttentionConfig:
    spec = {"backend": "BLOCK_SUMMARY_ATTN", "variant": variant, "block_sparse": block_sparse}
    return AttentionConfig.model_validate({"default": spec})


def layer(*, prefix: str = "", heads: int = HEADS, size: int = SIZE, **block_sparse: Any) -> Attention:
    with use_attention_config(config(**block_sparse), device="cpu"):
        return Attention(heads, size, role="self", prefix=prefix)
