"""VSA-H3's published numbers: blocks, budgets, maps and outputs."""

from __future__ import annotations

import pytest
import torch

from omni_attn import AttentionMetadata, VideoLayout
from omni_attn.ops.video_tiles import video_tiles
from tests.models.minimax_h3.attention.h3_layers import MODES, PUBLISHED, h3_layer
from tests.ops.block_inputs import as_lists, waves

CPU = torch.device("cpu")
#: Row 4 of head 0, the last row of head 1, out[297, 1, :4], sum, sum of squares.
VECTORS = {
    "exempt": (
        [0, 1, 2, 3, 10, 11],
        [0, 1, 2, 3, 6, 7],
        [0.189848, 0.044979, -0.088053, -0.177086],
        -62.844276674,
        217.245714779,
    ),
    "compete": (
        [2, 4, 5, 9, 10, 11],
        [0, 1, 6, 7, 8, 9],
        [-0.064229, -0.159807, -0.211218, -0.199183],
        169.634171282,
        185.680677345,
    ),
}


def gate_waves() -> torch.Tensor:
    s, n, d = torch.meshgrid(*(torch.arange(count).double() for count in (298, 2, 8)), indexing="ij")
    return torch.sin(0.05 * s + 0.3 * n + 0.2 * d + 0.1)[None]


@pytest.mark.parametrize("budget", [{"topk": 2}, {"sparsity": 0.75}], ids=str)
@pytest.mark.parametrize("mode", VECTORS)
def test_outputs_and_maps(mode: str, budget: dict[str, float]) -> None:
    row, last_row, last, total, squares = VECTORS[mode]
    call, gate = waves(298), gate_waves()
    layer = h3_layer(impl=MODES[mode], needs={"dtype": "float64"}, **budget)
    record = PUBLISHED.record(gate)
    output = layer(*call, record)
    assert layer.route == "FASTVIDEO_VSA (torch): VSA" and output.is_contiguous()
    first = [0.044751, 0.100166, 0.120123, 0.093696]
    assert output[0, 0, 0, :4].tolist() == pytest.approx(first, abs=6e-7)
    assert output[0, 297, 1, :4].tolist() == pytest.approx(last, abs=6e-7)
    assert output.sum().item() == pytest.approx(total, abs=1e-8)
    assert output.square().sum().item() == pytest.approx(squares, abs=1e-8)

    made = record.prepared(layer.group_id)
    assert made is not None and layer.impl is not None
    selection = layer.impl.select_blocks(*call, made.product, gate_compress=gate)
    assert selection is not None
    assert selection.query_blocks.sizes == (64, 6, 5, 13, 64, 48, 32, 24, 16, 12, 8, 6)
    assert as_lists(selection.selected, 0)[:5] == [list(range(12))] * 4 + [row]
    assert as_lists(selection.selected, 1)[-1] == last_row


@pytest.mark.parametrize(
    ("segments", "sizes"),
    [((70, 5, 130), (64, 6, 5, 64, 64, 2)), ((0, 64, 0, 1), (64, 1)), ((128,), (64, 64)), ((), ())],
)
def test_chunks_never_cross_a_segment(segments: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    layer = h3_layer(topk=1, tile_size=(4, 4, 4), needs={"dtype": "float64"})
    tokens = sum(segments) + 90
    record = AttentionMetadata(video_layout=VideoLayout(segments, ((1, 9, 10),), tokens))
    product = layer.prepare(record, (tokens, tokens)).product
    assert product.segments == tuple(filter(None, segments)) and product.grid == (1, 9, 10)
    blocks = video_tiles((1, 9, 10), (4, 4, 4), CPU, product.segments)
    assert blocks.sizes[: len(sizes)] == sizes and len(blocks.sizes) == len(sizes) + 9
    assert blocks.order[: sum(segments)].tolist() == list(range(sum(segments)))


@pytest.mark.parametrize(("sparsity", "kept"), [(0.8, 132), (0.9, 66), (0.999, 1), (1.0, 1)])
def test_a_clip_of_five_seconds(sparsity: float, kept: int) -> None:
    """768 x 1344, 124 frames, 300 rows of text and 414 of audio: the budget counts the video's tiles alone."""
    layer = h3_layer(sparsity=sparsity, heads=56, size=128)
    layout = VideoLayout((300, 0, 414), ((37, 24, 42),), 38010)
    product = layer.prepare(AttentionMetadata(video_layout=layout), (38010, 38010)).product
    assert (product.tiles, product.topk, product.route, product.used) == (660, kept, "VSA", None)
    blocks = video_tiles(product.grid, product.tile_size, CPU, product.segments)
    assert len(blocks.sizes) == 12 + 660 and min(blocks.sizes[12:]) == 8
    assert blocks.sizes[:12] == (64, 64, 64, 64, 44, 64, 64, 64, 64, 64, 64, 30)
