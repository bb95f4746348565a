"""Public faults, group G4: padding. B28 and B29, on every registered backend.

B28 with TRTLLM_ATTN as the default is in tests/backends/test_trtllm.py, and on the MiniMax-H3 model in
test_minimax_h3.py. Waiting for what does not exist yet: B29 (a) over real ranks (sequence parallelism), whose
padding is stated as a record here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn import Attention, AttentionConfig, AttentionMetadata, PackedPadding, use_attention_config
from omni_attn.ops.reference import reference_attention
from omni_attn.testing import fake_device, fake_kernels
from tests.layer.stands import CUDNN, HEAD_SIZE, Stand, assert_close, every_stand, refusal_of, tensors

REAL, ALIGNED = 58, 64
PREFIX = (torch.arange(ALIGNED) < REAL)[None]
BOUNDARIES = (0, REAL, ALIGNED)


def aligned() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tensors(1, ALIGNED, ALIGNED, heads=2)


FORMS: dict[str, dict[str, Any]] = {
    "cu_seqlens": {"cu_seqlens_q": BOUNDARIES},
    "cu_seqlens tensor": {"cu_seqlens_q": torch.tensor(BOUNDARIES, dtype=torch.int32)},
    "prefix": {"attn_mask": PREFIX},
    "prefix with its mode": {"attn_mask": PREFIX, "mask_mode": "padding"},
    "prefix with its length": {"attn_mask": PREFIX, "kv_lengths": (REAL,)},
    "prefix with cu_seqlens": {"attn_mask": PREFIX, "cu_seqlens_q": BOUNDARIES},
    "packed padding": {"packed_padding": PackedPadding(REAL, REAL)},
    "packed padding with prefix": {"packed_padding": PackedPadding(REAL, REAL), "attn_mask": PREFIX},
}


@every_stand
@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_b28_real_tokens_come_out_as_if_alone(stand: Stand, form: dict[str, Any]) -> None:
    query, key, value = aligned()
    expected = reference_attention(*(x[:, :REAL] for x in (query, key, value)))[0]
    record = AttentionMetadata(**form)
    with stand.kernels():
        for output in stand.both(query, key, value, record):
            assert_close(output[:, :REAL], expected)
            assert bool(output.isfinite().all())


@every_stand
@pytest.mark.parametrize(
    "form",
    [
        {"attn_mask": PREFIX, "cu_seqlens_q": (0, 60, ALIGNED)},
        {"attn_mask": PREFIX, "kv_lengths": (60,)},
        {"attn_mask": PREFIX, "packed_padding": PackedPadding(60, 60)},
    ],
    ids=["cu_seqlens", "kv_lengths", "packed_padding"],
)
def test_b28_a_disagreement_names_both_numbers(stand: Stand, form: dict[str, Any]) -> None:
    with stand.kernels() as log:
        text = refusal_of(lambda: stand.run_layer(*aligned(), AttentionMetadata(**form)))
        assert not getattr(log, "calls", [])
    assert stand.name in text
    if not stand.limits(*aligned(), AttentionMetadata(**form)).told_by(text):
        assert "58" in text and "60" in text


@every_stand
def test_b28_a_hole(stand: Stand) -> None:
    """Alone it is an ordinary mask; beside a length that says prefix it is refused, and the text says what to do."""
    holed = PREFIX.clone()
    holed[0, 20] = False
    call = aligned()
    with stand.kernels():
        expected = reference_attention(*call, attn_mask=holed)[0]
        for output in stand.both(*call, AttentionMetadata(attn_mask=holed)):
            assert_close(output, expected)
        record = AttentionMetadata(attn_mask=holed, kv_lengths=(REAL - 1,))
        text = refusal_of(lambda: stand.run_layer(*call, record))
    assert stand.name in text
    if not stand.limits(*call, record).told_by(text):
        assert "hole" in text and "TORCH_SDPA" in text


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100", "cpu"])
@pytest.mark.parametrize("usage", [None, "padding"])
@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_b28_a_default_never_raises_on_the_models_own_padding(
    name: str, usage: str | None, form: dict[str, Any]
) -> None:
    packages = {"flash-attn-3": "3.0.0", "flash-attn": "2.8.3"}
    device = fake_device(name, packages=packages, cudnn=CUDNN)
    dtype = torch.float32 if name == "cpu" else torch.bfloat16
    call = [x.to(dtype) for x in aligned()]
    packed = "cu_seqlens_q" in form
    with (
        fake_kernels("FLASH_ATTN", "fa3"),
        fake_kernels("FLASH_ATTN", "fa2"),
        fake_kernels("CUDNN_ATTN"),
        use_attention_config(AttentionConfig(), platform=device),
    ):
        layer = Attention(2, HEAD_SIZE, role="self", mask_usage=usage, packed=packed)
        output = layer(*call, AttentionMetadata(**form))
    assert layer.selection is not None and layer.selection.source == "platform default"
    assert_close(output[:, :REAL], reference_attention(*(x[:, :REAL] for x in call))[0])


# -- B29: padding tokens are not attended to


@every_stand
def test_b29_a_sequence_padded_for_two_ranks(stand: Stand) -> None:
    query, key, value = tensors(1, 8, 8)
    expected = reference_attention(*(x[:, :7] for x in (query, key, value)))[0]
    record = AttentionMetadata(packed_padding=PackedPadding(7, 7))
    query[:, 7:], key[:, 7:], value[:, 7:] = (
        torch.full((1, 1, 4, HEAD_SIZE), float("nan")) for _ in range(3)
    )
    with stand.kernels():
        for output in stand.both(query, key, value, record):
            assert_close(output[:, :7], expected)
            assert not output[:, 7:].any()


@every_stand
@pytest.mark.parametrize("padded", [8, 16, 64])
def test_b29_a_prompt_padded_to_any_length(stand: Stand, padded: int) -> None:
    query, text_key, text_value = tensors(1, 12, 6)
    expected = reference_attention(query, text_key, text_value)[0]
    key, value = torch.zeros(2, 1, padded, 4, HEAD_SIZE)
    key[:, :6], value[:, :6] = text_key, text_value
    assert (reference_attention(query, key, value)[0] - expected).abs().max() > 0.05  # unmasked it would show
    mask = (torch.arange(padded) < 6)[None]
    with stand.kernels():
        for fields in ({}, {"kv_lengths": (6,)}):
            for output in stand.both(query, key, value, AttentionMetadata(attn_mask=mask, **fields)):
                assert_close(output, expected)


@every_stand
def test_b29_two_prompts_in_one_batch(stand: Stand) -> None:
    query, key, value = tensors(2, 12, 8)
    mask = torch.arange(8)[None] < torch.tensor([[3], [8]])
    alone = [
        reference_attention(query[i : i + 1], key[i : i + 1, :n], value[i : i + 1, :n])[0]
        for i, n in ((0, 3), (1, 8))
    ]
    with stand.kernels():
        for fields in ({}, {"kv_lengths": (3, 8)}):
            for output in stand.both(query, key, value, AttentionMetadata(attn_mask=mask, **fields)):
                assert_close(output, torch.cat(alone))
