"""Joint streams as layer inputs: one device joins them, and what does not fit is refused before anything is sent."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.errors import MetadataError
from omni_attn.parallel import Parallel
from omni_attn.testing import fake_ranks
from tests.parallel.scene import CONFIGS, Call, every_mode, randn

Order = Literal["front", "rear"]
both_orders = pytest.mark.parametrize("order", ["front", "rear"])


@both_orders
@pytest.mark.parametrize("joint", [(3, 3), (2, 5), (0, 2)])
def test_one_device_joins_them(order: Order, joint: tuple[int, int]) -> None:
    call = Call(5, 4, joint=joint, order=order, kv_heads=2)
    torch.testing.assert_close(call.alone(), call.expected().float(), atol=1e-5, rtol=0)


@both_orders
def test_without_preparation_too(order: Order) -> None:
    call = Call(5, joint=(2, 2), order=order)
    output = call.layer()(*call.own, call.record().with_layer_inputs(**call.streams))
    torch.testing.assert_close(output, call.expected().float(), atol=1e-5, rtol=0)


def test_both_orders_hold_the_same_rows() -> None:
    front, rear = (Call(5, joint=(2, 2), order=order).alone() for order in ("front", "rear"))
    torch.testing.assert_close(front, rear.roll(2, dims=1))


@both_orders
@pytest.mark.parametrize("is_float", [False, True])
def test_masks_of_causal_layers_are_in_the_stated_order(order: Order, is_float: bool) -> None:
    """On one device as well the joint keys come first, and the mask's columns with them."""
    scores = randn(2, 1, 4, 7, seed=7)
    fields = {"attn_mask": scores if is_float else scores > -0.3}
    call = Call(4, joint=(0, 3), order=order, needs={"causal": True}, fields=fields)
    torch.testing.assert_close(call.alone(), call.expected().float(), atol=1e-5, rtol=0)


@both_orders
@pytest.mark.parametrize("config", [None, *CONFIGS.values()], ids=str)
def test_more_queries_than_keys_in_a_causal_layer_hide_joint_keys(
    config: dict[str, Any] | None, order: Order
) -> None:
    """The triangle ends with the last key, so it would reach into keys that all queries are to see."""
    call = Call(6, 4, joint=(0, 3), order=order, needs={"causal": True})
    with pytest.raises(MetadataError, match=r"3 joint keys.*6 queries over 4 other keys"):
        call.alone() if config is None else call.on_ranks(config)
    Call(4, 6, joint=(0, 3), order=order, needs={"causal": True}).alone()


@every_mode
def test_a_record_without_its_streams_is_refused_in_the_next_call_too(config: dict[str, Any]) -> None:
    call = Call(8, joint=(0, 3))

    def work(parallel: Parallel) -> None:
        layer, record = call.layer(), call.record()
        prepare_attention(layer, {"self": record}, {"self": call.whole_lengths})
        own = [parallel.split(tensor) for tensor in call.own]
        layer(*own, record.with_layer_inputs(**call.streams))
        with pytest.raises(MetadataError, match=r"came with \(0, 0, 0\) tokens"):
            layer(*own, record)

    fake_ranks(config, work)


def test_compiled_code_joins_them() -> None:
    call = Call(5, joint=(2, 2), order="rear")
    layer, record = call.layer(), call.record()
    prepare_attention(layer, {"self": record}, {"self": call.whole_lengths})
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    output = compiled(*call.own, record.with_layer_inputs(**call.streams))
    torch.testing.assert_close(output, call.expected().float(), atol=1e-5, rtol=0)


def on_every_rank(config: dict[str, Any], call: Call, record: AttentionMetadata, **streams: Any) -> str:
    """The one text with which a prepared call is refused on every rank, and without ranks."""
    texts: list[str] = []

    def run(parallel: Parallel | None) -> None:
        layer = call.layer()
        if parallel is None:
            prepare_attention(layer, {"self": record}, {"self": call.whole_lengths})
        own = call.own if parallel is None else [parallel.split(tensor) for tensor in call.own]
        with pytest.raises(MetadataError) as raised:
            layer(*own, record.with_layer_inputs(**streams))
        texts.append(str(raised.value))

    run(None)
    fake_ranks(config, run)
    assert len(set(texts)) == 1, texts
    return texts[0]


@every_mode
@pytest.mark.parametrize(
    ("stated", "names", "found"),
    [
        ((2, 2), (), "(0, 0, 0) tokens"),
        ((2, 2), ("joint_query",), "(2, 0, 0) tokens"),
        ((2, 2), ("joint_query", "joint_key"), "(2, 2, 0) tokens"),
        ((0, 2), ("joint_query", "joint_key", "joint_value"), "(2, 2, 2) tokens"),
        ((0, 0), ("joint_key", "joint_value"), "(0, 2, 2) tokens"),
        ((1, 2), ("joint_query", "joint_key", "joint_value"), "(2, 2, 2) tokens"),
    ],
)
def test_streams_and_statement_have_to_agree(
    config: dict[str, Any], stated: tuple[int, int], names: tuple[str, ...], found: str
) -> None:
    call = Call(6, joint=(2, 2))
    record = AttentionMetadata(joint_tokens=stated)
    text = on_every_rank(config, call, record, **{name: call.streams[name] for name in names})
    assert found in text and f"joint_tokens=({stated[0]}, {stated[1]})" in text and 'role "self"' in text


