"""Public faults, group G5: layout, causal alignment, grouped heads, short and unequal lengths. B32, B34, B35, B37.

Each recipe runs on every registered backend, through the impl in float32 and through a layer.

Waiting for what does not exist yet: B37 on TRTLLM_ATTN with k_block_size=16 and on SAGE_ATTN, whose kernels give NaN
below one block; B35 on kernels that know equal head counts only.
"""

from __future__ import annotations

import pytest
import torch

from omni_attn import AttentionMetadata, PackedPadding
from omni_attn.ops.reference import reference_attention
from tests.layer.stands import Stand, assert_close, every_stand, outcome_of, refusal_of, tensors

SHORT = (1, 14, 15, 16, 17, 127, 128, 129)


# -- B32: the layout


@every_stand
@pytest.mark.parametrize(("tokens", "heads"), [(4, 4), (5, 3)])
def test_b32_tokens_and_heads_are_not_swapped(stand: Stand, tokens: int, heads: int) -> None:
    call = tensors(1, tokens, tokens, heads=heads)
    expected = reference_attention(*call)[0]
    if tokens == heads:
        swapped = reference_attention(*(x.transpose(1, 2) for x in call))[0].transpose(1, 2)
        assert (swapped - expected).abs().max() > 0.5  # nothing fails by shape, but the answer would
    with stand.kernels():
        for output in stand.both(*call):
            assert_close(output, expected)
            assert output.shape == (1, tokens, heads, 8)
            assert output.stride() == (tokens * heads * 8, heads * 8, 8, 1)


@every_stand
def test_b32_strided_inputs(stand: Stand) -> None:
    """Slices of one fused projection, and tensors that are contiguous in another order, with every last stride."""
    fused = torch.stack(tensors(2, 5, 5), dim=2).to(stand.dtype)
    before, parts = fused.clone(), fused.unbind(2)
    orders = ([x.transpose(1, n).contiguous().transpose(1, n) for x in parts] for n in (2, 3))
    doubled = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in parts]
    for call in (parts, *orders, doubled):
        with stand.kernels():
            output = stand.run_layer(*call)
        assert_close(output, reference_attention(*call)[0])
        assert output.is_contiguous()
    assert torch.equal(fused, before)


@every_stand
@pytest.mark.parametrize(
    "fields",
    [
        {"attn_mask": torch.tensor([[True, False, True, True, False]])},
        {"cu_seqlens_q": (0, 2, 5)},
        {"cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32)},
    ],
    ids=["mask", "host boundaries", "boundaries"],
)
def test_b32_a_strided_last_dimension_of_masked_and_packed_calls(
    stand: Stand, fields: dict[str, torch.Tensor]
) -> None:
    call = [x.to(stand.dtype) for x in tensors(1, 5, 5)]
    strided = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in call]
    assert all(x.stride(-1) != 1 for x in strided)
    with stand.kernels():
        output, expected = (stand.run_layer(*given, AttentionMetadata(**fields)) for given in (strided, call))
    assert_close(output, expected.double())
    assert output.is_contiguous()


# -- B34: causal is aligned at the bottom right


@every_stand
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3), (4, 4)])
def test_b34_one_alignment(stand: Stand, queries: int, keys: int) -> None:
    call = tensors(1, queries, keys)
    expected = reference_attention(*call, causal=True)[0]
    if queries > keys:
        assert not expected[:, : queries - keys].any()  # queries before the first key see nothing
    with stand.kernels():
        if not stand.facts.causal:
            text = refusal_of(lambda: stand.layer(4, 8, causal=True))
            assert stand.name in text and "causal" in text
            return
        for output in stand.both(*call, causal=True):
            assert_close(output, expected)


@every_stand
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3), (5, 5)])
def test_b34_with_key_padding(stand: Stand, queries: int, keys: int) -> None:
    call = tensors(2, queries, keys)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)[:, :keys]
    record = AttentionMetadata(attn_mask=mask)
    with stand.kernels():
        if stand.facts.causal and stand.facts.causal_with_mask:
            expected = reference_attention(*call, attn_mask=mask, causal=True)[0]
            for output in stand.both(*call, record, causal=True):
                assert_close(output, expected)
            return
        at_selection = refusal_of(lambda: stand.layer(4, 8, causal=True, mask_usage="padding"))
        at_build = refusal_of(lambda: stand.run_layer(*call, record, causal=True))
    for text in (at_selection, at_build):
        assert stand.name in text and "causal" in text


@every_stand
@pytest.mark.parametrize("window", [(2, 1), (1, -1), (0, 0)])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 7), (7, 3)])
def test_b34_windows_have_the_same_alignment(
    stand: Stand, queries: int, keys: int, window: tuple[int, int]
) -> None:
    call = tensors(1, queries, keys)
    with stand.kernels():
        if not stand.facts.window:
            assert "window" in refusal_of(lambda: stand.layer(4, 8, window=window))
            return
        for causal in {False, stand.facts.causal}:
            expected = reference_attention(*call, causal=causal, window=window)[0]
            for output in stand.both(*call, causal=causal, window=window):
                assert_close(output, expected)


