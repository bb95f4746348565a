"""Records and tensors that do not fit MiniMax-H3's attention: refused before any kernel runs, with both numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn import AttentionMetadata, PackedPadding, VideoLayout
from omni_attn.backends.sparse_executors import make_executor
from omni_attn.errors import MetadataError
from tests.layer.stands import refusal_of
from tests.models.minimax_h3.attention.h3_layers import SMALL, h3_layer, random_call

FLOAT64 = {"dtype": "float64"}
TOKENS = SMALL.tokens
LAYOUT = SMALL.layout


@pytest.fixture(autouse=True)
def _no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*_: object, **__: object) -> None:
        raise AssertionError("a kernel ran")

    for name in ("pack", "attend"):
        monkeypatch.setattr(make_executor("torch", ""), name, ran)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ran)


@pytest.mark.parametrize(
    ("segments", "spans", "used", "parts"),
    [
        ((70, 5), ((5, 6, 7),), 298, ["285", "298", "(70, 5)", "(5, 6, 7)"]),  # segments that do not sum
        ((70, 5, 13), ((5, 6, 6),), 298, ["268", "298", "(5, 6, 6)"]),  # a grid that does not fill the tail
        ((70, -5), ((5, 6, 7),), 275, ["-5", "0 tokens or more"]),
        ((70,), ((5, 0, 7), (5, 6, 7)), 280, ["(5, 0, 7)", "from 1 on"]),
        ((70,), ((-5, -6, 7),), 280, ["(-5, -6, 7)"]),
        ((70,), ((30, 7),), 280, ["(30, 7)", "three extents"]),
    ],
)
def test_a_layout_that_does_not_add_up(segments: Any, spans: Any, used: int, parts: list[str]) -> None:
    with pytest.raises(MetadataError, match="video_layout") as raised:
        VideoLayout(segments, spans, used)
    assert all(part in str(raised.value) for part in parts), str(raised.value)


def test_a_layout_may_be_written_in_lists() -> None:
    layout = VideoLayout([6, 33], [[3, 5, 6]], TOKENS)  # type: ignore[arg-type]
    assert layout == VideoLayout((6, 33), ((3, 5, 6),), TOKENS) and hash(layout) == hash(layout)


def with_layout(layout: VideoLayout | None = LAYOUT, **fields: Any) -> AttentionMetadata:
    return AttentionMetadata(video_layout=layout, **fields)


@pytest.mark.parametrize("topk", [2, 99], ids=["sparse", "dense"])
@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (AttentionMetadata(), ["video_layout", "none", "129", "TORCH_SDPA"]),
        (AttentionMetadata(vsa_dit_seq_shape=(1, 1, 129)), ["video_layout", "none", "129"]),
        (with_layout(VideoLayout((129,), (), 129)), ["last span", "without spans"]),
        (with_layout(VideoLayout((7, 33), ((3, 5, 6),), 130)), ["130", "129"]),
        (with_layout(vsa_dit_seq_shape=(3, 6, 5)), ["3 x 6 x 5", "3 x 5 x 6", "leave out"]),
        (with_layout(packed_padding=PackedPadding(128, 128)), ["129", "128"]),
        (with_layout(packed_padding=PackedPadding(129, 120)), ["129 and 120"]),
        (with_layout(packed_padding=PackedPadding(140, 140)), ["140", "129"]),
        (with_layout(cu_seqlens_q=(0, 100, 129)), ["cu_seqlens_q"]),
        (
            with_layout(VideoLayout((6,), ((3, 5, 6),), 96), packed_padding=PackedPadding(129, 129)),
            ["96", "129"],
        ),
    ],
)
def test_a_record_that_does_not_fit(topk: int, record: AttentionMetadata, parts: list[str]) -> None:
    layer = h3_layer(topk=topk, tile_size=(2, 4, 4), needs=FLOAT64)
    text = refusal_of(lambda: layer(*random_call(TOKENS)[:3], record))
    assert all(part in text for part in ('"self"', "FASTVIDEO_VSA", *parts)), text


def test_a_mask_is_refused_by_the_layer_or_the_builder() -> None:
    mask = torch.arange(TOKENS)[None] < 100
    call = random_call(TOKENS)[:3]
    assert "never" in refusal_of(lambda: h3_layer(topk=2, needs=FLOAT64)(*call, with_layout(attn_mask=mask)))
    layer = h3_layer(topk=2, needs={**FLOAT64, "mask_usage": None})
    text = refusal_of(lambda: layer(*call, with_layout(attn_mask=mask)))
    assert "attn_mask" in text and "(1, 129)" in text


def test_queries_and_keys_are_one_sequence() -> None:
    query, key, value, _ = random_call(TOKENS)
    layer = h3_layer(topk=2, needs=FLOAT64)
    text = refusal_of(lambda: layer(query, key[:, :100], value[:, :100], SMALL.record()))
    assert "129" in text and "100" in text


@pytest.mark.parametrize("topk", [2, 99], ids=["sparse", "dense"])
@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        (lambda gate: gate[:, :100], ["(1, 129, 2, 8)", "(1, 100, 2, 8)"]),
        (lambda gate: torch.cat([gate, gate], 1)[:, :, :1], ["(1, 129, 2, 8)", "(1, 129, 1, 8)"]),
        (lambda gate: gate[..., :4], ["(1, 129, 2, 8)", "(1, 129, 2, 4)"]),
        (lambda gate: gate.flatten(2), ["(1, 129, 2, 8)", "(1, 129, 16)"]),
        (lambda gate: gate[0, 0, 0], ["(1, 129, 2, 8)", "(8,)"]),
        (lambda gate: gate.float(), ["torch.float64", "torch.float32"]),
        (lambda gate: gate.to("meta"), ["cpu", "meta"]),
    ],
)
def test_a_gate_that_does_not_fit(topk: int, wrong: Any, parts: list[str]) -> None:
    *call, gate = random_call(TOKENS)
    layer = h3_layer(topk=topk, tile_size=(2, 4, 4), needs=FLOAT64)
    with pytest.raises(MetadataError, match="gate_compress") as raised:
        layer(*call, SMALL.record(wrong(gate)))
    assert all(part in str(raised.value) for part in parts), str(raised.value)


def test_head_counts_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"56.*9"):
        h3_layer(topk=2, heads=56, needs={"num_kv_heads": 9})


def test_a_product_of_another_backend() -> None:
    layer = h3_layer(topk=2, needs=FLOAT64)
    assert layer.impl is not None
    with pytest.raises(MetadataError, match=r"FastVideoVSAMetadata.*object"):
        layer.impl.forward(*random_call(TOKENS)[:3], object())
