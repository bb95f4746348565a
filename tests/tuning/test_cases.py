"""The reference rows are those of whole attention, whatever is masked; records state what a model would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from omni_attn.facts import AttentionRequest
from omni_attn.ops.reference import reference_attention
from omni_attn.tuning.cases import Case, case_of_request, case_of_shape
from omni_attn.tuning.shapes import SHAPES
from tests.tuning.stubs import CPU, cpu


def case(
    queries: int = 90, keys: int = 100, *, kept: int | None = None, batch: int = 2, **needs: Any
) -> Case:
    request = AttentionRequest(
        **{
            "role": "self",
            "num_heads": 4,
            "head_size": 8,
            "dtype": "float32",
            "max_seqlen_q": queries,
            "max_seqlen_k": keys,
            **needs,
        }
    )
    return Case(name="made up", request=request, batch=batch, kept_keys=kept)


@pytest.mark.parametrize(
    "made",
    [
        case(),
        case(kept=37),
        case(causal=True),
        case(causal=True, kept=37),
        case(window=(5, 3)),
        case(window=(5, -1), causal=True),
        case(num_kv_heads=2),
        case(softmax_scale=0.9, value_head_size=16),
        case(queries=5),
    ],
    ids=str,
)
def test_reference_rows(made: Case) -> None:
    query, key, value = made.tensors(CPU)
    mask = made.record(CPU).attn_mask
    whole = reference_attention(
        query,
        key,
        value,
        softmax_scale=made.request.softmax_scale,
        attn_mask=mask,
        causal=made.request.causal,
        window=made.request.window,
    )[0]
    sample = made.sample(CPU)
    assert len(sample) == min(64, made.lengths[0]) and len(set(sample.tolist())) == len(sample)
    torch.testing.assert_close(made.expected((query, key, value), sample), whole[:, sample])


def test_bytes_are_those_of_the_tensors() -> None:
    made = case(num_kv_heads=2, value_head_size=16)
    query, key, value = made.tensors(CPU)
    output = query.new_empty(2, 90, 4, 16)
    assert made.tensor_bytes == sum(x.numel() * x.element_size() for x in (query, key, value, output))


def test_masked_shapes_state_host_facts() -> None:
    padded = case_of_shape(SHAPES["tiny-padded"], "float32")
    record = padded.record(CPU)
    assert padded.request.mask_usage == "padding"
    assert record.kv_lengths == (266,) and record.mask_mode == "padding"
    assert record.attn_mask is not None and record.attn_mask.shape == (1, 320)
    assert record.attn_mask.sum() == 266 and record.vsa_dit_seq_shape is None
    plain = case_of_shape(SHAPES["tiny"], "float32")
    assert plain.request.mask_usage == "never" and plain.request.video_grid
    assert plain.record(CPU).vsa_dit_seq_shape == (4, 8, 8)


def test_a_role_that_takes_padding_is_measured_with_some() -> None:
    request = case(mask_usage="padding", sequence_parallel="ulysses").request
    made = case_of_request(request)
    assert (made.kept_keys, made.batch, made.request.sequence_parallel) == (94, 1, None)
    assert case_of_request(replace(request, mask_usage="never")).kept_keys is None


def test_the_layer_has_every_need_of_the_request() -> None:
    made = case(causal=True, num_kv_heads=2, window=(3, 0), mask_usage="never", softmax_scale=0.3)
    layer = made.layer(None, cpu())
    assert layer.request == made.request
    query, key, value = made.tensors(CPU)
    expected = made.expected((query, key, value), made.sample(CPU))
    torch.testing.assert_close(
        layer(query, key, value)[:, made.sample(CPU)].double(), expected, atol=1e-5, rtol=0
    )
