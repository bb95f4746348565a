"""A call over more than a video is looked at as one over a video alone is; its prefix is told apart."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, VideoLayout, use_attention_config
from omni_attn.inspection.capture import CapturedCall
from omni_attn.inspection.drawing import frame_spans
from omni_attn.inspection.inspection import Inspection, inspect_call
from omni_attn.inspection.target import Target
from omni_attn.models.minimax_h3.attention.fastvideo_h3 import MiniMaxH3VSAImpl
from omni_attn.platforms import current_omni_platform
from tests.backends.rainfusion_layers import blocks_of

GRID, SEGMENTS = (4, 8, 8), (20, 12)
TOKENS = sum(SEGMENTS) + 4 * 8 * 8
VSA = {"backend": "FASTVIDEO_VSA", "variant": "torch", "fastvideo_vsa": {"topk": 2, "tile_size": [2, 4, 4]}}
RAINFUSION = {"backend": "RAINFUSION_ATTN", "variant": "torch", "block_sparse": {"sparsity": 0.5}}


def looked_at(spec: dict[str, object]) -> Inspection:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, TOKENS, 2, 64) for _ in range(3))
    with use_attention_config({"default": spec}, platform=current_omni_platform("cpu")):
        layer = Attention(
            2,
            64,
            role="self",
            role_category="self",
            mask_usage="never",
            video_grid=True,
            impl_overrides={"FASTVIDEO_VSA": MiniMaxH3VSAImpl},
            dtype="float32",
        )
    layout = VideoLayout(SEGMENTS, (GRID,), TOKENS)
    record = AttentionMetadata(video_layout=layout, step=1, num_steps=4, sigma=0.5)
    output = layer(query, key, value, record)
    call = CapturedCall(
        target=Target(1, 0),
        layer=layer,
        name="transformer.0",
        query=query,
        key=key,
        value=value,
        record=record,
        output=output,
    )
    return inspect_call(call, rounds=1)


@pytest.mark.parametrize("spec", [VSA, RAINFUSION], ids=lambda spec: str(spec["backend"]))
def test_segments_before_the_video(spec: dict[str, object]) -> None:
    with ExitStack() as stack:
        if spec is RAINFUSION:
            stack.enter_context(blocks_of(32))
        found = looked_at(spec)
    assert (found.grid, found.before) == (GRID, sum(SEGMENTS))
    assert found.to_dict()["before"] == sum(SEGMENTS)
    assert found.total.tiles < 1 and found.total.pairs < 1
    assert max(head.kernel_error for head in found.heads) < 1e-5  # the map is what ran
    names = [name for _, _, name in frame_spans(found.selection.query_blocks, found.grid, found.before)]
    assert "prefix" in " ".join(names) and any(name.startswith("frame") for name in names)


def test_the_map_shows_dense_rows_and_columns_of_the_prefix() -> None:
    found = looked_at(VSA)
    indices, counts = found.selection.selected
    assert counts[0, 0].tolist() == [10, 10] + [4] * 8  # 2 chunks see all; tiles see both and the best 2 of 8
    assert all({0, 1} <= set(row[:4].tolist()) for row in indices[0, 0, 2:])
