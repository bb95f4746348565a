"""mask_usage="never" is a promise of the layer: whatever a mask hides, and whoever prepared the record before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from omni_attn import AttentionMetadata, prepare_attention
from omni_attn.errors import MetadataError
from tests.layer.stands import HEAD_SIZE, Stand, every_stand


def all_true(keys: int) -> torch.Tensor:
    return torch.ones(1, keys, dtype=torch.bool)


def hiding(keys: int) -> torch.Tensor:
    return torch.arange(keys)[None] != 2


#: Fields of a record for a number of query and key tokens.
MASKS: dict[str, Callable[[int, int], dict[str, object]]] = {
    "hiding": lambda queries, keys: {"attn_mask": hiding(keys)},
    "all true": lambda queries, keys: {"attn_mask": all_true(keys)},
    "all true 4-D": lambda queries, keys: {"attn_mask": all_true(keys).expand(1, 1, queries, keys)},
    "adds nothing": lambda queries, keys: {"attn_mask": torch.zeros(1, keys)},
    "said to be padding": lambda queries, keys: {"attn_mask": all_true(keys), "mask_mode": "padding"},
    "with its lengths": lambda queries, keys: {"attn_mask": all_true(keys), "kv_lengths": (keys,)},
}
Use = Callable[[Stand, AttentionMetadata], object]


def call(stand: Stand) -> list[torch.Tensor]:
    return stand.call(1, 3, 4)


def first_call(stand: Stand, record: AttentionMetadata) -> object:
    return stand.layer(4, HEAD_SIZE, mask_usage="never")(*call(stand), record)


def later_call(stand: Stand, record: AttentionMetadata) -> object:
    layer = stand.layer(4, HEAD_SIZE, mask_usage="never")
    layer(*call(stand))
    return layer(*call(stand), record)


def preparation(stand: Stand, record: AttentionMetadata) -> object:
    return prepare_attention(
        stand.layer(4, HEAD_SIZE, mask_usage="never"), {"self": record}, lengths={"self": stand.lengths(3, 4)}
    )


def call_after_a_masked_layer(stand: Stand, record: AttentionMetadata) -> object:
    masked, never = stand.layer(4, HEAD_SIZE), stand.layer(4, HEAD_SIZE, mask_usage="never")
    assert masked.group_id == never.group_id
    with_everything_kept = AttentionMetadata(attn_mask=all_true(stand.lengths(3, 4)[1]))
    masked(*call(stand), record if "padding" in stand.facts.mask_kinds else with_everything_kept)
    return never(*call(stand), record)


@every_stand
@pytest.mark.parametrize("use", [first_call, later_call, preparation, call_after_a_masked_layer])
@pytest.mark.parametrize("fields", MASKS.values(), ids=MASKS)
def test_any_mask_is_refused(stand: Stand, use: Use, fields: Callable[[int, int], dict[str, object]]) -> None:
    with stand.kernels(), pytest.raises(MetadataError, match=r'"self".*mask_usage="never".*attn_mask'):
        use(stand, AttentionMetadata(**fields(*stand.lengths(3, 4))))


@every_stand
@pytest.mark.parametrize("use", [first_call, later_call, preparation, call_after_a_masked_layer])
def test_a_mask_that_the_record_itself_calls_none_is_ignored(stand: Stand, use: Use) -> None:
    with stand.kernels():
        mask = hiding(stand.lengths(3, 4)[1])
        output = use(stand, AttentionMetadata(attn_mask=mask, mask_mode="none"))
        plain = stand.layer(4, HEAD_SIZE, mask_usage="never")(*call(stand))
    assert output is None or torch.equal(output, plain)
