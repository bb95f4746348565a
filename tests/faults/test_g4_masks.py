"""Public faults, group G4: masks and padding. B23, B25, B26, B31 here; B28 and B29 in test_g4_padding.py.

Each recipe runs on every registered backend, through the impl in float32 and through a layer.

Waiting for what does not exist yet: the ring path of B26 (sequence parallelism).
"""

from __future__ import annotations

import pytest
import torch

from omni_attn import AttentionMetadata
from omni_attn.ops.reference import reference_attention
from tests.layer.counting import counting_backend
from tests.layer.stands import Stand, assert_close, every_stand, refusal_of, tensors

INF = float("-inf")


def keep_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def honoured_or_refused(
    stand: Stand,
    call: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
) -> list[torch.Tensor]:
    """Outputs with REF's numbers where the facts claim the mask, else a refusal by name and no kernel."""
    expected = reference_attention(*call, attn_mask=mask)[0]
    with stand.kernels() as log:
        outputs = stand.both(*call, AttentionMetadata(attn_mask=mask))
        assert outputs or not log.calls
    for output in outputs:
        assert_close(output, expected)
    return outputs


# -- B23: a mask, causal or scale that the kernel lacks


@every_stand
def test_b23_key_padding(stand: Stand) -> None:
    call = tensors(1, 10, 10, heads=8)
    mask = keep_of([1, 1, 0, 1, 0, 1, 0, 1, 1, 0])
    honoured_or_refused(stand, call, mask)


@every_stand
@pytest.mark.parametrize("shape", [(1, 1, 10, 10), (1, 8, 10, 10)])
def test_b23_arbitrary_masks(stand: Stand, shape: tuple[int, ...]) -> None:
    call = tensors(1, 10, 10, heads=8)
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.4
    honoured_or_refused(stand, call, keep)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    honoured_or_refused(stand, call, bias)


@every_stand
@pytest.mark.parametrize("shape", [(1, 10), (1, 1, 10, 10), (1, 8, 10, 10)])
def test_b23_a_mask_that_keeps_all_equals_none(stand: Stand, shape: tuple[int, ...]) -> None:
    call = tensors(1, 10, 10, heads=8)
    record = AttentionMetadata(attn_mask=torch.ones(shape, dtype=torch.bool))
    with stand.kernels():
        for masked, plain in zip(stand.both(*call, record), stand.both(*call), strict=True):
            assert torch.equal(masked, plain)


@every_stand
def test_b23_causal_and_scale(stand: Stand) -> None:
    call = tensors(1, 10, 10, heads=8)
    for geometry in ({"causal": True}, {"softmax_scale": 0.3}):
        expected = reference_attention(*call, **geometry)[0]
        assert (expected - reference_attention(*call)[0]).abs().max() > 0.1
        with stand.kernels():
            for output in stand.both(*call, **geometry):
                assert_close(output, expected)


def test_b23_a_backend_from_outside_that_knows_no_mask() -> None:
    """Its builder reads nothing, and so the layer refuses for it; what hides nothing runs like None."""
    stand = Stand("MASKLESS")
    call = tensors(1, 10, 10)
    with counting_backend("MASKLESS") as tally, stand.kernels():
        assert not honoured_or_refused(stand, call, keep_of([1] * 6 + [0] * 4))
        assert not tally.products
        plain = stand.run_layer(*call)
        hides_nothing = AttentionMetadata(attn_mask=torch.ones(1, 10, dtype=torch.bool))
        ignored = AttentionMetadata(attn_mask=keep_of([1] * 6 + [0] * 4), mask_mode="none")
        for record in (hides_nothing, ignored):
            assert torch.equal(stand.run_layer(*call, record), plain)


# -- B25: key padding of cross-attention


