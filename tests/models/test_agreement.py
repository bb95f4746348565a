"""What ranks hold is the same, or told apart by name on every rank."""

from __future__ import annotations

import pytest
import torch

from omni_attn.errors import MetadataError
from omni_attn.models.agreement import check_alike, fingerprint
from omni_attn.parallel import Parallel
from omni_attn.testing import fake_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fingerprint_goes_by_value_order_shape_and_dtype(dtype: torch.dtype) -> None:
    tensor = (torch.arange(24) % 2).to(dtype).view(2, 3, 4)
    other = tensor.clone()
    other[1, 2, 3] = 0
    strided = tensor.transpose(0, 2).contiguous().transpose(0, 2)
    assert not strided.is_contiguous() and fingerprint(strided) == fingerprint(tensor)
    swapped = tensor.roll(1, 2)
    assert swapped.sum() == tensor.sum()
    different = [tensor, other, swapped, tensor.view(4, 6), tensor[:1], tensor[:0], None]
    assert len({fingerprint(value) for value in different}) == len(different)
    assert fingerprint(tensor) != fingerprint(
        tensor.to(torch.float32 if dtype != torch.float32 else torch.int32)
    )


def test_all_that_is_alike_passes_and_the_first_that_is_not_is_named_on_every_rank() -> None:
    def work(parallel: Parallel) -> None:
        same = {"latents": torch.ones(3), "steps": 4, "image": None}
        check_alike(parallel, same)
        own = {"scale": 2.0 if parallel.rank == 1 else 1.0, "seed": parallel.rank}
        with pytest.raises(
            MetadataError, match=r"^scale differs between the 3 ranks .*: rank 1 from rank 0\."
        ):
            check_alike(parallel, same | own)
        with pytest.raises(MetadataError, match=r"^seed differs .*: rank 1, 2 from rank 0\."):
            check_alike(parallel, {"seed": parallel.rank})

    fake_ranks({"ring_degree": 3}, work)
