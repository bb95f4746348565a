"""AttentionRequest: a field out of its range is a ValueError that names the field and what was found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn import Attention, use_attention_config
from omni_attn.facts import AttentionRequest, FullAttentionSpec
from omni_attn.testing import fake_device

CACHE = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype="bfloat16")

BAD: list[tuple[str, Any]] = [
    ("role", ""),
    ("role", "two words"),
    ("role", None),
    ("role", 5),
    ("role_category", ""),
    ("role_category", "two words"),
    ("role_category", True),
    ("num_heads", 0),
    ("num_heads", -2),
    ("num_heads", 2.5),
    ("num_heads", 2.0),
    ("num_heads", "2"),
    ("num_heads", True),
    ("num_kv_heads", 0),
    ("num_kv_heads", 1.0),
    ("num_kv_heads", "1"),
    ("num_kv_heads", True),
    ("num_kv_heads", 3),  # of 4 heads
    ("head_size", 0),
    ("head_size", -2),
    ("head_size", 64.0),
    ("head_size", "64"),
    ("head_size", True),
    ("head_size", None),
    ("value_head_size", 0),
    ("value_head_size", -8),
    ("value_head_size", 8.0),
    ("value_head_size", "8"),
    ("value_head_size", True),
    ("dtype", "nope"),
    ("dtype", ""),
    ("dtype", 16),
    ("dtype", True),
    ("dtype", torch.complex64),
    ("mask_usage", "sometimes"),
    ("mask_usage", True),
    ("mask_usage", ["never"]),
    ("sequence_parallel", "x"),
    ("sequence_parallel", True),
    ("softmax_scale", 0.0),
    ("softmax_scale", -1.0),
    ("softmax_scale", float("nan")),
    ("softmax_scale", float("inf")),
    ("softmax_scale", "0.5"),
    ("softmax_scale", True),
    ("max_seqlen_q", -1),
    ("max_seqlen_q", 8.0),
    ("max_seqlen_q", "8"),
    ("max_seqlen_k", -1),
    ("max_seqlen_k", True),
    ("window", 4),
    ("window", (1,)),
    ("window", (1, 2, 3)),
    ("window", (-2, 0)),
    ("window", (0, -2)),
    ("window", (1.5, 0)),
    ("window", (True, 0)),
    ("window", "12"),
    ("window", ("1", "2")),
    ("window", (None, 0)),
    *(
        (name, value)
        for name in ("causal", "packed", "video_grid", "requires_grad", "compile", "batch_invariant")
        for value in ("no", 1)
    ),
]
cases = pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{field}={value!r}" for field, value in BAD])


@cases
def test_a_bad_field_is_named_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        AttentionRequest(**{"role": "self", "num_heads": 4, "head_size": 64, field: value})
    text = str(caught.value)
    assert field in text and str(value).removeprefix("torch.") in text


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_heads", 2.5), ("value_head_size", 0), ("dtype", "nope"), ("window", (1,)), ("causal", "no")],
)
def test_a_layer_refuses_the_same(field: str, value: Any) -> None:
    needs = {"num_heads": 4, "head_size": 64, "role": "self"} | {field: value}
    with use_attention_config(None, platform=fake_device("cpu")), pytest.raises(ValueError, match=field):
        Attention(**needs)


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("num_heads", None, None),
        ("head_size", -1, -1),
        ("value_head_size", -1, -1),
        ("dtype", None, None),
        ("dtype", torch.bfloat16, "bfloat16"),
        ("dtype", "torch.float16", "float16"),
        ("dtype", "float8_e4m3fn", "float8_e4m3fn"),
        ("window", (-1, -1), (-1, -1)),
        ("window", [4, 0], (4, 0)),
        ("max_seqlen_q", 0, 0),
        ("softmax_scale", 1, 1),
        ("kv_cache", CACHE, CACHE),
    ],
    ids=str,
)
def test_the_edges_of_the_ranges(field: str, value: Any, kept: Any) -> None:
    request = AttentionRequest(**{"role": "self", "num_heads": 4, "head_size": 64, field: value})
    assert getattr(request, field) == kept
    hash(request)


def test_what_is_left_out_follows_from_the_rest() -> None:
    request = AttentionRequest(role="self", num_heads=4, head_size=64)
    assert (request.num_kv_heads, request.value_head_size, request.default_scale) == (4, 64, True)
    unknown = AttentionRequest(role="self", num_heads=None, head_size=-1, num_kv_heads=2)
    assert (unknown.num_kv_heads, unknown.value_head_size, unknown.default_scale) == (2, -1, True)


@pytest.mark.parametrize("size", [None, -1, 0, 2.5])
def test_a_layer_needs_to_know_its_geometry(size: Any) -> None:
    with use_attention_config(None, platform=fake_device("cpu")):
        for num_heads, head_size in ((4, size), *(() if size == -1 else ((size, 64),))):
            with pytest.raises(ValueError, match="num_heads" if head_size == 64 else "head_size"):
                Attention(num_heads, head_size, role="self")
