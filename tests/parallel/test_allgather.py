"""AllGather-KV: what only gathered keys can do, what they cannot, and what is exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from omni_attn import Attention, AttentionMetadata, use_attention_config
from omni_attn.backends.metadata import PackedPadding
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.facts import AttentionRequest, BackendFacts, evaluate
from omni_attn.parallel import Parallel, ParallelConfig, use_parallel
from omni_attn.parallel.dispatch import split_layer
from omni_attn.testing import fake_device, fake_ranks
from omni_attn.testing.ranks import ThreadCollectives
from tests.layer.stands import Stand
from tests.parallel.scene import Call

GATHER = {"allgather_degree": 3}


@pytest.mark.parametrize("lengths", [(7, 4), (4, 9), (6, 1), (9, 2), (2, 8)])
def test_causal_with_keys_of_another_length(lengths: tuple[int, int]) -> None:
    """Aligned at the end, so that the first queries of (7, 4) see no key, and give zeros."""
    Call(*lengths, needs={"causal": True}).check(GATHER)


@pytest.mark.parametrize("lengths", [(3, 5), (5, 5), (1, 9)])
def test_causal_with_joint_keys_and_keys_of_another_length(lengths: tuple[int, int]) -> None:
    queries, keys = lengths
    call = Call(queries, keys, joint=(0, 2), order="rear", needs={"causal": True})
    # Joint keys are put in front of the others, and the end of both is what is aligned.
    keep = torch.ones(queries, keys + 2, dtype=torch.bool).tril(keys + 2 - queries)
    moved = torch.cat((keep[:, 2:], keep[:, :2]), dim=1)
    call_without = Call(queries, keys, joint=(0, 2), order="rear")
    expected = call_without.expected(moved[None, None]).float()
    torch.testing.assert_close(call.alone(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(call.on_ranks(GATHER), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("used", [(6, 9), (9, 6), (2, 10), (10, 1)])
def test_causal_with_structural_padding_of_unequal_sides(used: tuple[int, int]) -> None:
    mask = torch.zeros(10, 10, dtype=torch.bool)
    mask[: used[0], : used[1]] = torch.ones(used, dtype=torch.bool).tril(used[1] - used[0])
    fields = {"packed_padding": PackedPadding(*used)}
    expected = Call(10, batch=1).expected(mask[None, None]).float()
    call = Call(10, batch=1, needs={"causal": True}, fields=fields)
    torch.testing.assert_close(call.alone(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(call.on_ranks(GATHER), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("keys", [8, 11])
def test_causal_packed_sequences_with_unused_keys_behind_them(keys: int) -> None:
    mask = torch.zeros(8, keys, dtype=torch.bool)
    for start, end in ((0, 3), (3, 8)):
        mask[start:end, start:end] = True
    fields = {"cu_seqlens_q": (0, 3, 8), "cu_seqlens_k": (0, 3, 8)}
    triangle = torch.ones(8, keys, dtype=torch.bool).tril()
    expected = Call(8, keys, batch=1).expected((mask & triangle)[None, None]).float()
    call = Call(8, keys, batch=1, needs={"causal": True, "packed": True}, fields=fields)
    torch.testing.assert_close(call.alone(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(call.on_ranks(GATHER), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("second", [(0, 4, 8), torch.tensor([0, 3, 8], dtype=torch.int32)], ids=str)
def test_causal_packed_keys_with_boundaries_of_their_own_are_refused_on_every_rank(second: Any) -> None:
    """Boundaries on a device may be equal, and nobody looks: a look would wait for the device."""
    first = (0, 3, 8) if isinstance(second, tuple) else second.clone()
    fields = {"cu_seqlens_q": first, "cu_seqlens_k": second}
    call = Call(8, batch=1, needs={"causal": True, "packed": True}, fields=fields)
    assert refusals(call) == 3
    Call(8, batch=1, needs={"packed": True}, fields=fields).alone()


def refusals(call: Call) -> int:
    """On how many of the three ranks a call is refused before anything is exchanged."""
    texts: list[str] = []

    def work(parallel: Parallel) -> None:
        layer, record = call.layer(), call.record()
        with pytest.raises(MetadataError, match="cu_seqlens_k") as raised:
            layer.prepare(record, call.whole_lengths)
        texts.append(str(raised.value))

    fake_ranks(GATHER, work)
    assert len(set(texts)) == 1
    return len(texts)


@pytest.mark.parametrize("tokens", [255, 256])
def test_calls_of_other_ranks_that_a_backend_refuses_are_refused_on_every_rank(tokens: int) -> None:
    """128 queries are enough for this kernel, and 127 are too few for the other rank."""
    stand = Stand("SAGE_ATTN", "sage2")
    texts: list[str] = []

    def work(parallel: Parallel) -> None:
        layer = stand.layer(4, 128)
        try:
            layer.prepare(AttentionMetadata(), (tokens, 4096))
        except MetadataError as error:
            texts.append(str(error))

    with stand.kernels():
        fake_ranks({"allgather_degree": 2}, work)
    assert len(texts) == (2 if tokens == 255 else 0)
    assert all("at least 128 query tokens, found 127" in text for text in texts)


def test_one_exchange_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    gather = ThreadCollectives.start_all_gather

    def counted(self: ThreadCollectives, rows: Tensor) -> Tensor:
        shapes.append(tuple(rows.shape))
        return gather(self, rows)

    def refused(self: ThreadCollectives, *_: object) -> Tensor:
        raise AssertionError("another exchange")

    monkeypatch.setattr(ThreadCollectives, "start_all_gather", counted)
    monkeypatch.setattr(ThreadCollectives, "start_all_to_all", refused)
    monkeypatch.setattr(ThreadCollectives, "share_counts", refused)
    Call(7, 8, kv_heads=2, value_size=12).on_ranks(GATHER)
    assert shapes == [(3, 2, 2 * 8 + 2 * 12)] * 3  # 3, 3 and 2 tokens: the last rank's are padded


def test_keys_are_views_of_what_was_gathered() -> None:
    """Equal pieces are not copied again, whatever the batch."""
    seen: list[Tensor] = []

    def work(parallel: Parallel) -> None:
        call = Call(6)
        layer = call.layer()
        impl = layer.impl
        assert impl is not None
        forward = impl.forward

        def looked_at(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
            seen.extend((key, value))
            return forward(query, key, value, *rest, **named)

        impl.forward = looked_at  # type: ignore[method-assign]
        layer(*map(parallel.split, call.own))

    fake_ranks(GATHER, work)
    for key, value in zip(seen[::2], seen[1::2], strict=True):
        assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        assert key.shape == value.shape == (2, 6, 4, 8)


REQUEST = AttentionRequest(role="self", num_heads=4, head_size=8, sequence_parallel="allgather_kv")


@pytest.mark.parametrize(
    ("facts", "causal", "reason"),
    [
        ({}, True, None),
        ({"unequal_lengths": False}, False, "needs unequal query and key lengths for sequence parallelism"),
        ({"causal_unequal_lengths": False}, True, "needs causal attention of unequal lengths for sequence"),
        ({"causal_unequal_lengths": False}, False, None),
        ({"sequence_parallel": frozenset({"ulysses"})}, False, "found support for ulysses"),
    ],
)
def test_what_a_kernel_needs(facts: dict[str, Any], causal: bool, reason: str | None) -> None:
    served = {"causal": True, "sequence_parallel": frozenset({"allgather_kv"})}
    request = AttentionRequest(
        role="self", num_heads=4, head_size=8, causal=causal, sequence_parallel="allgather_kv"
    )
    reasons = evaluate(BackendFacts(**{**served, **facts}), request, fake_device("cpu"))
    assert [text for text in reasons if reason is not None and reason in text] == list(reasons)
    assert bool(reasons) == (reason is not None)


def test_a_kernel_of_equal_causal_lengths_is_refused_when_the_layer_is_built() -> None:
    device = fake_device("sm_90", packages={"sageattention": "2.2.0"})
    with (
        use_attention_config("SAGE_ATTN", platform=device),
        use_parallel(ParallelConfig.model_validate(GATHER)),
        pytest.raises(BackendRejectedError, match=r"SAGE_ATTN.*allgather_kv"),
    ):
        Attention(4, 128, role="self", causal=True)


def test_it_says_what_ranks_do() -> None:
    planned = Parallel.planned(ParallelConfig.model_validate(GATHER))
    text = split_layer(REQUEST, planned).describe()
    assert text == "3 ranks gather all keys and values, and attend from their own tokens"


def test_a_planned_layer_does_not_run() -> None:
    with (
        use_parallel(ParallelConfig.model_validate(GATHER)),
        use_attention_config("TORCH_SDPA", device="cpu"),
    ):
        layer = Attention(4, 8, role="self")
    assert layer.request.sequence_parallel == "allgather_kv"
    record = AttentionMetadata()
    layer.prepare(record, (6, 6))
    call = Call(6)
    with pytest.raises(MetadataError, match=r"3 ranks was planned.*torchrun"):
        layer(*(tensor[:, :2] for tensor in call.own), record)
