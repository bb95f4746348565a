"""Public faults, group G6: sparse attention. B38, B41 and B43 on every registered backend that is sparse.

A backend is sparse where its facts say that its numbers are approximate: no list of names. B40 is about checkpoints.
"""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest

from omni_attn import Attention, AttentionMetadata, use_attention_config
from omni_attn.backends.registry import DiffusionAttentionBackendEnum
from omni_attn.config import load_config
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.ops.reference import reference_attention
from omni_attn.products import build_product
from tests.layer.stands import HEAD_SIZE, STANDS, Stand, assert_close, load, refusal_of, tensors

SPARSE = [
    stand
    for stand in STANDS
    if stand.name in DiffusionAttentionBackendEnum.__members__
    and stand.backend.facts.numerics == "approximate"
]
every_sparse_stand = pytest.mark.parametrize("stand", SPARSE, ids=str)
_roles = (f"g6.{number}" for number in itertools.count())


def config_of(stand: Stand, **more: Any) -> Any:
    """The choice of a stand that leaves tiles out even of small videos, where it has an option for that."""
    if "fastvideo_vsa" in stand.backend.facts.option_fields:
        more |= {"fastvideo_vsa": {"topk": 1, "tile_size": (4, 4, 4)}}
    return load_config({"default": {"backend": stand.name, "variant": stand.variant, **more}})


def layer_of(stand: Stand, config: Any, heads: int = 4, size: int = HEAD_SIZE, **needs: Any) -> Attention:
    with use_attention_config(config, platform=stand.platform):
        return Attention(heads, size, **{"role": "self", "video_grid": True, "dtype": stand.dtype, **needs})


def test_there_are_sparse_backends() -> None:
    assert {stand.name for stand in SPARSE} >= {"FASTVIDEO_VSA"}


# --- B38 cross-attention is sent to a sparse kernel for self-attention


@pytest.mark.parametrize("name", DiffusionAttentionBackendEnum.__members__)
def test_b38_a_sparse_backend_says_that_it_is_for_self_attention(name: str) -> None:
    facts = load(name).facts
    if facts.numerics != "approximate":
        return
    for kernel in (facts, *(variant.facts for variant in facts.variants)):
        assert not kernel.unequal_lengths and not kernel.mask_kinds
        assert kernel.needs_video_grid or kernel.self_attention_only


@every_sparse_stand
@pytest.mark.parametrize("hinted", [False, True], ids=["no hints", "hints"])
def test_b38_cross_attention_is_refused_by_role_and_backend(stand: Stand, hinted: bool) -> None:
    lengths = {"max_seqlen_q": 90, "max_seqlen_k": 16} if hinted else {}
    with stand.kernels(publishes_grid=False) as log, pytest.raises(BackendRejectedError) as raised:
        layer_of(stand, config_of(stand), role="cross", video_grid=False, **lengths)
    for part in ('"cross"', stand.name, "TORCH_SDPA", "per_role: {cross:"):
        assert part in str(raised.value)
    assert not log.calls


@every_sparse_stand
def test_b38_a_declared_fallback_runs_cross_attention(stand: Stand) -> None:
    query, key, value = (x.to(stand.dtype) for x in tensors(1, 90, 16))
    with stand.kernels(publishes_grid=False) as log:
        layer = layer_of(stand, config_of(stand, fallback=["TORCH_SDPA"]), role="cross", video_grid=False)
        assert_close(layer(query, key, value), reference_attention(query, key, value)[0])
    assert not log.calls and layer.route == "TORCH_SDPA"


