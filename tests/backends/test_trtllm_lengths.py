"""TRTLLM_ATTN and lengths: equal ones alone for fmha_v2; made once for a shape, never inside a capture."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from omni_attn import AttentionMetadata, PackedPadding
from omni_attn.backends import trtllm_lengths
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.ops.reference import reference_attention
from omni_attn.testing import fake_kernels
from tests.backends.trtllm_layers import build_layer, relative_error, tensors

RAGGED, FMHA_V2 = "trtllm_ragged_attention_deepseek", "trtllm_fmha_v2_prefill"


# -- fmha_v2 and lengths: right where both are equal, wrong or out of bounds where there are more keys


@pytest.mark.parametrize(
    ("lengths", "fields", "found"),
    [
        ((6, 8), {}, "found 6 and 8"),
        ((8, 6), {}, "found 8 and 6"),
        ((8, 8), {"attn_mask": torch.arange(8)[None] < 5, "kv_lengths": (5,)}, "found 8 and 5"),
        ((9, 9), {"packed_padding": PackedPadding(9, 7)}, "found 9 and 7"),
        ((9, 9), {"cu_seqlens_q": (0, 4, 9), "cu_seqlens_k": (0, 5, 9)}, "found 4 and 5"),
    ],
    ids=["more keys", "more queries", "prefix", "padding", "documents"],
)
def test_fmha_v2_refuses_unequal_lengths_and_ragged_takes_them(
    lengths: tuple[int, int], fields: dict[str, Any], found: str
) -> None:
    call, record = tensors(1, *lengths), AttentionMetadata(**fields)
    with fake_kernels("TRTLLM_ATTN", "fmha_v2") as log, pytest.raises(MetadataError) as caught:
        build_layer("fmha_v2")(*call, record)
    for word in ["TRTLLM_ATTN (fmha_v2) needs equal query and key lengths", found, "add one as fallback"]:
        assert word in str(caught.value)
    assert not log.calls
    with fake_kernels("TRTLLM_ATTN", "ragged") as log:
        assert bool(build_layer()(*call, record).isfinite().all())
    assert log.calls == [RAGGED]


@pytest.mark.parametrize(
    ("bounds_q", "bounds_k"),
    [((0, 4, 4, 9), (0, 4, 4, 9)), ((0, 4, 4, 7), (0, 4, 9, 12))],
    ids=["an empty one", "keys that nobody asks for"],
)
def test_fmha_v2_takes_documents_of_equal_lengths(
    bounds_q: tuple[int, ...], bounds_k: tuple[int, ...]
) -> None:
    call = tensors(1, 9, bounds_k[-1])
    with fake_kernels("TRTLLM_ATTN", "fmha_v2") as log:
        output = build_layer("fmha_v2")(
            *call, AttentionMetadata(cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k)
        )
    assert set(log.calls) == {FMHA_V2}
    for (a, b), (c, d) in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True):
        if b > a:
            expected = reference_attention(call[0][:, a:b], call[1][:, c:d], call[2][:, c:d])[0]
            assert relative_error(output[:, a:b], expected) < 3e-3
    assert not output[:, bounds_q[-1] :].any()


def test_fmha_v2_takes_boundaries_on_the_device_where_they_are_the_same_for_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One tensor for queries and keys says that lengths are equal; two say nothing to the host."""
    monkeypatch.setattr("omni_attn.backends.stated._on_host", lambda boundaries: None)
    call, bounds = tensors(1, 9, 9), torch.tensor([0, 4, 9], dtype=torch.int32)
    with fake_kernels("TRTLLM_ATTN", "fmha_v2"):
        layer = build_layer("fmha_v2")
        output = layer(*call, AttentionMetadata(cu_seqlens_q=bounds))
        with pytest.raises(MetadataError, match=r"fmha_v2 needs equal query and key lengths.*tuples of ints"):
            layer(*call, AttentionMetadata(cu_seqlens_q=bounds, cu_seqlens_k=bounds.clone()))
    for rows in (slice(0, 4), slice(4, 9)):
        expected = reference_attention(*(x[:, rows] for x in call))[0]
        assert relative_error(output[:, rows], expected) < 3e-3


@pytest.mark.parametrize(("makes", "runs"), [("ragged", "fmha_v2"), ("fmha_v2", "ragged")])
def test_what_one_variant_prepared_is_refused_by_the_other(makes: str, runs: str) -> None:
    with fake_kernels("TRTLLM_ATTN", makes):
        product = build_layer(makes).prepare(AttentionMetadata(), (6, 6)).product
    with fake_kernels("TRTLLM_ATTN", runs) as log:
        impl = build_layer(runs).impl
        assert impl is not None
        with pytest.raises(MetadataError, match=rf"TRTLLM_ATTN \({runs}\).*made_for {makes}"):
            impl.forward(*tensors(1, 6, 6), product)
    assert not log.calls


def test_fmha_v2_is_refused_for_unequal_lengths_when_it_is_chosen() -> None:
    hints = {"max_seqlen_q": 32760, "max_seqlen_k": 512}
    with fake_kernels("TRTLLM_ATTN", "fmha_v2"):
        with pytest.raises(
            BackendRejectedError, match="needs equal query and key lengths, found 32760 and 512"
        ):
            build_layer("fmha_v2", needs=hints)
        build_layer("fmha_v2", needs=hints | {"max_seqlen_k": 32760})
    with fake_kernels("TRTLLM_ATTN", "ragged"):
        build_layer(needs=hints)


# -- what a call makes


@pytest.mark.parametrize(("variant", "keys"), [("ragged", 37), ("fmha_v2", 31)])
def test_lengths_and_workspace_are_made_once(
    variant: str, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_kernels("TRTLLM_ATTN", variant), torch.no_grad():
        layers = [build_layer(variant) for _ in range(3)]
        call = tensors(2, 31, keys)
        layers[0](*call)
        monkeypatch.setattr(trtllm_lengths, "_refuse_capture", lambda *_: pytest.fail("made again"))
        for layer in layers:
            layer(*call)


def test_nothing_is_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cuda", 7)
    for make in (
        lambda: trtllm_lengths.even_lengths(1, 5, 5, device),
        lambda: trtllm_lengths.packed_lengths((5,), (5,), device),
        lambda: trtllm_lengths.workspace(device, 8),
    ):
        with pytest.raises(MetadataError, match="once before the capture"):
            make()


def test_more_tokens_than_int32_counts() -> None:
    with pytest.raises(MetadataError, match=r"TRTLLM_ATTN.*2147483648"):
        trtllm_lengths.even_lengths(2, 2**30, 5, torch.device("cpu"))
