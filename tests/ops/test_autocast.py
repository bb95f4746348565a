"""An autocast region around block-sparse attention changes neither what is selected nor the numbers."""

from __future__ import annotations

import pytest
import torch

from omni_attn.ops.block_sparse.subblock_selector import subblock_scores
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.video_sparse import video_sparse_attention
from omni_attn.ops.video_tiles import video_tiles

TILES = video_tiles((5, 6, 7), (4, 4, 4), torch.device("cpu"))
QUERY, KEY, VALUE, GATE = torch.randn(4, 1, 210, 2, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("learns", [False, True])
def test_video_sparse_attention(dtype: torch.dtype, learns: bool) -> None:
    inputs = [x.clone().requires_grad_(learns) for x in (QUERY, KEY, VALUE)]

    def attend() -> torch.Tensor:
        return video_sparse_attention(TorchExecutor(), *inputs, TILES, 2, 0.3, gate=GATE)  # type: ignore[arg-type]

    plain = attend()
    with torch.autocast("cpu", dtype):
        output = attend()
    assert torch.equal(output, plain)
    if learns:
        first, second = (torch.autograd.grad(x.square().sum(), inputs) for x in (plain, output))
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_scores_of_subblocks() -> None:
    def scores() -> torch.Tensor:
        return subblock_scores(QUERY, KEY, 0.3, block_q=64, block_k=64, cell=16)

    plain = scores()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scores(), plain)
