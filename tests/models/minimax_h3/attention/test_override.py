"""impl_overrides={"FASTVIDEO_VSA": MiniMaxH3VSAImpl}: what the override changes, and what it leaves alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import nn

from omni_attn import AttentionMetadata, prepare_attention
from omni_attn.backends.fastvideo_vsa import FastVideoVSABackend, FastVideoVSAImpl
from omni_attn.backends.fastvideo_vsa_builder import FastVideoVSAMetadataBuilder
from omni_attn.errors import BackendRejectedError
from omni_attn.models.minimax_h3.attention.fastvideo_h3 import (
    MiniMaxH3CompetingVSAImpl,
    MiniMaxH3VSAImpl,
    MiniMaxH3VSAMetadataBuilder,
)
from omni_attn.platforms import CpuPlatform
from omni_attn.report import attention_report
from omni_attn.testing import fake_device
from tests.layer.stands import HEAD_SIZE, STANDS, Stand
from tests.models.minimax_h3.attention.h3_layers import SMALL, h3_layer, random_call
from tests.selection.stubs import registered

CPU = fake_device("cpu")
TILE = (2, 4, 4)
FLOAT64 = {"dtype": "float64"}
OVERRIDES = {"FASTVIDEO_VSA": MiniMaxH3VSAImpl}


class PlatformVSAImpl(FastVideoVSAImpl):
    """What a device family may put in the place of FASTVIDEO_VSA's impl."""

    def check_gate(self, gate: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return super().check_gate(-gate, query, value)


class PlatformVSABackend(FastVideoVSABackend):
    @staticmethod
    def get_impl_cls() -> type[PlatformVSAImpl]:
        return PlatformVSAImpl


class OwnPlatform(CpuPlatform):
    """A device family with a class of its own for FASTVIDEO_VSA."""

    class_paths: ClassVar[Mapping[str, str]] = {
        "FASTVIDEO_VSA": f"{PlatformVSABackend.__module__}.PlatformVSABackend"
    }


class OnThatPlatform(MiniMaxH3VSAImpl, PlatformVSAImpl):
    """MiniMax-H3's attention over the platform's."""


def test_it_runs_in_place_of_the_selected_impl_and_brings_its_builder() -> None:
    h3, plain = h3_layer(topk=2), h3_layer(impl=None, topk=2)
    assert type(h3.impl) is MiniMaxH3VSAImpl and type(plain.impl) is FastVideoVSAImpl
    assert h3.active_route is not None and plain.active_route is not None
    assert type(h3.active_route.builder) is MiniMaxH3VSAMetadataBuilder
    assert type(plain.active_route.builder) is FastVideoVSAMetadataBuilder
    assert attention_report(h3).rows[0].impl == "MiniMaxH3VSAImpl"


def test_facts_options_and_choice_stay() -> None:
    options = {"sparsity": 0.9, "tile_size": [4, 8, 8], "coarse_weight": "one"}
    needs = {"num_kv_heads": 1, "softmax_scale": 8**-0.5, "requires_grad": True, "dtype": "float64"}
    h3, plain = h3_layer(needs=needs, **options), h3_layer(impl=None, needs=needs, **options)
    assert h3.selection is not None and plain.selection is not None
    assert h3.selection == plain.selection and h3.request == plain.request
    assert h3.selection.backend_cls is FastVideoVSABackend
    assert h3.selection.spec is not None and h3.selection.spec.fastvideo_vsa is not None
    assert h3.selection.spec.fastvideo_vsa.model_dump(exclude_none=True) == {
        "sparsity": 0.9,
        "tile_size": (4, 8, 8),
        "coarse_weight": "one",
    }
    assert h3.selection.backend_cls.facts is plain.selection.backend_cls.facts
    given = {"num_heads", "num_kv_heads", "head_size", "softmax_scale", "causal", "spec", "variant", "window"}
    for name in (*given, "adds_coarse"):
        assert getattr(h3.impl, name) == getattr(plain.impl, name)
    assert h3.impl is not None and plain.impl is not None and h3.impl.executor is plain.impl.executor


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_the_backends_facts_judge_sequence_parallelism(mode: Any) -> None:
    """Ulysses gathers the whole sequence, and its gate; a ring never does."""
    needs = {"sequence_parallel": mode}
    if mode == "ulysses":
        layer = h3_layer(topk=2, needs=needs)
        assert type(layer.impl) is MiniMaxH3VSAImpl and layer.request.sequence_parallel == mode
        skipping = h3_layer(topk=2, needs={**needs, "skip_sequence_parallel": True})
        assert skipping.request.sequence_parallel is None
        return
    for impl in (MiniMaxH3VSAImpl, None):
        with pytest.raises(BackendRejectedError, match="ring"):
            h3_layer(impl=impl, topk=2, needs=needs)


@pytest.mark.parametrize(
    ("needs", "named"),
    [
        ({"causal": True}, "causal"),
        ({"video_grid": False}, "grid"),
        ({"softmax_scale": 0.1}, "scale"),
        ({"mask_usage": "padding"}, "mask"),
    ],
)
def test_it_hides_no_refusal(needs: dict[str, Any], named: str) -> None:
    texts = set()
    for impl in (MiniMaxH3VSAImpl, None):
        with pytest.raises(BackendRejectedError, match=named) as raised:
            h3_layer(impl=impl, topk=2, needs=needs)
        texts.add(str(raised.value))
    assert len(texts) == 1


def test_a_platforms_own_impl_is_respected() -> None:
    platform = OwnPlatform(CPU)
    plain = h3_layer(platform, impl=None, topk=2)
    assert type(plain.impl) is PlatformVSAImpl
    with pytest.raises(TypeError, match=r"FASTVIDEO_VSA.*MiniMaxH3VSAImpl.*PlatformVSAImpl"):
        h3_layer(platform, topk=2)
    layer = h3_layer(platform, impl=OnThatPlatform, tile_size=TILE, topk=2, needs=FLOAT64)
    assert type(layer.impl) is OnThatPlatform
    assert layer.selection is not None and plain.selection is not None
    assert (
        layer.selection.class_path == plain.selection.class_path == OwnPlatform.class_paths["FASTVIDEO_VSA"]
    )
    call = random_call(SMALL.tokens)
    usual = h3_layer(tile_size=TILE, topk=2, needs=FLOAT64)
    expected = usual(*call[:3], SMALL.record(-call[3]))
    torch.testing.assert_close(layer(*call[:3], SMALL.record(call[3])), expected)


def test_a_registered_impl_is_respected() -> None:
    with registered(("FASTVIDEO_VSA", PlatformVSABackend)):
        with pytest.raises(TypeError, match=r"MiniMaxH3VSAImpl.*PlatformVSAImpl"):
            h3_layer(topk=2)
        assert type(h3_layer(impl=OnThatPlatform, topk=2).impl) is OnThatPlatform
    assert type(h3_layer(topk=2).impl) is MiniMaxH3VSAImpl


@pytest.mark.parametrize("stand", [stand for stand in STANDS if stand.name != "FASTVIDEO_VSA"], ids=str)
def test_an_entry_of_an_unselected_backend_is_inert(stand: Stand) -> None:
    with stand.kernels():
        plain, h3 = (stand.layer(4, HEAD_SIZE, impl_overrides=overrides) for overrides in (None, OVERRIDES))
    assert type(h3.impl) is type(plain.impl) and not isinstance(h3.impl, FastVideoVSAImpl)
    assert (h3.selection, h3.group_id) == (plain.selection, plain.group_id)


def test_a_declared_fallback_is_not_overridden() -> None:
    """It takes what the builder refuses, with the tokens behind the layout's end in use."""
    call = random_call(SMALL.tokens)
    layer = h3_layer(topk=2, tile_size=TILE, fallback=["TORCH_SDPA"], needs=FLOAT64)
    layer(*call[:3], AttentionMetadata())
    assert layer.route == "TORCH_SDPA" and layer.fallbacks_taken == 1
    assert "video_layout" in str(layer.fallback_reason)
    layer(*call[:3], SMALL.record(call[3]))
    assert layer.route == "FASTVIDEO_VSA (torch): VSA"


@contextmanager
def counted_builds() -> Iterator[list[tuple[str, int]]]:
    """What each builder was asked for: its class and the layout's prefix."""
    built: list[tuple[str, int]] = []
    build = FastVideoVSAMetadataBuilder.build

    def counted(self: Any, record: AttentionMetadata, lengths: tuple[int, int]) -> Any:
        built.append((type(self).__name__, lengths[0]))
        return build(self, record, lengths)

    with patch.object(FastVideoVSAMetadataBuilder, "build", counted):
        yield built


def test_no_product_is_shared_with_other_layers() -> None:
    """Layers of one model: each kind builds once a step, and none reads another's product."""
    impls = [MiniMaxH3VSAImpl, None, MiniMaxH3CompetingVSAImpl, MiniMaxH3VSAImpl, None]
    layers = [h3_layer(impl=impl, topk=2, tile_size=TILE, needs=FLOAT64) for impl in impls]
    model = nn.ModuleList(layers)
    assert layers[0].group_id == layers[3].group_id and layers[1].group_id == layers[4].group_id
    assert len({layer.group_id for layer in layers}) == 3
    # Both kinds of geometry in one record: a sequence without segments.
    record = AttentionMetadata(
        video_layout=type(SMALL.layout)((), ((3, 5, 6),), 90), vsa_dit_seq_shape=(3, 5, 6)
    )
    with counted_builds() as built:
        prepare_attention(model, {"self": record}, {"self": (90, 90)})
    names = (
        "MiniMaxH3VSAMetadataBuilder",
        "FastVideoVSAMetadataBuilder",
        "MiniMaxH3CompetingVSAMetadataBuilder",
    )
    assert built == [(name, 90) for name in names]
    products = [record.prepared(layer.group_id) for layer in layers]
    assert len({id(made) for made in products}) == 3 and len(record.memo) == 3
    call = random_call(90)[:3]
    for layer in layers[1:]:
        assert torch.equal(layer(*call, record), layers[0](*call, record))


def test_other_options_are_another_group() -> None:
    groups = {h3_layer(**options).group_id for options in ({"topk": 2}, {"topk": 3}, {"sparsity": 0.5})}
    assert len(groups) == 3
    assert h3_layer(topk=2, needs={"num_kv_heads": 1}).group_id not in groups


def test_steps_share_one_product() -> None:
    """The layout decides, and it does not change: one build for the whole loop, with or without a gate beside it."""
    call = random_call(SMALL.tokens)
    layer = h3_layer(topk=2, tile_size=TILE, needs=FLOAT64)
    record = SMALL.record()
    with counted_builds() as built:
        for step in range(3):
            at = record.at_step(step, num_steps=3, sigma=1 - step / 3)
            prepare_attention(layer, {"self": at}, {"self": (SMALL.tokens,) * 2})
            layer(*call[:3], at.with_layer_inputs(gate_compress=call[3]))
    assert len(built) == 1


@pytest.mark.parametrize("way", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_compute_the_same(way: Any) -> None:
    call = random_call(SMALL.tokens)
    layer = h3_layer(topk=2, tile_size=TILE, needs=FLOAT64)
    expected = layer(*call[:3], SMALL.record(call[3]))
    assert torch.equal(way(layer)(*call[:3], SMALL.record(call[3])), expected)
