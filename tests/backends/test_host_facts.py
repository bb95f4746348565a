"""Facts that the host states about masks on a device: what needs no look at the values is checked all the same."""

from __future__ import annotations

import pytest
import torch

from omni_attn.backends.metadata import AttentionMetadata, PackedPadding
from omni_attn.backends.stated import read_record
from omni_attn.errors import MetadataError

ON_DEVICE = torch.ones(2, 8, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_mask": ON_DEVICE, "kv_lengths": (3,)}, ("kv_lengths", "(2, 8)")),
        ({"attn_mask": ON_DEVICE, "kv_lengths": (3, 99)}, ("99", "8")),
        ({"attn_mask": ON_DEVICE, "packed_padding": PackedPadding(4, 4)}, ("packed_padding", "(2, 8)")),
        (
            {"attn_mask": torch.zeros(1, 1, 4, 8, device="meta"), "packed_padding": PackedPadding(4, 4)},
            ("packed_padding", "(1, 1, 4, 8)"),
        ),
        (
            {"cu_seqlens_q": torch.tensor([0.0, 4.0]), "cu_seqlens_k": torch.tensor([0.0, 8.0])},
            ("float32", "int32"),
        ),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(MetadataError) as raised:
        read_record(AttentionMetadata(**fields), (4, 8))
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_fitting_lengths_on_a_device_are_taken_at_their_word() -> None:
    stated = read_record(AttentionMetadata(attn_mask=ON_DEVICE, kv_lengths=(3, 8)), (4, 8))
    assert stated.mask is ON_DEVICE and stated.mask_kind == "padding"
