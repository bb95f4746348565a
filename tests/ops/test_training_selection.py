"""Training ranks blocks as inference does, by the kernels' scores: torch's products may be less exact than theirs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from omni_attn.ops.block_sparse import means
from omni_attn.ops.block_sparse.rainfusion import RainFusionLayout, rainfusion_blocks
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.rainfusion import rainfusion_attention
from omni_attn.ops.video_sparse import video_sparse_attention
from omni_attn.ops.video_tiles import video_tiles

CPU = torch.device("cpu")


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the kernel of coarse scores gives: it prefers the last blocks. Kernels take no tensors that learn."""
    given: list[torch.Tensor] = []

    def coarse_scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
        given.append(torch.arange(key.shape[2]).expand(*query.shape[:3], -1).float())
        return given[-1]

    kernels = SimpleNamespace(coarse_scores=coarse_scores)

    def kernels_for(*tensors: torch.Tensor) -> SimpleNamespace | None:
        scores_wanted = len(tensors) == 2 and tensors[0].shape[-1] == tensors[1].shape[-1] == 16
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return kernels if scores_wanted and not learns else None

    monkeypatch.setattr(means, "kernels_for", kernels_for)
    return given


def learning() -> list[torch.Tensor]:
    return [x.requires_grad_() for x in torch.randn(3, 1, 64, 1, 16).unbind()]


@pytest.mark.parametrize("coarse", [True, False])
def test_video_sparse_attention(ranked: list[torch.Tensor], coarse: bool) -> None:
    inputs, tiles = learning(), video_tiles((4, 4, 4), (2, 2, 2), CPU)
    output = video_sparse_attention(
        TorchExecutor(), inputs[0], inputs[1], inputs[2], tiles, 1, 0.3, coarse=coarse
    )
    gradients = torch.autograd.grad(output.square().sum(), inputs)
    assert len(ranked) == 1 and all(x.any() for x in gradients)
    # Without the coarse term, only tokens of the last tile are read.
    assert coarse or not gradients[2][:, tiles.block_of < 7].any()


def test_rainfusion(ranked: list[torch.Tensor]) -> None:
    query, key, value = learning()
    blocks = rainfusion_blocks(RainFusionLayout(64, ((0, (4, 4, 4)),)), 16, CPU)
    rainfusion_attention(TorchExecutor(), query, key, value, blocks, 0.75, 0.3).sum().backward()
    assert len(ranked) == 1