@every_stand
@pytest.mark.parametrize("queries", [12, 3])
@pytest.mark.parametrize(
    "rows",
    [
        ([1, 1, 1, 1, 1], [1, 1, 0, 0, 0]),
        ([0, 0, 1, 1, 1], [1, 1, 1, 1, 1]),
        ([1, 0, 1, 0, 1], [0, 1, 1, 0, 1]),
        ([1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
    ],
    ids=["right", "left", "holes", "no key"],
)
def test_b25_text_masks(stand: Stand, queries: int, rows: tuple[list[int], ...]) -> None:
    call, mask = tensors(2, queries, 5, heads=2), keep_of(*rows)
    for output in honoured_or_refused(stand, call, mask):
        dead = ~output.abs().sum(-1).bool().any(-1)  # [B, Sq]: rows of zeros
        assert torch.equal(dead, ~mask.any(-1, keepdim=True).expand(2, queries))


@every_stand
def test_b25_one_key(stand: Stand) -> None:
    call = tensors(2, 12, 1, heads=2)
    mask = keep_of([1], [0])
    honoured_or_refused(stand, call, mask)


# -- B26: rows without a key


@every_stand
@pytest.mark.parametrize(
    ("dtype", "encoding"),
    [
        (dtype, encoding)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for encoding in ("bool", "-inf", "finfo.min")
        # the lowest fp16 number is too near to the scores to give the mean
        if (dtype, encoding) != (torch.float16, "finfo.min")
    ],
)
def test_b26_a_dead_row(stand: Stand, dtype: torch.dtype, encoding: str) -> None:
    call = tuple(x.to(dtype) for x in tensors(2, 6, 6, heads=4))
    keep = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    keep[0, :, 2] = False
    keep[1, :, 4, 1:3] = False
    lowest = {"bool": None, "-inf": INF, "finfo.min": torch.finfo(dtype).min}[encoding]
    mask = keep if lowest is None else torch.zeros(2, 1, 6, 6, dtype=dtype).masked_fill(~keep, lowest)
    if stand.limits(*call, AttentionMetadata(attn_mask=mask)).must:
        honoured_or_refused(stand, call, mask)
        return
    with stand.kernels():
        output = stand.run_impl(*call, AttentionMetadata(attn_mask=mask))
    assert_close(output, reference_attention(*call, attn_mask=mask)[0])
    if encoding == "finfo.min":
        mean = call[2][0].double().mean(dim=0)
        assert_close(output[0, 2], mean)
    else:
        assert not output[0, 2].any()


@every_stand
def test_b26_a_dead_item(stand: Stand) -> None:
    call = tensors(2, 6, 6, heads=4)
    mask = keep_of([1, 1, 1, 0, 1, 1], [0] * 6)
    for output in honoured_or_refused(stand, call, mask):
        assert not output[1].any()


# -- B31: what the dtype of a mask means

KEPT = [1, 0, 1, 1, 0, 1]


@every_stand
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1, 6), (1, 1, 6, 6)])
def test_b31_integer_masks_are_refused(stand: Stand, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    mask = torch.tensor([KEPT], dtype=dtype).expand(shape)
    record = AttentionMetadata(attn_mask=mask)
    with stand.kernels():
        text = refusal_of(lambda: stand.run_layer(*tensors(1, 6, 6), record))
    assert stand.name in text
    if not stand.limits(*tensors(1, 6, 6), record).told_by(text):
        assert "attn_mask" in text and str(dtype) in text


@every_stand
@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([KEPT], dtype=torch.float32),  # zeros and ones are numbers to add
        torch.tensor([KEPT], dtype=torch.float32).log(),  # 0 and -inf
        torch.tensor([KEPT], dtype=torch.bfloat16).log(),
        torch.tensor([KEPT], dtype=torch.float64).log(),
    ],
    ids=["0/1", "-inf", "bfloat16", "float64"],
)
def test_b31_float_masks_are_added(stand: Stand, mask: torch.Tensor) -> None:
    call = tensors(1, 6, 6)
    kept_only = reference_attention(*call, attn_mask=torch.tensor([KEPT]).bool())[0]
    added = reference_attention(*call, attn_mask=mask)[0]
    assert torch.equal(added, kept_only) == (mask.min() == INF)
    honoured_or_refused(stand, call, mask)


@every_stand
def test_b31_bool_keeps(stand: Stand) -> None:
    mask = torch.tensor([KEPT], dtype=torch.bool)
    honoured_or_refused(stand, tensors(1, 6, 6), mask)


@every_stand
def test_b31_a_mask_on_another_device(stand: Stand) -> None:
    record = AttentionMetadata(attn_mask=torch.ones(1, 6, dtype=torch.bool, device="meta"))
    with stand.kernels() as log:
        text = refusal_of(lambda: stand.run_layer(*tensors(1, 6, 6), record))
        assert not log.calls
    if not stand.limits(*tensors(1, 6, 6), record).told_by(text):
        assert all(word in text for word in ("attn_mask", "meta", "cpu")), text
