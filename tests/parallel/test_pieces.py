"""Ulysses in pieces equals Ulysses, and one piece travels while another attends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from omni_attn import Attention, AttentionMetadata, VideoLayout, prepare_attention, use_attention_config
from omni_attn.config import ParallelConfig
from omni_attn.models.minimax_h3.attention.fastvideo_h3 import MiniMaxH3VSAImpl
from omni_attn.parallel import Parallel, use_parallel
from omni_attn.parallel.collectives import Collectives, Pending
from omni_attn.parallel.heads import split_heads
from omni_attn.parallel.outbox import Rows
from omni_attn.testing import fake_ranks
from tests.parallel.counted import PassedOn

PIECES = {"ulysses_degree": 2, "head_pieces": 3}


def tensors(heads: tuple[int, int], lengths: tuple[int, int], batch: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, lengths[0], heads[0], 8), *[(batch, lengths[1], heads[1], 8)] * 2]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def layer(heads: tuple[int, int], **stated: object) -> Attention:
    with use_attention_config("TORCH_SDPA", device="cpu"):
        return Attention(heads[0], 8, role="self", num_kv_heads=heads[1], **stated)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config", [PIECES, {"ulysses_degree": 2, "head_pieces": 2}, PIECES | {"ulysses_degree": 3}]
)
@pytest.mark.parametrize("heads", [(12, 12), (12, 6), (6, 6), (7, 7), (12, 2), (3, 3)])
@pytest.mark.parametrize(("lengths", "batch"), [((7, 7), 2), ((8, 5), 1), ((1, 1), 1)])
def test_equals_one_rank(
    config: dict[str, int], heads: tuple[int, int], lengths: tuple[int, int], batch: int
) -> None:
    whole = tensors(heads, lengths, batch)
    alone = layer(heads)(*whole)

    def work(parallel: Parallel) -> Tensor:
        record = AttentionMetadata()
        split = layer(heads)
        prepare_attention(split, {"self": record}, {"self": lengths})
        return split(*(parallel.split(tensor) for tensor in whole), record)

    together = torch.cat(fake_ranks(config, work), dim=1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    wanted = torch.autograd.grad(alone.square().sum(), whole)
    found = torch.autograd.grad(together.square().sum(), whole)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mask_heads", [1, 12])
@pytest.mark.parametrize("order", ["front", "rear"])
def test_masks_of_each_head_and_joint_streams(mask_heads: int, order: str) -> None:
    heads, joint, length = (12, 12), 3, 8
    whole, beside = tensors(heads, (length, length)), tensors(heads, (joint, joint))
    generator = torch.Generator().manual_seed(1)
    mask = torch.randn(1, mask_heads, joint + length, joint + length, generator=generator) > -1
    names = ("joint_query", "joint_key", "joint_value")

    def work(parallel: Parallel | None) -> Tensor:
        record = AttentionMetadata(joint_tokens=(joint, joint), joint_order=order, attn_mask=mask)  # type: ignore[arg-type]
        split = layer(heads)
        total = (joint + length, joint + length)
        prepare_attention(split, {"self": record}, {"self": total})
        record = record.with_layer_inputs(**dict(zip(names, beside, strict=True)))
        own = whole if parallel is None else [parallel.split(tensor) for tensor in whole]
        return split(*own, record)

    alone = work(None)
    first, second = fake_ranks(PIECES, work)
    text, video = (
        (slice(joint), slice(joint, None)) if order == "front" else (slice(-joint, None), slice(-joint))
    )
    torch.testing.assert_close(first[:, text], alone[:, text], atol=1e-5, rtol=0)
    together = torch.cat((first[:, video], second[:, video]), dim=1)
    torch.testing.assert_close(together, alone[:, video], atol=1e-5, rtol=0)


class Noting(PassedOn):
    """Writes down what is started and waited for."""

    def __init__(self, inner: Collectives, log: list[str]) -> None:
        super().__init__(inner)
        self.log = log

    def start_all_to_all(self, outbox: Rows) -> Pending:
        self.log.append("start")
        return self.inner.start_all_to_all(outbox)

    def wait(self, pending: Pending) -> Tensor:
        self.log.append("wait")
        return self.inner.wait(pending)


def test_pieces_travel_while_others_attend() -> None:
    whole = tensors((12, 12), (8, 8))

    def work(parallel: Parallel) -> list[str]:
        log: list[str] = []
        with use_parallel(replace(parallel, ulysses=Noting(parallel.ulysses, log))):  # type: ignore[arg-type]
            split = layer((12, 12))
        record = AttentionMetadata()
        prepare_attention(split, {"self": record}, {"self": (8, 8)})
        assert split.impl is not None
        attend = split.impl.forward
        split.impl.forward = lambda *given, **named: (log.append("attend"), attend(*given, **named))[1]  # type: ignore[method-assign, func-returns-value]
        split(*(parallel.split(tensor) for tensor in whole), record)
        return log

    each = ["wait", "attend", "start"]
    assert fake_ranks(PIECES, work) == [["start"] * 3 + each * 3 + ["wait"] * 3] * 2


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 8), st.integers(1, 6))
def test_pieces_hold_every_head_once(kv_heads: int, ratio: int, ranks: int, at_most: int) -> None:
    split = split_heads(kv_heads * ratio, kv_heads, ranks, role="self")
    cut = split.cut(at_most)
    assert 1 <= len(cut) <= at_most
    for name in ("query", "key"):
        for rank in range(ranks):
            spans = [getattr(one, name)[rank] for one in cut]
            whole = getattr(split, name)[rank]
            assert [head for span in spans for head in range(*span)] == list(range(*whole))
            assert len({end - start for start, end in spans}) == 1


def test_what_a_layer_says() -> None:
    def told(config: dict[str, int]) -> str:
        with use_parallel(ParallelConfig.model_validate(config)):
            split = layer((12, 12))
        assert split.parallel is not None
        return split.parallel

    assert told(PIECES).endswith("6 of 12 heads each, in 3 pieces")
    assert told(PIECES | {"head_pieces": 5}).endswith("in 3 pieces")
    assert told(PIECES | {"ulysses_degree": 5}).endswith("in 1 piece")


@pytest.mark.parametrize("overridden", [False, True])
def test_gates_and_sparse_maps(overridden: bool) -> None:
    grid, size = (3, 5, 7), 16
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 105, 12, size, generator=generator) for _ in range(4)]
    spec = {"backend": "FASTVIDEO_VSA", "fastvideo_vsa": {"topk": 3, "tile_size": [2, 2, 4]}}

    def work(parallel: Parallel | None) -> Tensor:
        with use_attention_config({"default": spec}, device="cpu"):
            overrides = {"FASTVIDEO_VSA": MiniMaxH3VSAImpl} if overridden else None
            split = Attention(12, size, role="self", video_grid=True, impl_overrides=overrides)
        layout = VideoLayout((), (grid,), 105) if overridden else None
        record = AttentionMetadata(vsa_dit_seq_shape=grid, video_layout=layout)
        prepare_attention(split, {"self": record}, {"self": (105, 105)})
        own = whole if parallel is None else [parallel.split(tensor) for tensor in whole]
        return split(*own[:3], record.with_layer_inputs(gate_compress=own[3]))

    together = torch.cat(fake_ranks(PIECES, work), dim=1)
    torch.testing.assert_close(together, work(None), atol=1e-6, rtol=0)


@pytest.mark.parametrize("degrees", [{}, {"ring_degree": 2}, {"ulysses_degree": 2, "ring_degree": 2}])
def test_pieces_need_ulysses_alone(degrees: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="head_pieces is 2 with ulysses_degree"):
        ParallelConfig.model_validate({**degrees, "head_pieces": 2})
