"""One mask tensor that is written anew before each step, as code around CUDA graphs does."""

from __future__ import annotations

import pytest
import torch

from omni_attn import AttentionMetadata, prepare_attention
from omni_attn.ops.reference import reference_attention
from tests.layer.stands import HEAD_SIZE, STANDS, Stand, assert_close, tensors

MASKED = [stand for stand in STANDS if "padding" in stand.facts.mask_kinds]


@pytest.mark.parametrize("stand", MASKED, ids=str)
def test_a_mask_changed_in_place_counts_from_the_next_preparation(stand: Stand) -> None:
    call = [x.to(stand.dtype) for x in tensors(2, 160, 160)]
    mask = torch.arange(160)[None] < torch.tensor([[100], [160]])
    record = AttentionMetadata(attn_mask=mask)
    with stand.kernels(), torch.no_grad():
        layer = stand.layer(4, HEAD_SIZE, mask_usage="padding")
        for step, kept in enumerate((100, 40, 160)):
            mask.copy_(torch.arange(160)[None] < torch.tensor([[kept], [160]]))
            now = record.at_step(step)
            prepare_attention(layer, {"self": now}, {"self": (160, 160)})
            assert_close(layer(*call, now), reference_attention(*call, attn_mask=mask)[0])
