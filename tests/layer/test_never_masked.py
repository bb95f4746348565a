"""mask_usage="never" is a promise of the layer: whatever a mask hides, and whoever prepared the record before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from omni_attn import AttentionMetadata, prepare_attention
from omni_attn.errors import MetadataError
from tests.layer.stands import Stand, every_stand, tensors

TOKENS = (3, 4)
ALL_TRUE = torch.ones(1, 4, dtype=torch.bool)
HIDING = torch.tensor([[True, True, False, True]])
MASKS: dict[str, dict[str, object]] = {
    "hiding": {"attn_mask": HIDING},
    "all true": {"attn_mask": ALL_TRUE},
    "all true 4-D": {"attn_mask": ALL_TRUE[:, None, None].expand(1, 1, *TOKENS)},
    "adds nothing": {"attn_mask": torch.zeros(1, 4)},
    "said to be padding": {"attn_mask": ALL_TRUE, "mask_mode": "padding"},
    "with its lengths": {"attn_mask": ALL_TRUE, "kv_lengths": (4,)},
}
Use = Callable[[Stand, AttentionMetadata], object]


def call(stand: Stand) -> list[torch.Tensor]:
    return [x.to(stand.dtype) for x in tensors(1, *TOKENS)]


def first_call(stand: Stand, record: AttentionMetadata) -> object:
    return stand.layer(4, 8, mask_usage="never")(*call(stand), record)


def later_call(stand: Stand, record: AttentionMetadata) -> object:
    layer = stand.layer(4, 8, mask_usage="never")
    layer(*call(stand))
    return layer(*call(stand), record)


def preparation(stand: Stand, record: AttentionMetadata) -> object:
    return prepare_attention(
        stand.layer(4, 8, mask_usage="never"), {"self": record}, lengths={"self": TOKENS}
    )


def call_after_a_masked_layer(stand: Stand, record: AttentionMetadata) -> object:
    masked, never = stand.layer(4, 8), stand.layer(4, 8, mask_usage="never")
    assert masked.group_id == never.group_id
    with_everything_kept = AttentionMetadata(attn_mask=ALL_TRUE)
    masked(*call(stand), record if "padding" in stand.facts.mask_kinds else with_everything_kept)
    return never(*call(stand), record)


@every_stand
@pytest.mark.parametrize("use", [first_call, later_call, preparation, call_after_a_masked_layer])
@pytest.mark.parametrize("fields", MASKS.values(), ids=MASKS)
def test_any_mask_is_refused(stand: Stand, use: Use, fields: dict[str, object]) -> None:
    with stand.kernels(), pytest.raises(MetadataError, match=r'"self".*mask_usage="never".*attn_mask'):
        use(stand, AttentionMetadata(**fields))


@every_stand
@pytest.mark.parametrize("use", [first_call, later_call, preparation, call_after_a_masked_layer])
def test_a_mask_that_the_record_itself_calls_none_is_ignored(stand: Stand, use: Use) -> None:
    with stand.kernels():
        output = use(stand, AttentionMetadata(attn_mask=HIDING, mask_mode="none"))
        plain = stand.layer(4, 8, mask_usage="never")(*call(stand))
    assert output is None or torch.equal(output, plain)