@every_mode
@pytest.mark.parametrize(
    ("name", "change", "needs"),
    [
        ("joint_query", lambda stream: stream[:, :, :2], "needs [2, tokens, 4, 8]"),
        ("joint_key", lambda stream: stream.repeat(1, 1, 2, 1), "needs [2, tokens, 2, 8]"),
        ("joint_value", lambda stream: stream[:1], "needs [2, tokens, 2, 12]"),
        ("joint_value", lambda stream: stream[..., :8], "needs [2, tokens, 2, 12]"),
        ("joint_key", lambda stream: stream.double(), "torch.float64"),
    ],
)
def test_streams_have_to_go_with_the_query(
    config: dict[str, Any], name: str, change: Any, needs: str
) -> None:
    call = Call(8, joint=(2, 2), kv_heads=2, value_size=12)
    streams = {**call.streams, name: change(call.streams[name])}
    alone, texts = call.record(), []
    with pytest.raises(MetadataError) as raised:
        call.layer()(*call.own, alone.with_layer_inputs(**streams))
    assert name in str(raised.value) and needs in str(raised.value)

    def work(parallel: Parallel) -> None:
        layer, record = call.layer(), call.record().with_layer_inputs(**streams)
        own = [parallel.split(tensor) for tensor in call.own]
        with pytest.raises(MetadataError) as raised:
            layer(*own, record)
        texts.append(str(raised.value))

    fake_ranks(config, work)
    assert len(set(texts)) == 1 and name in texts[0] and needs in texts[0]


@every_mode
@both_orders
def test_joint_queries_have_no_place_in_a_causal_order(config: dict[str, Any], order: Order) -> None:
    call = Call(6, joint=(2, 2), order=order, needs={"causal": True})
    refused = rf"causal.*2 tokens, joint_order='{order}'"
    with pytest.raises(MetadataError, match=refused):
        call.alone()

    def work(parallel: Parallel) -> None:
        with pytest.raises(MetadataError, match=refused):
            prepare_attention(call.layer(), {"self": call.record()}, {"self": call.whole_lengths})

    fake_ranks(config, work)


def test_joint_keys_have_no_place_in_a_window() -> None:
    """Those behind the window would be lost to most queries, silently."""
    needs = {"causal": True, "window": (2, 0)}
    call = Call(6, joint=(0, 3), needs=needs)
    with pytest.raises(MetadataError, match=r"window of \(2, 0\).*3 keys, joint_order='front'"):
        call.alone()
    with pytest.raises(MetadataError, match=r"window of \(2, 0\)"):
        call.on_ranks({"ulysses_degree": 2})


@every_mode
@pytest.mark.parametrize("lengths", [(2, 9), (9, 3)])
def test_lengths_count_the_joint_streams(config: dict[str, Any], lengths: tuple[int, int]) -> None:
    call = Call(6, joint=(3, 4))

    def work(parallel: Parallel) -> None:
        with pytest.raises(
            MetadataError, match=rf"joint_tokens=\(3, 4\) of {lengths[0]} query and {lengths[1]}"
        ):
            prepare_attention(call.layer(), {"self": call.record()}, {"self": lengths})

    fake_ranks(config, work)


def test_more_queries_than_keys_among_the_streams_are_refused() -> None:
    with pytest.raises(MetadataError, match=r"joint_tokens=\(3, 2\)"):
        AttentionMetadata(joint_tokens=(3, 2))
    with pytest.raises(MetadataError, match="joint_order='middle'"):
        AttentionMetadata(joint_tokens=(2, 2), joint_order="middle")  # type: ignore[arg-type]


def test_a_record_is_prepared_once_for_all_blocks() -> None:
    """Streams change from block to block, and what was prepared stays."""
    with use_attention_config("TORCH_SDPA", device="cpu"):
        blocks = torch.nn.ModuleList([Attention(4, 8, role="self") for _ in range(3)])
    call = Call(5, joint=(2, 2))
    record = call.record()
    prepare_attention(blocks, {"self": record}, {"self": call.whole_lengths})
    assert len(record.memo) == 1
    (made,) = record.memo.values()
    for number, block in enumerate(blocks):
        streams = {name: stream + number for name, stream in call.streams.items()}
        beside = record.with_layer_inputs(**streams)
        block(*call.own, beside)
        assert beside.memo is record.memo and list(record.memo.values()) == [made]
