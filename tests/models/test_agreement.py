"""What ranks hold is the same, or told apart by name on every rank."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_attn.config import PipelineConfig
from omni_attn.errors import MetadataError
from omni_attn.models import get_family
from omni_attn.models.agreement import check_alike, fingerprint, of_first_rank
from omni_attn.parallel import Parallel, current_parallel
from omni_attn.testing import fake_ranks

CPU = torch.device("cpu")
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


@dataclass(frozen=True)
class Encoded:
    embeds: torch.Tensor
    tags: torch.Tensor
    image: torch.Tensor | None = None


def test_what_the_first_rank_made_is_everywhere() -> None:
    def work(parallel: Parallel) -> Encoded:
        return of_first_rank(Encoded(torch.full((2, 3), parallel.rank + 0.5), torch.arange(3)), CPU)

    for made in fake_ranks({"ulysses_degree": 2, "ring_degree": 2}, work):
        assert torch.equal(made.embeds, torch.full((2, 3), 0.5)) and torch.equal(made.tags, torch.arange(3))
        assert made.image is None
    alone = Encoded(torch.ones(1), torch.ones(1))
    assert of_first_rank(alone, CPU) is alone and of_first_rank(None, CPU) is None


def test_what_ranks_made_of_other_shapes_is_named_on_every_rank() -> None:
    def work(parallel: Parallel) -> None:
        with pytest.raises(MetadataError, match=r"^embeds differs between the 2 ranks"):
            of_first_rank(Encoded(torch.ones(1 + parallel.rank), torch.ones(1)), CPU)

    fake_ranks({"ulysses_degree": 2}, work)


@pytest.mark.parametrize(("family", "model"), [("wan", "wan-tiny"), ("minimax_h3", "minimax-h3-tiny")])
def test_encoders_that_differ_in_the_last_bit(
    family: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of two GPUs may: every rank goes on with what the first one made."""
    requests = importlib.import_module(f"omni_attn.models.{family}.requests")
    encode = requests.seeded_prompt

    def encode_otherwise(*arguments: Any, **keys: Any) -> Any:
        prompt = encode(*arguments, **keys)
        rank = getattr(current_parallel(), "rank", 0)
        changed = {
            field.name: tensor + 1e-6 * rank
            for field in fields(prompt)
            if (tensor := getattr(prompt, field.name)) is not None
        }
        return replace(prompt, **changed)

    monkeypatch.setattr(requests, "seeded_prompt", encode_otherwise)
    values = {"pipeline": family, "model": model, "parallel": {"ulysses_degree": 2}, "device": "cpu"}
    config = PipelineConfig.model_validate({**values, "output": str(tmp_path / "out")})
    first, second = fake_ranks(config.parallel, lambda _: get_family(family).prepare(config).prompt)
    for field in fields(first):
        mine, theirs = getattr(first, field.name), getattr(second, field.name)
        assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs))
