"""Ranks refuse alike: what one rank's backend cannot take, the others refuse too, and nobody waits."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from omni_attn import AttentionMetadata, PackedPadding, prepare_attention
from omni_attn.errors import MetadataError
from omni_attn.parallel import Parallel
from omni_attn.parallel.collectives import Pending
from omni_attn.parallel.outbox import Rows
from omni_attn.testing import fake_ranks
from omni_attn.testing.ranks import ThreadCollectives
from tests.layer.stands import HEAD_SIZE, STANDS
from tests.parallel.scene import CONFIGS, Call


class Refused(NamedTuple):
    """A record that the calls of some ranks alone would take."""

    backend: str
    config: str
    length: int
    fields: dict[str, Any]
    words: str
    heads: int = 4
    causal: bool = False


KEEP = torch.arange(13)[None] < 10
REFUSED = {
    "a rank of padding only": Refused(
        "FLASHINFER_ATTN-fa2", "ring 3", 12, {"packed_padding": PackedPadding(5, 5)}, "log-sum-exp"
    ),
    "a rank whose keys are all kept": Refused(
        "FLASH_ATTN-fa2",
        "ring 2",
        13,
        {"attn_mask": KEEP, "kv_lengths": (10,)},
        "together with causal",
        causal=True,
    ),
    "a rank with one head": Refused(
        "FLASHINFER_ATTN-fa2",
        "ulysses 2",
        6,
        {"attn_mask": torch.ones(1, 3, 6, 6, dtype=torch.bool).tril()},
        "one mask for all heads",
        heads=3,
    ),
    "a rank without tokens": Refused(
        "FLASH_ATTN-fa2", "ring 3", 2, {"attn_mask": -torch.ones(1, 2)}, "key-padding mask"
    ),
    "a rank without a part of a sequence": Refused(
        "FLASHINFER_ATTN-cute-dsl", "allgather 3", 12, {"cu_seqlens_q": (0, 4, 8, 12)}, "at least one query"
    ),
    "a rank without a packed sequence": Refused(
        "FLASHINFER_ATTN-cute-dsl", "ring 3", 12, {"cu_seqlens_q": (0, 3)}, "log-sum-exp"
    ),
    "a rank without queries": Refused(
        "TORCH_SDPA",
        "ring 3",
        2,
        {"cu_seqlens_q": (0, 2), "cu_seqlens_k": (0, 5), "joint_tokens": (0, 3)},
        "beside joint streams",
    ),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_every_rank_refuses_what_one_does(refused: Refused) -> None:
    stand = next(stand for stand in STANDS if str(stand) == refused.backend)
    joint = refused.fields.get("joint_tokens", (0, 0))
    lengths = (refused.length + joint[0], refused.length + joint[1])

    def work(parallel: Parallel) -> str:
        layer = stand.layer(refused.heads, HEAD_SIZE, causal=refused.causal)
        with pytest.raises(MetadataError, match=refused.words) as raised:
            prepare_attention(layer, {"self": AttentionMetadata(**refused.fields)}, {"self": lengths})
        return str(raised.value)

    with stand.kernels():
        texts = fake_ranks(CONFIGS[refused.config], work)
    assert all(refused.backend.split("-")[0] in text for text in texts)


@pytest.mark.parametrize("config", ["ulysses 2", "ulysses 2 ring 2"])
@pytest.mark.parametrize("name", ["query", "key", "value", "joint_query", "joint_key", "joint_value"])
def test_ranks_agree_on_what_has_a_backward_pass(config: str, name: str) -> None:
    """One head: a rank has none, and makes no use of what asks for gradients."""
    call = Call(4, heads=1, joint=(2, 2), needs={"requires_grad": True})
    leaves = dict(zip(("query", "key", "value"), call.own, strict=True)) | call.streams
    leaves[name].requires_grad_()
    asked: dict[int, dict[int, list[bool]]] = {}
    start = ThreadCollectives.start_all_to_all

    def logged(self: ThreadCollectives, outbox: Rows) -> Pending:
        asked.setdefault(id(self._group), {}).setdefault(self.rank, []).append(outbox.rows.requires_grad)
        return start(self, outbox)

    with patch.object(ThreadCollectives, "start_all_to_all", logged):
        call.on_ranks(CONFIGS[config])
    assert asked
    for by_rank in asked.values():
        assert all(log == by_rank[0] for log in by_rank.values())
