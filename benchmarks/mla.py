"""Latent attention beside the kernels of other packages, in one run: absorbed decodes, and prefills in the open form.

    python -m benchmarks.mla [--heads 128,16] [--batch 64] [--context 4096] [--tokens 4096] [--page-size 64]
                             [--rounds N] [--seed N] [--toy]

bfloat16, random tensors, the channels of DeepSeek-V3 (512 + 64 kept; 128 + 64 and 128 opened), pages in random order.

decode   one token of each request, from the absorbed query to the latent of each head; GB/s = rows of the cache once
         / time, TFLOP/s = 2 H L (576 + 512) / time. Peer: FlashInfer's MLA wrapper, planned before, over dense parts.
prefill  attention of one prompt to itself, causal, from opened keys and values: TFLOP/s = T T H (192 + 128) / time.
         Peer: FlashAttention 3 over ragged batches.

Each candidate is held against float64 on one request, or on the last queries of the prompt, before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from benchmarks.machine import machine_line
from benchmarks.mla_calls import SIZES, TOY_SIZES, Setting, Shape, flash_3_call, flashinfer_call
from benchmarks.rounds import Candidate, Row, measure
from benchmarks.tables import markdown_table
from omni_attn.backends.mla import MLAImpl, MLAMetadata
from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.ops.mla.reference import attend_latents, attend_ragged

Made = Candidate | tuple[str, Exception]
Attend = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


def decode_rows(setting: Setting, backends: tuple[str, ...], **how: int) -> list[Row]:
    """Every candidate for a step of decodes."""
    shape, sizes = setting.shape, setting.shape.sizes
    width = -(-shape.context // shape.page_size)
    order = 1 + torch.randperm(shape.batch * width, generator=setting.numbers, device=setting.device)
    table = order.view(shape.batch, width).int()
    cache = setting.random(1 + shape.batch * width, shape.page_size, setting.spec.head_size)
    query = (
        setting.random(shape.batch, shape.heads, sizes.latent),
        setting.random(shape.batch, shape.heads, sizes.rope),
    )
    common = setting.common(shape.batch, 1, shape.context, table)
    one = torch.zeros(1, dtype=torch.int32, device=setting.device)
    wanted = attend_latents(
        query[0][-1:].double(),
        query[1][-1:].double(),
        cache,
        row_requests=one,
        row_lens=common.seq_lens[-1:],
        block_table=table[-1:],
        max_seq_len=shape.context,
        softmax_scale=shape.scale,
    )[0]

    def call_of(impl: MLAImpl, metadata: MLAMetadata) -> Attend:
        return partial(impl.forward_mqa, query, cache, metadata)

    made = chain(
        _ours(setting, backends, common, call_of),
        _peer("FlashInfer MLA", lambda: flashinfer_call(setting, query, cache, common)),
    )
    return measure(made, lambda c, _: _error(c.call()[-1:], wanted), setting.device, **how)


def prefill_rows(setting: Setting, backends: tuple[str, ...], **how: int) -> list[Row]:
    """Every candidate for a prompt."""
    shape, sizes = setting.shape, setting.shape.sizes
    table = torch.zeros(1, -(-shape.tokens // shape.page_size), dtype=torch.int32, device=setting.device)
    common = setting.common(1, shape.tokens, shape.tokens, table)
    query = setting.random(shape.tokens, shape.heads, sizes.nope + sizes.rope)
    opened = setting.random(shape.tokens, shape.heads, sizes.nope + sizes.value)
    key, value, rope = (
        opened[..., : sizes.nope],
        opened[..., sizes.nope :],
        setting.random(shape.tokens, sizes.rope),
    )
    _, metadata = setting.ours("TORCH_SDPA", common)
    assert metadata.prefill is not None
    bounds, last = metadata.prefill.own, min(64, shape.tokens)
    tail = setting.common(1, last, shape.tokens, table)
    few = replace(bounds, query_start_loc=tail.query_start_loc, query_starts=(0, last), max_query_len=last)
    wanted = attend_ragged(
        query[-last:].double(), key, rope, value, few, causal=True, softmax_scale=shape.scale
    )[0]

    def call_of(impl: MLAImpl, _: MLAMetadata) -> Attend:
        return partial(impl.attend_ragged, query, key, rope, value, bounds, causal=True)

    made = chain(
        _ours(setting, backends, common, call_of),
        _peer("FlashAttention 3", lambda: flash_3_call(setting, query, key, rope, value, common)),
    )
    return measure(made, lambda c, _: _error(c.call()[-last:], wanted), setting.device, **how)


def _ours(
    setting: Setting,
    backends: tuple[str, ...],
    common: CommonAttentionMetadata,
    call_of: Callable[[MLAImpl, MLAMetadata], Attend],
) -> Iterator[Made]:
    for name in backends:
        try:
            call = partial(_first, call_of(*setting.ours(name, common)))
        except Exception as error:  # what is not here is a row as well
            yield name, error
            continue
        yield Candidate(name=f"ours, {name}", kind="ours", call=call)


def _peer(name: str, make: Callable[[], Callable[[], torch.Tensor]]) -> Iterator[Made]:
    try:
        yield Candidate(name=name, kind="peer", call=make())
    except Exception as error:  # what is not here is a row as well
        yield name, error


def _first(call: Attend) -> torch.Tensor:
    return call()[0]


def _error(output: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((output.double() - wanted).norm() / wanted.norm())


def _cells(row: Row, flops: float, read: int) -> list[str]:
    if row.milliseconds is None:
        return [row.name, "", "", "", row.problem]
    seconds = row.milliseconds * 1e-3
    bandwidth = f"{read / seconds / 1e9:.0f}" if read else ""
    return [
        row.name,
        f"{row.milliseconds:.3f}",
        f"{flops / seconds / 1e12:.0f}",
        bandwidth,
        f"{row.error:.1e}",
    ]


def main(words: list[str] | None = None) -> None:
    """Measures both parts for each number of heads, and prints their tables."""
    parser = argparse.ArgumentParser(description="Latent attention beside its peers.")
    numbers = {"batch": 64, "context": 4096, "tokens": 4096, "page-size": 64, "rounds": 15, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--heads", default="128,16")
    parser.add_argument("--toy", action="store_true", help="a small case on a CPU")
    given = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not given.toy:
        raise SystemExit("needs an NVIDIA GPU, found none: --toy runs a small case on a CPU")
    print(machine_line(device.type))
    backends = ("TRITON_ATTN",) if device.type == "cuda" else ("TORCH_SDPA",)
    how = {"rounds": given.rounds, "seed": given.seed}
    columns = ("candidate", "ms", "TFLOP/s", "GB/s", "error")
    for heads in map(int, given.heads.split(",")):
        shape = Shape(heads, given.batch, given.context, given.tokens, given.page_size, SIZES)
        if given.toy:
            shape = Shape(heads, 2, 24, 24, 8, TOY_SIZES)
        setting, sizes = Setting(shape, device, given.seed), shape.sizes
        keys = shape.batch * shape.context
        with torch.no_grad():
            rows = decode_rows(setting, backends, **how)
            read = keys * setting.spec.token_bytes
            flops = 2.0 * heads * keys * (2 * sizes.latent + sizes.rope)
            print(f"\ndecode, {heads} heads, {shape.batch} requests over {shape.context} tokens:\n")
            print(markdown_table(columns, [_cells(row, flops, read) for row in rows]))
            rows = prefill_rows(setting, backends, **how)
            flops = float(shape.tokens) ** 2 * heads * (sizes.nope + sizes.rope + sizes.value)
            print(f"\nprefill, {heads} heads, {shape.tokens} tokens:\n")
            print(markdown_table(columns, [_cells(row, flops, 0) for row in rows]))


if __name__ == "__main__":
    main()