@every_sparse_stand
def test_b38_unequal_lengths_of_self_attention_are_refused_with_both_numbers(stand: Stand) -> None:
    query, key, value = (x.to(stand.dtype) for x in tensors(1, 90, 16))
    record = AttentionMetadata(vsa_dit_seq_shape=(1, 9, 10))
    with stand.kernels(publishes_grid=False) as log:
        with pytest.raises(BackendRejectedError, match=r"90 and 16"):
            layer_of(stand, config_of(stand), max_seqlen_q=90, max_seqlen_k=16)
        layer = layer_of(stand, config_of(stand))
        text = refusal_of(lambda: layer(query, key, value, record))
    assert all(part in text for part in ('"self"', stand.name, "90", "16")) and not log.calls


# --- B41 the dense stand-in is given the sparse backend's metadata


@every_sparse_stand
def test_b41_the_dense_route_understands_what_the_builder_made_for_it(stand: Stand) -> None:
    """All tiles of a small grid are kept, so that the dense impl beside the sparse one runs."""
    call = [x.to(stand.dtype) for x in tensors(1, 6, 6)]
    record = AttentionMetadata(vsa_dit_seq_shape=(1, 2, 3))
    with stand.kernels(publishes_grid=False) as log:
        layer = stand.layer(4, HEAD_SIZE, dtype=stand.dtype)
        assert_close(layer(*call, record), reference_attention(*call)[0])
    assert not log.calls and "SDPA" in layer.route


@every_sparse_stand
def test_b41_torch_sdpa_names_the_sparse_metadata_that_it_is_handed(stand: Stand) -> None:
    record = AttentionMetadata(vsa_dit_seq_shape=(1, 2, 3))
    dense = next(s for s in STANDS if s.name == "TORCH_SDPA").impl(4, HEAD_SIZE)[0]
    with stand.kernels(publishes_grid=False):
        made = build_product(stand.impl(4, HEAD_SIZE)[1], record, (6, 6))
    with pytest.raises(MetadataError, match=rf"TORCH_SDPA.*{type(made).__name__}"):
        dense.forward(*tensors(1, 6, 6), made)


# --- B43 dense attention runs in place of the sparse one, and nothing says so


@every_sparse_stand
@pytest.mark.parametrize("grid", [(2, 8, 8), (3, 8, 8), (5, 5, 8), (2, 5, 9), (1, 1, 7)], ids=str)
def test_b43_sparse_runs_or_a_warning_names_role_size_and_rule(
    stand: Stand, grid: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    tokens, role = math.prod(grid), next(_roles)
    call = [x.to(stand.dtype) for x in tensors(1, tokens, tokens)]
    with stand.kernels(publishes_grid=False) as log, caplog.at_level(logging.WARNING, "omni_attn"):
        layer = layer_of(stand, config_of(stand), role=role)
        for _ in range(2):
            output = layer(*call, AttentionMetadata(vsa_dit_seq_shape=grid))
    warnings = [record.getMessage() for record in caplog.records]
    assert sum(layer.routes_taken.values()) == 2 and layer.route in layer.routes_taken
    if log.calls:
        assert len(log) == 2 and not warnings and "SDPA" not in layer.route
        assert output.isfinite().all()
        return
    (told,) = warnings
    assert role in told and "SDPA" in told and "SDPA" in layer.route
    assert layer.route_reason is not None and layer.route_reason in told
    assert_close(output, reference_attention(*call)[0])


@pytest.mark.parametrize(
    ("grid", "runs"),
    [((2, 8, 8), True), ((3, 8, 8), True), ((5, 5, 8), True), ((2, 5, 9), True), ((1, 1, 4), False)],
)
def test_b43_every_size_of_more_than_one_tile_is_sparse(grid: tuple[int, int, int], runs: bool) -> None:
    """128, 192, 200 and 90 tokens: no alignment is asked for, and the clipped tiles take part."""
    tokens = math.prod(grid)
    stand = next(s for s in SPARSE if str(s) == "FASTVIDEO_VSA-torch")
    with stand.kernels(publishes_grid=False) as log:
        layer = layer_of(stand, config_of(stand))
        layer(*tensors(1, tokens, tokens), AttentionMetadata(vsa_dit_seq_shape=grid))
    assert len(log) == runs
