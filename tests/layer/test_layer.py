"""Attention: shapes in and out, and errors that name both sides."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from omni_attn import Attention, AttentionConfig, AttentionMetadata, use_attention_config
from omni_attn.errors import MetadataError
from omni_attn.ops.reference import reference_attention
from tests.layer.stands import HEAD_SIZE, Stand, assert_close, every_stand, tensors


def build(num_heads: int = 4, head_size: int = HEAD_SIZE, **needs: Any) -> Attention:
    with use_attention_config(AttentionConfig(), device="cpu"):
        return Attention(num_heads, head_size, role="self", **needs)


def test_role_is_required() -> None:
    with pytest.raises(TypeError, match="role"):
        Attention(4, HEAD_SIZE)


@every_stand
def test_output_is_query_shaped_and_contiguous(stand: Stand) -> None:
    query, key, value = stand.call(2, 5, 7, kv_heads=2 if stand.facts.gqa else 4)
    with stand.kernels():
        output = stand.run_layer(query, key, value)
    assert output.shape == query.shape and output.is_contiguous() and output.dtype == stand.dtype
    assert_close(output, reference_attention(query, key, value)[0])


def test_value_heads_of_another_size() -> None:
    query, key, value = tensors(2, 5, 7)
    wide = torch.cat([value, value - 1], dim=-1)
    output = build(value_head_size=2 * HEAD_SIZE)(query, key, wide)
    assert output.shape == (2, 5, 4, 2 * HEAD_SIZE)
    assert_close(output, reference_attention(query, key, wide)[0])


def test_scale_causal_and_window_reach_the_kernel() -> None:
    query, key, value = tensors(1, 6, 6)
    for needs in ({"softmax_scale": 0.9}, {"causal": True}, {"causal": True, "window": (2, 0)}):
        expected = reference_attention(query, key, value, **needs)[0]
        assert (expected - reference_attention(query, key, value)[0]).abs().max() > 0.05
        assert_close(build(**needs)(query, key, value), expected)


def test_the_layer_has_no_state_to_load() -> None:
    layer = build()
    assert not list(layer.parameters()) and not layer.state_dict()


def test_a_copied_layer_runs_alike() -> None:
    layer = build()
    query, key, value = tensors(1, 3, 3)
    twin = copy.deepcopy(layer)
    assert twin.group_id == layer.group_id
    assert torch.equal(twin(query, key, value), layer(query, key, value))


@pytest.mark.parametrize(
    ("which", "shape"),
    [
        ("query", (2, 5, 3, HEAD_SIZE)),
        ("query", (2, 5, 4, HEAD_SIZE - 2)),
        ("query", (10, 4, HEAD_SIZE)),
        ("key", (2, 7, 4, HEAD_SIZE)),
        ("value", (2, 7, 2, HEAD_SIZE + 1)),
    ],
)
def test_a_wrong_shape_is_refused_with_both_numbers(which: str, shape: tuple[int, ...]) -> None:
    layer = build(num_kv_heads=2)
    arguments = {
        "query": torch.zeros(2, 5, 4, HEAD_SIZE),
        "key": torch.zeros(2, 7, 2, HEAD_SIZE),
        "value": torch.zeros(2, 7, 2, HEAD_SIZE),
    }
    arguments[which] = torch.zeros(shape)
    with pytest.raises(MetadataError) as raised:
        layer(**arguments)
    heads = 4 if which == "query" else 2
    for part in ('"self"', which, str(shape), str(heads), str(HEAD_SIZE)):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"heads": 2},
        {"size": 64},
    ],
    ids=str,
)
def test_a_wrong_shape_is_refused_after_a_right_one(wrong: dict[str, int]) -> None:
    layer = build()
    right = tensors(1, 3, 3)
    layer(*right)
    for place, tensor in enumerate(tensors(1, 3, 3, **wrong)):
        call = [tensor if index == place else x for index, x in enumerate(right)]
        with pytest.raises(MetadataError, match=re.escape(str(tuple(tensor.shape)))):
            layer(*call)
    with pytest.raises(MetadataError, match=re.escape(f"(1, 2, 4, {HEAD_SIZE})")):
        layer(right[0], right[1], right[2][:, :2])


def test_batch_and_key_lengths_have_to_agree() -> None:
    layer = build()
    query, key, value = tensors(2, 5, 7)
    with pytest.raises(MetadataError, match=r"\(2, 5, 4, 128\).*\(1, 7, 4, 128\)"):
        layer(query, key[:1], value[:1])
    with pytest.raises(MetadataError, match=r"\(2, 7, 4, 128\).*\(2, 6, 4, 128\)"):
        layer(query, key, value[:, :6])


def test_head_counts_that_do_not_divide_are_refused_while_building() -> None:
    with pytest.raises(ValueError, match=r"num_heads=8.*num_kv_heads=3"):
        build(8, num_kv_heads=3)


@pytest.mark.parametrize("role", ["", "self attention", "\n"])
def test_a_role_is_one_word(role: str) -> None:
    with use_attention_config(AttentionConfig(), device="cpu"), pytest.raises(ValueError, match="role"):
        Attention(4, HEAD_SIZE, role=role)


@every_stand
def test_no_record_and_an_empty_record_are_the_same(stand: Stand) -> None:
    query, key, value = stand.call(2, 5, 7)
    with stand.kernels():
        layer = stand.layer(4, HEAD_SIZE)
        plain = layer(query, key, value)
        assert torch.equal(layer(query, key, value, None), plain)
        assert torch.equal(layer(query, key, value, AttentionMetadata()), plain)
        other = stand.call(2, stand.tokens(8), stand.tokens(8))  # another length, no record
        assert_close(layer(*other), reference_attention(*other)[0])


def test_a_mask_needs_the_batch_size_of_the_query() -> None:
    layer, (query, key, value) = build(), tensors(2, 5, 7)
    keep = torch.tensor([[True] * 4 + [False] * 3] * 3)
    with pytest.raises(MetadataError, match=r"3.*2"):
        layer(query, key, value, AttentionMetadata(attn_mask=keep))


def test_a_mask_needs_heads_of_the_layer() -> None:
    layer, (query, key, value) = build(), tensors(1, 5, 7)
    mask = torch.randn(1, 3, 5, 7)
    with pytest.raises(MetadataError, match=r"3 heads.*4"):
        layer(query, key, value, AttentionMetadata(attn_mask=mask))


def test_packed_calls_have_batch_size_one() -> None:
    layer, (query, key, value) = build(packed=True), tensors(2, 6, 6)
    with pytest.raises(MetadataError, match=r"1.*2"):
        layer(query, key, value, AttentionMetadata(cu_seqlens_q=(0, 2, 6)))


def test_a_mask_on_a_layer_that_said_never() -> None:
    layer, (query, key, value) = build(mask_usage="never"), tensors(1, 3, 4)
    hiding = torch.tensor([[True, True, False, True]])
    with pytest.raises(MetadataError, match=r"mask_usage=.never.*attn_mask"):
        layer(query, key, value, AttentionMetadata(attn_mask=hiding))
    ignored = AttentionMetadata(attn_mask=hiding, mask_mode="none")
    assert torch.equal(layer(query, key, value, ignored), layer(query, key, value))


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_pre_hook",
        "register_forward_hook",
        "register_full_backward_pre_hook",
        "register_full_backward_hook",
    ],
)
def test_each_hook_of_a_module_runs(register: str) -> None:
    """Also on a layer that ran before, and that has no other hook."""
    layer, calls = build(), []
    query, key, value = (x.requires_grad_() for x in tensors(1, 3, 3))
    layer(query, key, value)
    getattr(layer, register)(lambda *_: calls.append(register))
    for count in (1, 2):
        layer(query, key, value).sum().backward()
        assert calls == [register] * count


@pytest.mark.parametrize(
    "register",
    [
        "register_module_forward_pre_hook",
        "register_module_forward_hook",
        "register_module_full_backward_pre_hook",
        "register_module_full_backward_hook",
    ],
)
def test_each_hook_of_all_modules_runs(register: str) -> None:
    layer, calls = build(), []
    query, key, value = (x.requires_grad_() for x in tensors(1, 3, 3))
    layer(query, key, value)
    handle = getattr(torch.nn.modules.module, register)(lambda *_: calls.append(register))
    try:
        layer(query, key, value).sum().backward()
    finally:
        handle.remove()
    assert calls == [register]


def test_the_text_of_a_layer_names_role_and_choice() -> None:
    assert "self" in repr(build()) and "TORCH_SDPA" in repr(build())