# -- B35: grouped heads


@every_stand
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_b35_heads_repeat_interleaved(stand: Stand, kv_heads: int, masked: bool) -> None:
    call = tensors(2, 5, 7, heads=8, kv_heads=kv_heads, size=16)
    mask = torch.tensor([[1, 1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0, 0]], dtype=torch.bool) if masked else None
    with stand.kernels():
        if kv_heads != 8 and not stand.facts.gqa:
            text = refusal_of(lambda: stand.layer(8, 16, num_kv_heads=kv_heads))
            assert stand.name in text and "8" in text and str(kv_heads) in text
            return
        if masked and "padding" not in stand.facts.mask_kinds:
            assert "attn_mask" in refusal_of(
                lambda: stand.run_layer(*call, AttentionMetadata(attn_mask=mask))
            )
            return
        for output in stand.both(*call, AttentionMetadata(attn_mask=mask)):
            assert_close(output, reference_attention(*call, attn_mask=mask)[0])


@every_stand
def test_b35_counts_that_do_not_divide(stand: Stand) -> None:
    with stand.kernels(), pytest.raises(ValueError, match=r"8.*3"):
        stand.layer(8, 16, num_kv_heads=3)


@every_stand
def test_b35_other_heads_than_declared(stand: Stand) -> None:
    with stand.kernels() as log:
        declared = 2 if stand.facts.gqa else 8
        layer = stand.layer(8, 16, num_kv_heads=declared)
        call = (x.to(stand.dtype) for x in tensors(1, 5, 5, heads=8, kv_heads=4, size=16))
        text = refusal_of(lambda: layer(*call))
        assert not getattr(log, "calls", [])
    assert f"{declared} heads" in text and "(1, 5, 4, 16)" in text


# -- B37: short and unequal lengths


@every_stand
@pytest.mark.parametrize("queries", SHORT)
def test_b37_lengths_around_a_block(stand: Stand, queries: int) -> None:
    for keys in SHORT:
        call = tensors(1, queries, keys, heads=2, size=16)
        expected = reference_attention(*call)[0]
        with stand.kernels():
            if keys >= stand.facts.min_key_tokens:
                for output in stand.both(*call):
                    assert_close(output, expected)
                continue
            minimum = str(stand.facts.min_key_tokens)
            for refused in (
                lambda keys=keys: stand.layer(2, 16, max_seqlen_q=queries, max_seqlen_k=keys),
                lambda call=call: stand.run_layer(*call),
            ):
                text = refusal_of(refused)
                assert stand.name in text and minimum in text and f"{keys} " in text.replace(".", " ")


@every_stand
@pytest.mark.parametrize(
    "record",
    [
        AttentionMetadata(cu_seqlens_q=(0, 2, 5), cu_seqlens_k=(0, 1, 5)),
        AttentionMetadata(cu_seqlens_q=(0, 4, 5), cu_seqlens_k=(0, 4, 5)),
        AttentionMetadata(packed_padding=PackedPadding(5, 1)),
        AttentionMetadata(attn_mask=torch.tensor([[True] + [False] * 4])),
        AttentionMetadata(attn_mask=torch.tensor([[True] + [False] * 4]), kv_lengths=(1,)),
    ],
    ids=["first sequence", "last sequence", "packed_padding", "mask", "kv_lengths"],
)
def test_b37_one_key_inside_a_longer_call(stand: Stand, record: AttentionMetadata) -> None:
    """A kernel that needs more keys than one part of the call has must not be handed that part."""
    call = tensors(1, 5, 5)
    expected = torch.zeros(1, 5, 4, 8, dtype=torch.float64)
    if record.cu_seqlens_q is not None:
        assert isinstance(record.cu_seqlens_q, tuple)
        cu_k = record.cu_seqlens_k
        assert isinstance(cu_k, tuple)
        for part in range(2):
            rows = slice(*record.cu_seqlens_q[part : part + 2])
            keys = slice(*cu_k[part : part + 2])
            expected[:, rows] = reference_attention(call[0][:, rows], call[1][:, keys], call[2][:, keys])[0]
    else:
        expected = reference_attention(call[0], call[1][:, :1], call[2][:, :1])[0]
    with stand.kernels():
        for run in (stand.run_impl, stand.run_layer):
            outcome = outcome_of(lambda run=run: run(*call, record))
            if isinstance(outcome, str):  # by name, with the minimum
                assert stand.facts.min_key_tokens > 1
                assert stand.name in outcome and str(stand.facts.min_key_tokens) in outcome
            else:
                assert_close(outcome, expected)


@every_stand
@pytest.mark.parametrize("batch", [1, 2])
def test_b37_no_keys_and_no_queries(stand: Stand, batch: int) -> None:
    with stand.kernels():
        for output in stand.both(*tensors(batch, 5, 0)):
            assert output.shape == (batch, 5, 4, 8) and not output.any()
        for output in stand.both(*tensors(batch, 0, 5)):
            assert output.shape == (batch, 0, 4, 8)
