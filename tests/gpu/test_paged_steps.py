"""A step of forty paged layers: nothing waits for the device, one build serves all, and the CPU gives the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.backends.paged_split import split_decodes_and_prefills
from omni_attn.facts import FullAttentionSpec
from omni_attn.kv_cache import BlockPool, BlockTable, StepInputs, init_attention_groups, make_step
from omni_attn.kv_cache.layouts import allocate_kv_cache
from omni_attn.paged_layer import PagedAttention
from omni_attn.selector import use_attention_config
from tests.gpu.machine import on_gpu

pytestmark = on_gpu

LAYERS, PAGE, CHUNK = 40, 8, 48
SPEC = FullAttentionSpec(block_size=PAGE, num_kv_heads=2, head_size=64, dtype="float16")


@contextmanager
def without_waiting(device: str) -> Iterator[None]:
    """A host function that waits for the GPU raises."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def stack(backend: str | None, device: str) -> list[PagedAttention]:
    with use_attention_config(backend, device=device):
        return [
            PagedAttention(4, 64, role="self", num_kv_heads=2, kv_cache=SPEC, prefix=f"blocks.{n}")
            for n in range(LAYERS)
        ]


def run(backend: str | None, device: str, chunks: int = 3) -> torch.Tensor:
    """Chunks of two streams, each written twice before it is committed."""
    layers = stack(backend, device)
    table = BlockTable(BlockPool(64), PAGE, 2, 20, device)
    steps, groups = StepInputs(table), init_attention_groups(layers, {"self": SPEC}, torch.device(device))
    caches = {layer.prefix: allocate_kv_cache(SPEC, 64, "NHD", device) for layer in layers}
    numbers = torch.Generator().manual_seed(0)
    inputs = [
        [
            torch.randn(2 * CHUNK, heads, 64, generator=numbers).to(device, torch.float16)
            for heads in (4, 2, 2)
        ]
        for _ in range(chunks)
    ]
    for stream in ("one", "two"):
        table.add(stream)
    outputs = []
    if device == "cuda":
        first_call(layers[0], inputs[0], table.device)  # kernels load once, and wait for that
    with torch.no_grad(), without_waiting(device):
        for query, key, value in inputs:
            for stream in ("one", "two"):
                table.append(stream, CHUNK)
            for _ in range(2):
                common = steps.common(("one", "two"), causal=False)
                assert split_decodes_and_prefills(common)[1] == 2
                step = make_step(groups, {"self": common}, caches)
                found = query
                for layer in layers:
                    found = query + layer(found, key, value, step)
            outputs.append(found)
            for stream in ("one", "two"):
                table.commit(stream)
    return torch.cat(outputs).float().cpu()


def first_call(layer: PagedAttention, tensors: list[torch.Tensor], device: torch.device) -> None:
    groups = init_attention_groups([layer], {"self": SPEC}, device)
    loc = torch.tensor([0, 2 * CHUNK], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=loc.to(device),
        query_start_loc_cpu=loc,
        seq_lens=loc[1:].to(device),
        seq_lens_cpu=loc[1:],
        num_reqs=1,
        num_actual_tokens=2 * CHUNK,
        max_query_len=2 * CHUNK,
        max_seq_len=2 * CHUNK,
        block_table=torch.arange(1, 13, dtype=torch.int32, device=device)[None],
        slot_mapping=torch.arange(PAGE, PAGE + 2 * CHUNK, device=device),
        causal=False,
    )
    cache = allocate_kv_cache(SPEC, 64, "NHD", device)
    with torch.no_grad():
        layer(*tensors, make_step(groups, {"self": common}, {layer.prefix: cache}))


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "TRITON_ATTN", None], ids=str)
def test_nothing_waits_and_the_cpu_agrees(backend: str | None) -> None:
    found, wanted = run(backend, "cuda"), run("TORCH_SDPA", "cpu")
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=5e-3)
