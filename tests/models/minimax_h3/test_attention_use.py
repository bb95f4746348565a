"""How the MiniMax-H3 model uses attention: under which roles, with which records, and through the layer only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from omni_attn import Attention, prepare_attention
from omni_attn.backends.metadata import AttentionMetadata, PackedPadding
from omni_attn.config import AttentionConfig
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.models.minimax_h3 import model as h3_model
from omni_attn.models.minimax_h3.attention.fastvideo_h3 import (
    MiniMaxH3CompetingVSAImpl,
    MiniMaxH3VSAImpl,
)
from omni_attn.models.minimax_h3.config import REFINER_ROLE
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.ops.reference import reference_attention
from omni_attn.report import attention_report
from omni_attn.selector import use_attention_config
from tests.models.minimax_h3.sparse_models import ALL_TILES, SPARSE, SPARSE_KIND, run, sparse_model
from tests.models.minimax_h3.tiny_models import (
    KINDS,
    Kind,
    build_inputs,
    build_model,
    config_of,
    seed_weights,
)


def test_every_attention_layer_declares_its_role() -> None:
    layers = {
        name: (layer.role, layer.role_category, layer.request.mask_usage, layer.request.video_grid)
        for name, layer in build_model().named_modules()
        if isinstance(layer, Attention)
    }
    main, refiner = ("self", "self", "never", True), (REFINER_ROLE, "text", "never", False)
    assert layers == {f"transformer_blocks.{i}.attn.attention": main for i in range(2)} | {
        f"token_refiner.refiner_blocks.{i}.attn.attention": refiner for i in range(2)
    }


def test_a_sparse_choice_for_self_never_reaches_the_refiner() -> None:
    report = attention_report(sparse_model())
    assert {(row.role, row.role_category, row.backend, row.impl, row.source) for row in report.rows} == {
        ("self", "self", "FASTVIDEO_VSA", "MiniMaxH3VSAImpl", "per_role['self']"),
        (REFINER_ROLE, "text", "TORCH_SDPA", "TorchSDPAImpl", "platform default"),
    }
    assert [row.layers for row in report.rows] == [2, 2]


def test_a_sparse_choice_for_everything_is_refused_for_the_refiner() -> None:
    with (
        pytest.raises(BackendRejectedError, match=REFINER_ROLE),
        use_attention_config("FASTVIDEO_VSA", device="cpu"),
    ):
        build_model()


def test_the_impl_of_video_sparse_attention_can_be_another() -> None:
    with use_attention_config(AttentionConfig.model_validate(SPARSE), device="cpu"):
        model = MiniMaxH3Model(config_of(), vsa_impl=MiniMaxH3CompetingVSAImpl).eval()
    seed_weights(model)
    impls = {type(layer.impl) for layer in model.modules() if isinstance(layer, Attention)}
    assert MiniMaxH3CompetingVSAImpl in impls and MiniMaxH3VSAImpl not in impls
    assert not torch.equal(run(model, SPARSE_KIND)[0], run(sparse_model(), SPARSE_KIND)[0])


def test_the_layout_is_published_and_prepared_once_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: Any) -> None:
        calls.append(arguments[1:])
        prepare_attention(*arguments)

    monkeypatch.setattr(h3_model, "prepare_attention", counted)
    model = build_model()
    with torch.no_grad():
        model(**build_inputs("fl2va", batch=1, padded_len=64))
    [(records, lengths)] = calls
    assert records["self"].packed_padding == PackedPadding(47, 47)
    assert lengths == {"self": (64, 64), REFINER_ROLE: (5, 5)} and records.keys() == lengths.keys()
    layout = KINDS["fl2va"].layout
    own = model.attention_records(layout, padded_len=64)
    assert own["self"].video_layout == layout
    assert own["self"].packed_padding == PackedPadding(47, 47)
    assert own[REFINER_ROLE].stated == frozenset()


def test_records_of_the_caller_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build_model(), build_inputs()
    layout = KINDS["fl2va"].layout
    records, lengths = model.attention_records(layout), model.config.attention_lengths(47, 5)
    with torch.no_grad():
        expected = model(**inputs)
        monkeypatch.setattr(h3_model, "prepare_attention", _must_not_run)
        for step in range(2):
            records = {role: record.at_step(step, num_steps=2) for role, record in records.items()}
            prepare_attention(model, records, lengths)
            found = model(**inputs, attention_records=records)
            assert all(map(torch.equal, found, expected))


def _must_not_run(*args: object, **kwargs: object) -> None:
    raise AssertionError("records were handed in")


@pytest.mark.parametrize("kind", ["t2va", "ref2va"])
def test_equals_the_same_model_with_attention_in_float64(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build_model(), build_inputs(kind)

    def exact(
        layer: Attention, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata | None = None
    ) -> Tensor:
        return reference_attention(query, key, value)[0].to(query.dtype)

    with torch.no_grad():
        ours = model(**inputs)
        monkeypatch.setattr(Attention, "forward", exact)
        for one, other in zip(ours, model(**inputs), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_video_sparse_attention_that_keeps_all_is_dense_and_else_is_not() -> None:
    dense, everything, sparse = build_model(), sparse_model(ALL_TILES), sparse_model()
    expected = run(dense, SPARSE_KIND)
    for one, other in zip(run(everything, SPARSE_KIND), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert (run(sparse, SPARSE_KIND)[0] - expected[0]).abs().max() > 1e-3


@pytest.mark.parametrize("backend", ["FASTVIDEO_VSA", "RAINFUSION_ATTN"])
def test_padding_changes_nothing_for_sparse_attention_either(backend: str) -> None:
    config = SPARSE if backend == "FASTVIDEO_VSA" else {"per_role": {"self": backend}}
    model = sparse_model(config)
    positions = build_inputs(SPARSE_KIND, batch=1)["position_ids"]
    padded = torch.cat([positions, torch.zeros(256 - len(positions), 3, dtype=torch.float64)])
    expected = run(model, SPARSE_KIND)
    for one, other in zip(run(model, SPARSE_KIND, 256, position_ids=padded), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_without_a_layout_video_sparse_attention_says_what_to_do() -> None:
    with pytest.raises(MetadataError, match=r"MiniMaxH3Model\.attention_records"):
        sparse_model()(**build_inputs(SPARSE_KIND, batch=1))


@pytest.mark.parametrize(("config", "gated"), [({}, False), (SPARSE, False), (SPARSE, True)])
def test_equal_blocks_compile_into_one_frame(config: dict[str, Any], gated: bool) -> None:
    model = sparse_model(config, gate_compress=gated)
    longer = Kind(grid=(8, 4, 8), condition_video=5)
    expected = [run(model, SPARSE_KIND), run(model, longer)]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for block in model.transformer_blocks:
        block.compile(fullgraph=True, backend=counter)
    for kind, outputs, frames in ((SPARSE_KIND, expected[0], 1), (longer, expected[1], 2)):
        for one, other in zip(run(model, kind), outputs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        assert counter.frame_count <= frames


@pytest.mark.parametrize("gated", [False, True])
def test_the_whole_model_compiles_without_a_break(gated: bool) -> None:
    model = sparse_model(gate_compress=gated)
    records = model.attention_records(SPARSE_KIND.layout)
    lengths = model.config.attention_lengths(SPARSE_KIND.rows, SPARSE_KIND.text)
    prepare_attention(model, records, lengths)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        outputs = compiled(**build_inputs(SPARSE_KIND, batch=1), attention_records=records)
    for one, other in zip(outputs, run(model, SPARSE_KIND), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
