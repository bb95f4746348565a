"""The model on a GPU: the numbers of the CPU, without waiting for the device, and inside a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn import prepare_attention
from omni_attn.config import AttentionConfig
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.selector import use_attention_config
from tests.models.minimax_h3.sparse_models import SPARSE, SPARSE_KIND, run, sparse_model
from tests.models.minimax_h3.tiny_models import build_inputs, build_model, cast_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),  # torch tells once that its watch over waits is a prototype
]
CHOICES: list[dict[str, Any]] = [{}, SPARSE]
PADDED = 256


def on_gpu(config: dict[str, Any], dtype: torch.dtype) -> MiniMaxH3Model:
    with use_attention_config(AttentionConfig.model_validate(config), device="cuda", dtype=dtype):
        model = build_model(gate_compress=True)
    cast_weights(model, dtype)
    return model.cuda()


def call_of(model: MiniMaxH3Model, padded_len: int | None) -> dict[str, Any]:
    """Arguments on the GPU, with prepared records."""
    records = model.attention_records(SPARSE_KIND.layout, padded_len)
    lengths = model.config.attention_lengths(padded_len or SPARSE_KIND.rows, SPARSE_KIND.text)
    prepare_attention(model, records, lengths)
    inputs = build_inputs(SPARSE_KIND, batch=1, padded_len=padded_len)
    return {name: tensor.cuda() for name, tensor in inputs.items()} | {"attention_records": records}


@pytest.mark.parametrize(
    ("config", "dtype", "allowed"),
    # Not sparse in bfloat16: rounded scores choose other tiles.
    [({}, torch.float32, 2e-3), ({}, torch.bfloat16, 0.05), (SPARSE, torch.float32, 2e-3)],
    ids=["dense float32", "dense bfloat16", "sparse float32"],
)
def test_the_numbers_of_the_cpu(config: dict[str, Any], dtype: torch.dtype, allowed: float) -> None:
    expected = run(sparse_model(config, gate_compress=True), SPARSE_KIND)
    model = on_gpu(config, dtype)
    with torch.no_grad():
        outputs = model(**call_of(model, None))
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=allowed * float(other.abs().max()), rtol=0)


@pytest.mark.parametrize("padded_len", [None, PADDED])
@pytest.mark.parametrize("config", CHOICES, ids=["dense", "sparse"])
def test_forward_waits_for_nothing(config: dict[str, Any], padded_len: int | None) -> None:
    model = on_gpu(config, torch.bfloat16)
    call = call_of(model, padded_len)
    with torch.no_grad():
        model(**call)  # kernels are compiled, and tables of tiles made, with the first call
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(**call)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("config", CHOICES, ids=["dense", "sparse"])
def test_a_cuda_graph_replays_the_forward(config: dict[str, Any]) -> None:
    model = on_gpu(config, torch.bfloat16)
    call = call_of(model, None)
    other = torch.randn_like(call["hidden_states"])
    with torch.no_grad():
        expected = model(**call | {"hidden_states": other})
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(**call)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = model(**call)
        call["hidden_states"].copy_(other)
        graph.replay()
    for one, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one, wanted, atol=1e-3 * float(wanted.abs().max()), rtol=0)
