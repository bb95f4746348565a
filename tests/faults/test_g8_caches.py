"""Public faults, group G8: caches and very long sequences. B50 at the level of layers, and B52.

Each recipe runs on every registered backend. The selector's own cache (the rest of B50) is tested beside the selector.

Waiting for what does not exist yet: B52 on block maps (sparse backends) and on Triton kernels of our own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from omni_attn import (
    Attention,
    AttentionConfig,
    AttentionMetadata,
    attention_report,
    prepare_attention,
    register_diffusion_backend,
    unregister_diffusion_backend,
    use_attention_config,
)
from omni_attn.backends.torch_sdpa import TorchSDPABackend, TorchSDPAImpl
from omni_attn.ops.reference import reference_attention
from tests.faults.opaque_kernels import opaque_kernels
from tests.layer.counting import counting_backend
from tests.layer.stands import (
    COMPILED,
    HEAD_SIZE,
    STANDS,
    Stand,
    assert_close,
    every_stand,
    outcome_of,
    tensors,
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- B50: what belongs to one choice is not used for another


@pytest.mark.parametrize("stands", [COMPILED, COMPILED[::-1]], ids=["in order", "in reverse order"])
def test_b50_a_compiled_graph_is_not_used_under_another_backend(stands: list[Stand]) -> None:
    """All layers have the same code, shapes and dtypes, and run in turns: no graph of an earlier one serves a later."""
    tokens = max(max(stand.lengths(6, 6)) for stand in stands)
    call = [x.bfloat16() for x in tensors(2, tokens, tokens)]
    expected = reference_attention(*call)[0]
    many = torch._dynamo.config.patch(recompile_limit=2 * len(stands))
    with ExitStack() as kernels, torch.no_grad(), many:
        runs, logs = [], []
        for stand in stands:  # each is built before the next one's package may take the same name
            # Sparse backends share executors, so that the stand-ins behind them are in place one at a time.
            place = ExitStack() if stand.backend.facts.selects_blocks else kernels
            logs.append(place.enter_context(opaque_kernels(stand)))
            with place if place is not kernels else nullcontext():
                layer = stand.layer(4, HEAD_SIZE, dtype="bfloat16")
            runs.append((stand, torch.compile(layer, fullgraph=True, backend="eager"), logs[-1]))
        for stand, compiled, own in runs * 2:
            counts = [len(log) for log in logs]
            with opaque_kernels(stand) if stand.backend.facts.selects_blocks else nullcontext(own) as running:
                before = len(running)
                assert_close(compiled(*call), expected)
                # These are traced into torch's own kernels, which count nothing.
                once = 0 if stand.name in ("TORCH_SDPA", "FLEX_ATTN") else 1
                assert len(running) - before == once, str(stand)
            ran = [len(log) - count for log, count in zip(logs, counts, strict=True)]
            assert ran == [once if log is running else 0 for log in logs], str(stand)


@every_stand
def test_b50_groups_are_keyed_by_all_that_changes_what_is_prepared(stand: Stand) -> None:
    variations: list[dict[str, Any]] = [
        {},
        {"num_heads": 8},
        {"head_size": 64},
        {"num_kv_heads": 2},
        {"softmax_scale": 0.5},
        {"causal": True},
        {"window": (2, 2)},
    ]
    with stand.kernels():
        layers = [
            stand.layer(**{"num_heads": 4, "head_size": HEAD_SIZE, **needs})
            for needs in variations
            if stand.accepts(**needs)
        ]
        twin = stand.layer(4, HEAD_SIZE, role="cross", prefix="elsewhere")
    names = [layer.group_id for layer in layers]
    assert len(set(names)) == len(names) > 1 and all(isinstance(name, str) for name in names)
    assert twin.group_id == names[0]


def test_b50_backends_variants_and_options_make_groups_of_their_own() -> None:
    names = set()
    for stand in STANDS:
        with stand.kernels():
            names.add(stand.layer(4, HEAD_SIZE).group_id)
    assert len(names) == len(STANDS)
    with counting_backend("SECOND"):
        plain = AttentionConfig.model_validate({"default": "TORCH_SDPA"})
        backed = AttentionConfig.model_validate(
            {"default": {"backend": "TORCH_SDPA", "fallback": ["SECOND"]}}
        )
        with use_attention_config(plain, device="cpu"):
            layers = [
                Attention(4, HEAD_SIZE, role="self"),
                Attention(4, HEAD_SIZE, role="self", config=backed),
            ]
    assert layers[0].group_id != layers[1].group_id


def test_b50_a_replaced_class_serves_new_layers_at_once() -> None:
    class Other(TorchSDPAImpl):
        pass

    class Replacement(TorchSDPABackend):
        @staticmethod
        def get_impl_cls() -> type[TorchSDPAImpl]:
            return Other

    with use_attention_config(AttentionConfig(), device="cpu"):
        before = Attention(4, HEAD_SIZE, role="self")
        register_diffusion_backend("TORCH_SDPA", Replacement)
        try:
            during = Attention(4, HEAD_SIZE, role="self")
        finally:
            unregister_diffusion_backend("TORCH_SDPA")
        after = Attention(4, HEAD_SIZE, role="self")
    assert [type(layer.impl) for layer in (before, during, after)] == [TorchSDPAImpl, Other, TorchSDPAImpl]
    assert before.group_id == after.group_id != during.group_id
    for layer in (before, during, after):  # what was built stays as it was built
        assert_close(layer(*tensors(1, 3, 3)), reference_attention(*tensors(1, 3, 3))[0])


def test_b50_one_line_per_role_source_and_backend(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> int:
        return sum('"b50.' in record.getMessage() for record in caplog.records)

    with caplog.at_level(logging.INFO, "omni_attn"), counting_backend("SECOND"):
        for _ in range(3):
            with use_attention_config(AttentionConfig(), device="cpu"):
                Attention(4, HEAD_SIZE, role="b50.one")
        assert lines() == 1
        with use_attention_config(AttentionConfig(default="TORCH_SDPA"), device="cpu"):  # another source
            Attention(4, HEAD_SIZE, role="b50.one")
        assert lines() == 2
        with use_attention_config(AttentionConfig(default="SECOND"), device="cpu"):  # another backend
            Attention(4, HEAD_SIZE, role="b50.one")
            Attention(4, HEAD_SIZE, role="b50.two")
        assert lines() == 4
    text = caplog.text
    assert "platform default" in text and "TORCH_SDPA" in text and "SECOND" in text


@every_stand
def test_b50_equal_layers_of_two_roles_are_both_reported(stand: Stand) -> None:
    with stand.kernels():
        model = torch.nn.ModuleList([stand.layer(4, HEAD_SIZE, role=role) for role in ("self", "joint")])
    assert [row.role for row in attention_report(model).rows] == ["self", "joint"]


# -- B52: offsets beyond 32 bits

HEADS = 40
every_masked_stand = pytest.mark.parametrize(
    "stand", [stand for stand in STANDS if "padding" in stand.facts.mask_kinds], ids=str
)
LONG = (139810, 139811, 200000)  # the second is the first whose last element lies behind 2**31


def fused_on_meta(tokens: int) -> list[torch.Tensor]:
    """Query, key and value as slices of one projection: token stride 15360."""
    fused = torch.empty(1, tokens, 3 * HEADS * HEAD_SIZE, device="meta", dtype=torch.bfloat16)
    return [part.unflatten(-1, (HEADS, HEAD_SIZE)) for part in fused.chunk(3, dim=-1)]


@every_stand
@pytest.mark.parametrize("tokens", LONG)
def test_b52_long_strided_calls_keep_their_shape(stand: Stand, tokens: int) -> None:
    query, key, value = fused_on_meta(tokens)
    assert query.stride() == (tokens * 15360, 15360, HEAD_SIZE, 1)
    record = AttentionMetadata()
    with stand.kernels():
        layer = stand.layer(HEADS, HEAD_SIZE)
        prepare_attention(layer, {"self": record}, {"self": (tokens, tokens)})
        output = layer(query, key, value, record)
    assert output.shape == (1, tokens, HEADS, HEAD_SIZE) and output.is_contiguous()


def tensors_in(product: object) -> Iterator[torch.Tensor]:
    """Tensors that a product holds; those of a BlockMask number tiles of 128 tokens, in int32 as torch wants them."""
    if isinstance(product, BlockMask):
        values = [cell.cell_contents for cell in product.mask_mod.__closure__ or ()]
    else:
        values = list(vars(product).values()) if hasattr(product, "__dict__") else []
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from tensors_in(value)


@every_masked_stand
@pytest.mark.parametrize("tokens", LONG)
def test_b52_what_indexes_tokens_is_int64(stand: Stand, tokens: int) -> None:
    """Boundaries of packed sequences are int32 by the kernels' own contract; everything that gathers is int64."""
    mask = torch.empty(2, tokens, dtype=torch.bool, device="meta")
    with stand.kernels():
        product = stand.impl(HEADS, HEAD_SIZE)[1].build(AttentionMetadata(attn_mask=mask), (tokens, tokens))
    found = list(tensors_in(product))
    assert found
    for tensor in found:
        small = tensor.numel() <= 3  # boundaries of two items
        # Masks are bool, or bits in uint8.
        assert tensor.dtype in (torch.bool, torch.uint8, torch.int64) or (
            small and tensor.dtype == torch.int32
        )


@every_masked_stand
def test_b52_more_tokens_than_int32_boundaries_can_count(stand: Stand) -> None:
    """Declared and refused by name, or no 32-bit count is made at all."""
    items, tokens = 10738, 200000
    assert items * tokens > 2**31 - 1
    record = AttentionMetadata(attn_mask=torch.empty(items, tokens, dtype=torch.bool, device="meta"))
    with stand.kernels():
        layer = stand.layer(HEADS, HEAD_SIZE)
        outcome = outcome_of(lambda: layer.prepare(record, (tokens, tokens)))
    if isinstance(outcome, str):
        assert stand.name in outcome and str(items * tokens) in outcome
    else:
        (made,) = record.memo.values()
        assert torch.int32 not in {tensor.dtype for tensor in tensors_in(made.product)}
