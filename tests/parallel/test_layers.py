"""What a layer says of ranks when it is built, and layers that ranks cannot share."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from omni_attn import (
    Attention,
    AttentionMetadata,
    MLAAttention,
    PagedAttention,
    prepare_attention,
    use_attention_config,
)
from omni_attn.errors import BackendRejectedError, ConfigError, MetadataError
from omni_attn.facts import FullAttentionSpec, MLAAttentionSpec
from omni_attn.parallel import Parallel, ParallelConfig, use_parallel
from omni_attn.parallel.process_group import GroupCollectives
from omni_attn.testing import fake_ranks
from tests.parallel.scene import CONFIGS, Call, every_mode

NOT_ULYSSES = [name for name in CONFIGS if not name.endswith(("ulysses 2", "ulysses 3"))]


def build(**needs: Any) -> Attention:
    with use_attention_config(needs.pop("backend", "TORCH_SDPA"), device="cpu"):
        return Attention(4, 8, role="self", **needs)


def plan(name: str) -> ParallelConfig:
    return ParallelConfig.model_validate(CONFIGS[name])


@every_mode
def test_the_request_states_the_mode_of_the_ranks(config: dict[str, Any]) -> None:
    made = ParallelConfig.model_validate(config)
    with use_parallel(made):
        assert build().request.sequence_parallel == made.mode
        assert build(sequence_parallel=made.mode).request.sequence_parallel == made.mode
        assert build(skip_sequence_parallel=True).request.sequence_parallel is None
    assert build().request.sequence_parallel is None


def test_a_mode_that_differs_from_the_ranks_is_refused() -> None:
    with (
        use_parallel(plan("ulysses 2")),
        pytest.raises(ValueError, match=r"role \"self\": sequence_parallel='ring'.*connected for ulysses"),
    ):
        build(sequence_parallel="ring")


def test_a_stated_mode_without_ranks_does_not_run_on_a_part() -> None:
    layer = build(sequence_parallel="ulysses")
    with pytest.raises(
        MetadataError, match=r"sequence_parallel='ulysses' was stated, and no ranks.*use_parallel"
    ):
        layer(*Call(5).own)


def test_custom_attention_owns_its_communication() -> None:
    class Own(nn.Module):
        def forward(self, query: torch.Tensor, *_: object) -> torch.Tensor:
            return query * 2

    with use_parallel(plan("ring 2")):
        with pytest.raises(ValueError, match=r"custom_attention.*skip_sequence_parallel=True"):
            build(custom_attention=Own())
        layer = build(custom_attention=Own(), skip_sequence_parallel=True)
    query, key, value = Call(5).own
    assert torch.equal(layer(query, key, value), query * 2)


@every_mode
def test_layers_that_skip_run_on_what_a_rank_has(config: dict[str, Any]) -> None:
    """Replicated keys, own queries: as cross-attention to a text. Lengths are the rank's own."""
    call = Call(6, 3)

    def work(parallel: Parallel) -> torch.Tensor:
        layer, record = build(skip_sequence_parallel=True), AttentionMetadata()
        query = parallel.split(call.own[0])
        prepare_attention(layer, {"self": record}, {"self": (query.shape[1], 3)})
        return layer(query, *call.own[1:], record)

    together = torch.cat(fake_ranks(config, work), dim=1)
    torch.testing.assert_close(together, call.expected().float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["ring 2", "ulysses 2 ring 2", "allgather 2"])
def test_windows_are_refused_where_ranks_would_cut_them(name: str) -> None:
    mode = plan(name).mode
    with (
        use_parallel(plan(name)),
        pytest.raises(ConfigError, match=rf"window of \(2, 0\) tokens, which {mode}.*ulysses_degree alone"),
    ):
        build(window=(2, 0), causal=True)


def test_windows_under_ulysses() -> None:
    call = Call(9, needs={"causal": True, "window": (2, 0)})
    together = call.on_ranks(CONFIGS["ulysses 3"])
    torch.testing.assert_close(together, call.alone(), atol=1e-5, rtol=0)


def test_heads_that_ranks_do_not_share_evenly_are_refused_if_so_configured() -> None:
    config = ParallelConfig(ulysses_degree=3, uneven_heads="refuse")
    with use_parallel(config), pytest.raises(ConfigError, match=r'role "self" has 4 query heads.*3 ranks'):
        build()


