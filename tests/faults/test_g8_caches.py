"""Public faults, group G8: caches and very long sequences. B50 at the level of layers, and B52.

Each recipe runs on every registered backend. The selector's own cache (the rest of B50) is tested beside the selector.

Waiting for what does not exist yet: B52 on block maps (sparse backends) and on Triton kernels of our own.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

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
from tests.layer.stands import STANDS, Stand, assert_close, every_stand, outcome_of, tensors


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- B50: what belongs to one choice is not used for another


@pytest.mark.parametrize(("stand", "other"), list(itertools.combinations(STANDS, 2)), ids=str)
def test_b50_a_compiled_graph_is_not_used_under_another_backend(stand: Stand, other: Stand) -> None:
    """Both layers have the same code, shapes and dtypes, and run in turns."""
    call = [x.bfloat16() for x in tensors(2, 6, 6)]
    expected = reference_attention(*call)[0]
    with opaque_kernels(stand) as one, opaque_kernels(other) as two, torch.no_grad():
        runs = []
        for chosen, log in ((stand, one), (other, two)):
            layer = chosen.layer(4, 8, dtype="bfloat16")
            runs.append((torch.compile(layer, fullgraph=True, backend="eager"), log, chosen.name))
        for compiled, log, name in runs * 2:
            counts = len(one), len(two)
            assert_close(compiled(*call), expected)
            ran = (len(one) - counts[0], len(two) - counts[1])
            if name == "TORCH_SDPA":  # torch's own kernel, which counts nothing
                assert ran == (0, 0)
            else:
                assert ran == ((1, 0) if log is one else (0, 1))


@every_stand
def test_b50_groups_are_keyed_by_all_that_changes_what_is_prepared(stand: Stand) -> None:
    variations: list[dict[str, Any]] = [
        {},
        {"num_heads": 8},
        {"head_size": 16},
        {"num_kv_heads": 2},
        {"softmax_scale": 0.5},
        {"causal": True},
        {"window": (2, 2)},
    ]
    with stand.kernels():
        layers = [
            stand.layer(**{"num_heads": 4, "head_size": 8, **needs})
            for needs in variations
            if _can(stand, needs)
        ]
        twin = stand.layer(4, 8, role="cross", prefix="elsewhere")
    names = [layer.group_id for layer in layers]
    assert len(set(names)) == len(names) > 3 and all(isinstance(name, str) for name in names)
    assert twin.group_id == names[0]


def _can(stand: Stand, needs: dict[str, Any]) -> bool:
    facts = stand.facts
    return not (
        ("num_kv_heads" in needs and not facts.gqa)
        or ("causal" in needs and not facts.causal)
        or ("window" in needs and not facts.window)
        or ("softmax_scale" in needs and not facts.custom_scale)
    )


def test_b50_backends_variants_and_options_make_groups_of_their_own() -> None:
    names = set()
    for stand in STANDS:
        with stand.kernels():
            names.add(stand.layer(4, 8).group_id)
    assert len(names) == len(STANDS)
    with counting_backend("SECOND"):
        plain = AttentionConfig.model_validate({"default": "TORCH_SDPA"})
        backed = AttentionConfig.model_validate(
            {"default": {"backend": "TORCH_SDPA", "fallback": ["SECOND"]}}
        )
        with use_attention_config(plain, device="cpu"):
            layers = [Attention(4, 8, role="self"), Attention(4, 8, role="self", config=backed)]
    assert layers[0].group_id != layers[1].group_id


def test_b50_a_replaced_class_serves_new_layers_at_once() -> None:
    class Other(TorchSDPAImpl):
        pass

    class Replacement(TorchSDPABackend):
        @staticmethod
        def get_impl_cls() -> type[TorchSDPAImpl]:
            return Other

    with use_attention_config(AttentionConfig(), device="cpu"):
        before = Attention(4, 8, role="self")
        register_diffusion_backend("TORCH_SDPA", Replacement)
        try:
            during = Attention(4, 8, role="self")
        finally:
            unregister_diffusion_backend("TORCH_SDPA")
        after = Attention(4, 8, role="self")
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
                Attention(4, 8, role="b50.one")
        assert lines() == 1
        with use_attention_config(AttentionConfig(default="TORCH_SDPA"), device="cpu"):  # another source
            Attention(4, 8, role="b50.one")
        assert lines() == 2
        with use_attention_config(AttentionConfig(default="SECOND"), device="cpu"):  # another backend
            Attention(4, 8, role="b50.one")
            Attention(4, 8, role="b50.two")
        assert lines() == 4
    text = caplog.text
    assert "platform default" in text and "TORCH_SDPA" in text and "SECOND" in text


@every_stand
def test_b50_equal_layers_of_two_roles_are_both_reported(stand: Stand) -> None:
    with stand.kernels():
        model = torch.nn.ModuleList([stand.layer(4, 8, role=role) for role in ("self", "joint")])
    assert [row.role for row in attention_report(model).rows] == ["self", "joint"]


# -- B52: offsets beyond 32 bits

HEADS, SIZE = 40, 128
every_masked_stand = pytest.mark.parametrize(
    "stand", [stand for stand in STANDS if "padding" in stand.facts.mask_kinds], ids=str
)
LONG = (139810, 139811, 200000)  # the second is the first whose last element lies behind 2**31


def fused_on_meta(tokens: int) -> list[torch.Tensor]:
    """Query, key and value as slices of one projection: token stride 15360."""
    fused = torch.empty(1, tokens, 3 * HEADS * SIZE, device="meta", dtype=torch.bfloat16)
    return [part.unflatten(-1, (HEADS, SIZE)) for part in fused.chunk(3, dim=-1)]


@every_stand
@pytest.mark.parametrize("tokens", LONG)
def test_b52_long_strided_calls_keep_their_shape(stand: Stand, tokens: int) -> None:
    query, key, value = fused_on_meta(tokens)
    assert query.stride() == (tokens * 15360, 15360, SIZE, 1)
    record = AttentionMetadata()
    with stand.kernels():
        layer = stand.layer(HEADS, SIZE)
        prepare_attention(layer, {"self": record}, {"self": (tokens, tokens)})
        output = layer(query, key, value, record)
    assert output.shape == (1, tokens, HEADS, SIZE) and output.is_contiguous()


def tensors_in(product: object) -> Iterator[torch.Tensor]:
    for value in vars(product).values() if hasattr(product, "__dict__") else ():
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
        product = stand.impl(HEADS, SIZE)[1].build(AttentionMetadata(attn_mask=mask), (tokens, tokens))
    found = list(tensors_in(product))
    assert found
    for tensor in found:
        small = tensor.numel() <= 3  # boundaries of two items
        assert tensor.dtype in (torch.bool, torch.int64) or (small and tensor.dtype == torch.int32)


@every_masked_stand
def test_b52_more_tokens_than_int32_boundaries_can_count(stand: Stand) -> None:
    """Declared and refused by name, or no 32-bit count is made at all."""
    items, tokens = 10738, 200000
    assert items * tokens > 2**31 - 1
    record = AttentionMetadata(attn_mask=torch.empty(items, tokens, dtype=torch.bool, device="meta"))
    with stand.kernels():
        layer = stand.layer(HEADS, SIZE)
        outcome = outcome_of(lambda: layer.prepare(record, (tokens, tokens)))
    if isinstance(outcome, str):
        assert stand.name in outcome and str(items * tokens) in outcome
    else:
        (made,) = record.memo.values()
        assert torch.int32 not in {tensor.dtype for tensor in tensors_in(made.product)}
