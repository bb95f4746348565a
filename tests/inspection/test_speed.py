"""Predictions are counts of pairs; times are those of the captured call."""

from __future__ import annotations

import time

import pytest
import torch

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.config import AttentionConfig
from omni_attn.inspection.capture import CapturedCall
from omni_attn.inspection.speed import dense_layer, measure_speed, predicted_speedup
from omni_attn.inspection.target import Target
from omni_attn.layer import Attention
from omni_attn.ops.block_sparse.executor import CoarseTerm
from omni_attn.platforms import current_omni_platform
from omni_attn.selector import use_attention_config
from tests.inspection.calls import sparse_call
from tests.inspection.stubs import TILED, TiledImpl
from tests.selection.stubs import registered


def test_predictions() -> None:
    call = sparse_call(12)
    pairs, tiles = 60 * 60, 12 * 12
    assert predicted_speedup(call.selection) == pytest.approx(pairs / (pairs + tiles / 2))
    coarse = CoarseTerm(torch.zeros(2, 4, 12, 6), None)
    assert predicted_speedup(call.selection._replace(coarse=coarse)) == pytest.approx(pairs / (pairs + tiles))


def test_times_are_those_of_both_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = TiledImpl.forward
    calls = 0

    def slow(*arguments: object, **named: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        time.sleep(10e-3)
        return attend(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(TiledImpl, "forward", slow)
    sparse = sparse_call(3, batch=1, kv_heads=4, dtype=torch.float32)
    platform = current_omni_platform("cpu")
    with (
        registered(TILED),
        use_attention_config(AttentionConfig.model_validate({"default": "TILED_TEST"}), platform=platform),
    ):
        layer = Attention(4, 8, role="self", video_grid=True, value_head_size=6, dtype="float32")
    tensors = (sparse.query, sparse.key, sparse.value)
    record = AttentionMetadata(vsa_dit_seq_shape=(3, 5, 4), step=0)
    layer.prepare(record, (60, 60))
    call = CapturedCall(
        target=Target(0, 0),
        layer=layer,
        name="layer",
        query=tensors[0],
        key=tensors[1],
        value=tensors[2],
        record=record,
        output=sparse.output,
    )
    dense = dense_layer(call, platform)
    assert dense.selection is not None and dense.selection.backend == "TORCH_SDPA"
    assert dense.selection.spec is None
    speed = measure_speed(call, dense, sparse.selection, rounds=2)
    assert calls >= 3  # one that is not timed, and two rounds
    assert speed.sparse_ms > 10 > speed.dense_ms
    assert speed.measured == speed.dense_ms / speed.sparse_ms < 1
    assert "wall clock" in speed.method
    assert speed.predicted == predicted_speedup(sparse.selection)