def test_a_backend_that_does_not_serve_the_mode_is_refused_when_the_layer_is_built() -> None:
    with use_parallel(plan("ring 2")), pytest.raises(BackendRejectedError) as raised:
        build(backend="FASTVIDEO_VSA", video_grid=True)
    assert "needs sequence parallelism ring, found support for ulysses" in str(raised.value)


@every_mode
def test_equal_layers_share_what_is_prepared_and_others_do_not(config: dict[str, Any]) -> None:
    def work(parallel: Parallel) -> None:
        first, second, skipping = build(), build(), build(skip_sequence_parallel=True)
        assert first.group_id == second.group_id != skipping.group_id
        assert first.group_id != build(causal=True).group_id

    fake_ranks(config, work)


@every_mode
def test_another_number_of_tokens_than_was_prepared_is_refused(config: dict[str, Any]) -> None:
    call = Call(8)

    def work(parallel: Parallel) -> None:
        layer, record = build(), AttentionMetadata()
        prepare_attention(layer, {"self": record}, {"self": (8, 8)})
        own = 8 // parallel.config.size
        with pytest.raises(
            MetadataError, match=f"prepared for {own} query and {own} key tokens, the call has 8"
        ):
            layer(*call.own, record)

    fake_ranks(config, work)


@every_mode
def test_a_copy_of_a_layer_exchanges_with_the_same_ranks(config: dict[str, Any]) -> None:
    call = Call(5)

    def work(parallel: Parallel) -> torch.Tensor:
        return copy.deepcopy(build())(*map(parallel.split, call.own))

    together = torch.cat(fake_ranks(config, work), dim=1)
    torch.testing.assert_close(together, call.expected().float(), atol=1e-5, rtol=0)


def test_a_process_group_is_not_copied() -> None:
    """It could not be."""
    store = dist.HashStore()
    group = GroupCollectives(dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5)))
    with pytest.raises(TypeError):
        copy.deepcopy(group.group)
    assert copy.deepcopy(group).group is group.group


# -- records that do not fit: one text, on every rank, before any exchange


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_mask": torch.ones(2, 3, dtype=torch.bool)}, r"attn_mask has shape \(2, 3\).*1 key tokens"),
        ({"attn_mask": torch.ones(1, 1, 1, 4)}, r"attn_mask has shape \(1, 1, 1, 4\)"),
        ({"attn_mask": torch.ones(2, 1, 1)}, "3 dimensions"),
        ({"attn_mask": torch.ones(2, 3, 1, 1, dtype=torch.bool)}, "attn_mask has 3 heads, the layer 4"),
        ({"cu_seqlens_q": (0, 5)}, r"cu_seqlens_q\[-1\]=5.*1 query tokens"),
    ],
)
def test_every_rank_refuses_alike(name: str, fields: dict[str, Any], words: str) -> None:
    """One token: all but the first rank have nothing to attend from, and would wait."""
    call = Call(1, fields=fields)
    texts: list[str] = []

    def work(parallel: Parallel) -> None:
        layer, record = build(), call.record()
        with pytest.raises(MetadataError, match=words) as raised:
            prepare_attention(layer, {"self": record}, {"self": (1, 1)})
        texts.append(str(raised.value))

    fake_ranks(CONFIGS[name], work)
    assert len(texts) == plan(name).size and len(set(texts)) == 1


# -- layers over a cache


CACHE = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
LATENTS = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=24, rope_size=8, dtype="float32")


def paged() -> nn.Module:
    return PagedAttention(4, 8, role="self", num_kv_heads=2, kv_cache=CACHE, prefix="blocks.0.attn")


def latent() -> nn.Module:
    opened = nn.Linear(16, 3 * 22, bias=False)
    return MLAAttention(
        3,
        role="self",
        kv_cache=LATENTS,
        qk_nope_head_size=12,
        v_head_size=10,
        kv_b_proj=opened,
        prefix="blocks.0.attn",
    )


@every_mode
@pytest.mark.parametrize("make", [paged, latent])
def test_layers_over_a_cache_are_refused_among_ranks(make: Any, config: dict[str, Any]) -> None:
    planned = ParallelConfig.model_validate(config)
    with use_parallel(planned), use_attention_config("TORCH_SDPA", device="cpu"):
        with pytest.raises(ConfigError) as raised:
            make()
        with use_parallel(None):
            assert make().selection.backend == "TORCH_SDPA"
    text = str(raised.value)
    for part in (
        'role "self"',
        "'blocks.0.attn'",
        f"{planned.size} ranks",
        planned.describe(),
        "use_parallel(None)",
    ):
        assert part in text
