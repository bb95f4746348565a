"""Every backend in every mode that its facts claim gives what it gives alone; in all others selection refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from omni_attn import AttentionMetadata, PackedPadding, prepare_attention
from omni_attn.config import ParallelConfig
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.parallel import Parallel, use_parallel
from omni_attn.testing import fake_ranks
from omni_attn.testing.harness import allowed_error
from tests.layer.stands import HEAD_SIZE, STANDS, Stand, tensors

CONFIGS: dict[str, dict[str, int]] = {
    "ulysses": {"ulysses_degree": 3},
    "ring": {"ring_degree": 3},
    "ulysses_ring": {"ulysses_degree": 2, "ring_degree": 2},
    "allgather_kv": {"allgather_degree": 3},
}


RING = ("ring", "ulysses_ring")


class Refusal(NamedTuple):
    """Calls that a backend serves alone and cannot serve in some modes, and a word of the reason."""

    name: str
    modes: tuple[str, ...]
    cases: tuple[str, ...]
    reason: str
    variant: str | None = None

    def holds(self, stand: Stand, mode: str, case: str) -> bool:
        mine = self.name == stand.name and self.variant in (None, stand.variant)
        return mine and mode in self.modes and case in self.cases


_NO_LSE, _PACKED = "log-sum-exp", ("key padding", "packed", "padding behind")
REFUSALS = (
    Refusal("FLASH_ATTN", RING, ("key padding",), _NO_LSE),  # packs what the mask keeps
    Refusal("FLASHINFER_ATTN", RING, ("packed",), "at least one query and one key|log-sum-exp", "cute-dsl"),
    Refusal("FLASHINFER_ATTN", RING, _PACKED, _NO_LSE),
    Refusal(
        "FLASHINFER_ATTN",
        ("allgather_kv",),
        ("packed",),
        "at least one query and one key|log-sum-exp",
        "cute-dsl",
    ),
    Refusal("FLASHINFER_ATTN", ("allgather_kv",), ("causal",), "unequal lengths", "cute-dsl"),
    Refusal("SAGE_ATTN", ("allgather_kv",), ("causal",), "unequal lengths"),
)


def _cases() -> Iterator[Any]:
    for stand in STANDS:
        for mode in sorted(stand.facts.sequence_parallel):
            for case in ("plain", "grouped", *_features(stand)):
                yield pytest.param(stand, mode, case, id=f"{stand}-{mode}-{case}")


def _features(stand: Stand) -> Iterator[str]:
    facts = stand.facts
    if facts.causal:
        yield "causal"
    if facts.mask_kinds:
        yield "key padding"
    if "arbitrary" in facts.mask_kinds and facts.head_masks:
        yield "head mask"
    if facts.packing:
        yield "packed"
    if facts.packing or facts.packed_padding:
        yield "padding behind"


def _call(stand: Stand, case: str) -> tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Query, key and value; what the record states; what the layer needs.

    Each rank's share is as long as the kernel's shortest sequence, and of whole tiles where it needs them.
    """
    least = max(stand.facts.min_query_tokens, stand.facts.min_key_tokens, stand.facts.key_tile)
    tokens, packed, used = 37, (0, 12, 14, 37), 30
    if least > 1:
        tokens, packed, used = 3 * least, (0, least, 2 * least, 3 * least), 2 * least
    alone = case in ("packed", "padding behind")
    kv_heads = 2 if case == "grouped" and stand.facts.gqa else 4
    call = [x.to(stand.dtype) for x in tensors(1 if alone else 2, tokens, tokens, kv_heads=kv_heads)]
    generator = torch.Generator().manual_seed(3)
    keeps = torch.rand(2, 4, tokens, tokens, generator=generator) < 0.7
    padding = torch.arange(tokens)[None] < torch.tensor([[tokens], [used // 2]])
    stated: dict[str, Any] = {
        "key padding": {"attn_mask": padding},
        "head mask": {"attn_mask": keeps},
        "packed": {"cu_seqlens_q": packed},
        "padding behind": {"packed_padding": PackedPadding(used, used)},
    }.get(case, {})
    needs = {"num_kv_heads": kv_heads, "causal": case == "causal"}
    return call, stated, needs


@pytest.mark.parametrize(("stand", "mode", "case"), list(_cases()))
def test_equals_one_rank_or_is_refused_on_every_rank(stand: Stand, mode: str, case: str) -> None:
    call, stated, needs = _call(stand, case)
    tokens = call[0].shape[1]
    with stand.kernels():
        alone = stand.layer(4, HEAD_SIZE, **needs)(*call, AttentionMetadata(**stated))

        refused = next((each.reason for each in REFUSALS if each.holds(stand, mode, case)), None)

        def work(parallel: Parallel) -> torch.Tensor | None:
            if refused is None:
                return attend(parallel)
            with pytest.raises((BackendRejectedError, MetadataError), match=refused):
                attend(parallel)
            return None

        def attend(parallel: Parallel) -> torch.Tensor:
            layer, record = stand.layer(4, HEAD_SIZE, **needs), AttentionMetadata(**stated)
            assert layer.selection is not None and layer.selection.backend == stand.name
            prepare_attention(layer, {"self": record}, {"self": (tokens, tokens)})
            output = layer(*(parallel.split(x) for x in call), record)
            assert output.is_contiguous() and output.dtype == stand.dtype
            return output

        parts = [part for part in fake_ranks(CONFIGS[mode], work) if part is not None]
    if refused is not None:
        assert not parts
        return
    # Whole heads are computed by the same kernel in the same way; elsewhere quantised blocks start at other tokens.
    limit = 1e-5 if mode == "ulysses" else allowed_error(stand.backend.facts, stand.dtype)
    torch.testing.assert_close(torch.cat(parts, dim=1), alone, atol=limit, rtol=0)


def _refusals() -> Iterator[Any]:
    for stand in STANDS:
        for mode in sorted(CONFIGS.keys() - stand.facts.sequence_parallel):
            yield pytest.param(stand, mode, id=f"{stand}-{mode}")


@pytest.mark.parametrize(("stand", "mode"), list(_refusals()))
def test_selection_refuses_the_others(stand: Stand, mode: str) -> None:
    planned = ParallelConfig.model_validate(CONFIGS[mode])
    with (
        stand.kernels(),
        pytest.raises(BackendRejectedError, match=f"needs sequence parallelism {mode}, found support for"),
        use_parallel(planned),
    ):
        stand.layer(4, HEAD_SIZE)
