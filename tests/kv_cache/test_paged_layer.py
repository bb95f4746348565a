"""PagedAttention against dense attention over the same tokens, and the calls that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from omni_attn import Attention, PagedAttention, attention_report, use_attention_config
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.facts import FullAttentionSpec, MLAAttentionSpec
from omni_attn.kv_cache import PagedStep, init_attention_groups, make_step, split_pages
from omni_attn.kv_cache.layouts import allocate_kv_cache
from omni_attn.ops.reference import reference_attention
from omni_attn.testing import fake_device
from tests.kv_cache.counted import CPU, SPEC, Tally, layer, make_common, paged_backend


@pytest.fixture(autouse=True)
def counted() -> Iterator[Tally]:
    with paged_backend("COUNTED", rebinds=True) as tally:
        yield tally


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        noise(tokens, 4, 8, seed=seed),
        noise(tokens, 2, 8, seed=seed + 1),
        noise(tokens, 2, 8, seed=seed + 2),
    )


def step_of(*layers: PagedAttention, lengths: list[tuple[int, int]], **changes: Any) -> PagedStep:
    groups = init_attention_groups(layers, {"self": SPEC}, CPU)
    caches = {
        made.prefix: allocate_kv_cache(SPEC, 20, "NHD", CPU) for made in layers if not made.kv_sharing_target
    }
    return make_step(groups, {"self": make_common(lengths, **changes)}, caches)


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    return reference_attention(query[None], key[None], value[None], **options)[0][0].float()


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_chunk_after_chunk_is_dense_attention(causal: bool) -> None:
    attention = layer("a", causal=causal)
    groups = init_attention_groups([attention], {"self": SPEC}, CPU)
    caches = {"a": allocate_kv_cache(SPEC, 20, "HND", CPU).fill_(float("nan"))}
    query, key, value = tensors(9)
    for begin, end in ((0, 4), (4, 5), (5, 9)):
        step = make_step(groups, {"self": make_common([(end - begin, end)], causal=causal)}, caches)
        for _ in range(2):  # a chunk is written into the same slots until it is done
            found = attention(query[begin:end], key[begin:end], value[begin:end], step)
        close(found, dense(query[begin:end], key[:end], value[:end], causal=causal))


def test_an_output_of_ones_own_and_a_part_of_the_step() -> None:
    attention = layer("a")
    step = step_of(attention, lengths=[(3, 3), (2, 2)])
    query, key, value = tensors(5)
    output = torch.full((5, 4, 8), float("nan"))
    assert attention(query, key, value, step["a"], output) is output
    for first, last in ((0, 3), (3, 5)):
        close(output[first:last], dense(query[first:last], key[first:last], value[first:last]))


def test_rows_behind_the_step_are_zeros() -> None:
    """Tensors may be padded where the metadata is not; keys behind the slots are not written."""
    attention = layer("a")
    step = step_of(attention, lengths=[(3, 3)])
    query, key, value = tensors(5)
    query[3:], key[3:] = float("nan"), float("nan")
    found = attention(query, key, value, step, torch.full((5, 4, 8), float("nan")))
    close(found[:3], dense(query[:3], key[:3], value[:3]))
    assert found[3:].abs().max() == 0
    assert step["a"].kv_cache.isfinite().all()


def test_a_cache_that_is_only_read(counted: Tally) -> None:
    """Text is written once per prompt, and read by every step from then on."""
    attention = layer("a")
    groups = init_attention_groups([attention], {"self": SPEC}, CPU)
    caches, (query, key, value) = {"a": allocate_kv_cache(SPEC, 20, "NHD", CPU)}, tensors(4)
    attention(query, key, value, make_step(groups, {"self": make_common([(4, 4)])}, caches))
    reading = make_common([(2, 4)], slot_mapping=None)
    found = attention(query[:2], None, None, make_step(groups, {"self": reading}, caches))
    close(found, dense(query[:2], key, value))
    assert counted.writes == 1


def test_a_layer_that_reads_another_ones_cache(counted: Tally) -> None:
    first, second = layer("a"), layer("b", kv_sharing_target="a")
    step = step_of(first, second, lengths=[(3, 3)])
    query, key, value = tensors(3)
    assert step["b"].kv_cache is step["a"].kv_cache and step["b"].slot_mapping is None
    assert step["b"].metadata is step["a"].metadata
    close(second(query, None, None, step), torch.zeros(3, 4, 8))
    first(query, key, value, step)
    close(second(query * 2, None, None, step), dense(query * 2, key, value))
    assert counted.writes == 1
    with pytest.raises(MetadataError, match="reads the cache of 'a' and keeps nothing"):
        second(query, key, value, step)


def test_a_run_without_a_step_is_zeros() -> None:
    query, key, value = tensors(3)
    assert layer("a")(query, key, value, None).abs().max() == 0


def test_smaller_pages_for_the_kernel() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")
    with paged_backend("EIGHT", block_sizes=(8,)):
        attention = layer("a", "EIGHT", kv_cache=spec)
        groups = init_attention_groups([attention], {"self": spec}, CPU)
        cache = allocate_kv_cache(spec, 5, "NHD", CPU)
        common = {"self": make_common([(3, 20)], block_size=16)}
        query, key, value = tensors(20)
        slots = torch.arange(16, 36)
        attention.impl.update_kv_cache(key, value, cache, slots)  # type: ignore[union-attr]
        step = make_step(groups, common, {"a": split_pages(cache, 8)})
        found = attention(query[17:], key[17:], value[17:], step)
        close(found, dense(query[17:], key, value))
        with pytest.raises(
            MetadataError, match=r"\(5, 2, 16, 2, 8\), needs \[pages, 2, 8, 2, 8\].*split_pages"
        ):
            attention(query[17:], key[17:], value[17:], make_step(groups, common, {"a": cache}))


def test_gradients_are_refused() -> None:
    attention = layer("a")
    step = step_of(attention, lengths=[(3, 3)])
    query, key, value = tensors(3)
    attention(query, key, value, step)
    with pytest.raises(MetadataError, match="has no backward"):
        attention(query, key.requires_grad_(), value, step)
    with torch.no_grad():
        attention(query, key, value, step)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": noise(3, 2, 8)}, r"query has shape \(3, 2, 8\).*needs \[tokens, 4, 8\]"),
        ({"key": noise(3, 4, 8)}, r"key has shape \(3, 4, 8\)"),
        ({"value": noise(1, 3, 2, 8)}, r"value has shape \(1, 3, 2, 8\)"),
        ({"query": noise(3, 4, 8).half()}, "query is torch.float16, the layer was built for torch.float32"),
        ({"key": None}, "key and value come together"),
        ({"key": None, "value": None}, "slots for 3 tokens, and the call brings no key and value"),
        ({"key": noise(2, 2, 8), "value": noise(2, 2, 8)}, "slots for 3 tokens, and the call brings 2 keys"),
        ({"query": noise(2, 4, 8)}, "query has 2 tokens, output 2, and the step 3"),
        ({"output": torch.zeros(3, 4, 4)}, r"output has shape \(3, 4, 4\)"),
        ({"output": torch.zeros(4, 4, 8)}, "query has 3 tokens, output 4"),
    ],
)
def test_calls_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    attention = layer("a")
    step = step_of(attention, lengths=[(3, 3)])
    query, key, value = tensors(3)
    given = {"query": query, "key": key, "value": value} | change
    with pytest.raises(MetadataError, match=words):
        attention(step=step, **given)


def test_output_scales_are_the_impls_business() -> None:
    attention = layer("a")
    query, key, value = tensors(3)
    for step in (step_of(attention, lengths=[(3, 3)]), None):
        with pytest.raises(NotImplementedError, match="Impl has no quantised output"):
            attention(query, key, value, step, output_scale=torch.ones(1))


def test_what_a_layer_needs_to_be_built() -> None:
    latent = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, rope_size=2, dtype="float32")
    for needs, words in (
        ({"prefix": ""}, "needs prefix"),
        ({"kv_cache": None}, "needs kv_cache"),
        ({"kv_cache": latent}, "read by MLAAttention"),
        ({"num_kv_heads": 4}, "kv_cache keeps 2 heads"),
    ):
        with pytest.raises(ValueError, match=words):
            layer(**{"prefix": "a"} | needs)
    with pytest.raises(ValueError, match="build a PagedAttention"):
        Attention(4, 8, role="self", num_kv_heads=2, kv_cache=SPEC)


def test_the_dtype_is_that_of_the_cache_if_nobody_says_otherwise() -> None:
    half = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float16")
    assert layer("a", kv_cache=half).request.dtype == "float16"
    eighth = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="fp8_e4m3")
    with pytest.raises(ValueError, match=r"keeps fp8_e4m3.*state dtype="):
        layer("a", kv_cache=eighth)
    with (
        paged_backend("SMALL", cache_dtypes=frozenset({"fp8_e4m3"})),
        use_attention_config(None, dtype="bfloat16"),
    ):
        assert layer("a", "SMALL", kv_cache=eighth).request.dtype == "bfloat16"


def test_selection_says_why() -> None:
    with pytest.raises(
        BackendRejectedError, match="needs a paged KV cache, found support for stateless"
    ) as caught:
        layer("a", "SAGE_ATTN")
    assert caught.value.role == "self"
    with paged_backend("CAUSAL", non_causal=False):
        with pytest.raises(
            BackendRejectedError, match="needs causal attention over a paged KV cache, found causal=Fal"
        ):
            layer("a", "CAUSAL")
        assert layer("a", "CAUSAL", causal=True).selection
        falling = {"default": {"backend": "CAUSAL", "fallback": ["COUNTED"]}}
        fallen = layer("a", config=falling)
        assert fallen.selection is not None and fallen.selection.backend == "COUNTED"
        assert fallen.selection.is_fallback
    with use_attention_config(None, platform=fake_device("cpu")):
        default = PagedAttention(4, 8, role="self", num_kv_heads=2, kv_cache=SPEC, prefix="a")
    assert default.selection is not None and default.selection.source == "platform default"
    assert "TORCH_SDPA" in repr(default)


def test_the_report_tells_paged_layers_too() -> None:
    model = torch.nn.ModuleList([Attention(4, 8, role="self", config="TORCH_SDPA"), layer("a"), layer("b")])
    plain, paged = attention_report(model)
    assert plain.route == "TORCH_SDPA"
    assert (paged.role, paged.layers, paged.names) == ("self", 2, ("1", "2"))
    assert (paged.backend, paged.route, paged.source) == ("COUNTED", "COUNTED, paged", "default")
    assert "page table 'self', pages of 4 tokens" in paged.reason


def test_an_override_has_to_subclass_the_selected_impl() -> None:
    with pytest.raises(TypeError, match="must subclass the selected implementation"):
        layer("a", impl_overrides={"COUNTED": object})
    assert layer("a", impl_overrides={"ANOTHER": object}).impl is not None, (
        "of another backend: not looked at"
    )


def test_equal_blocks_compile_once() -> None:
    """Blocks get their own part of a step, in which no name tells them apart."""
    compiled = CompileCounter()  # type: ignore[no-untyped-call]
    layers = [layer(f"blocks.{n}", "TORCH_SDPA", compile=True) for n in range(3)]
    step = step_of(*layers, lengths=[(3, 6), (2, 2)])
    query, key, value = tensors(5)

    class Block(torch.nn.Module):
        def __init__(self, attention: PagedAttention) -> None:
            super().__init__()
            self.attention = attention

        def forward(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Any
        ) -> torch.Tensor:
            made: torch.Tensor = self.attention(query, key, value, call)
            return made * 2

    torch._dynamo.reset()
    for attention in layers:
        wanted = attention(query, key, value, step) * 2
        block = torch.compile(Block(attention), fullgraph=True, backend=compiled)
        with torch.no_grad():
            close(block(query, key, value, step[attention.prefix]), wanted)
    assert compiled.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
def test_a_cache_of_another_dtype(dtype: torch.dtype) -> None:
    one = layer("a", "TORCH_SDPA")
    groups = init_attention_groups([one], {"self": SPEC}, CPU)
    commons = {"self": make_common([(4, 4)])}
    with torch.no_grad():
        one(*tensors(4), make_step(groups, commons, {"a": torch.zeros(9, 2, 4, 2, 8)}))
        with pytest.raises(MetadataError, match=f"its cache holds {dtype}, and the layer keeps float32"):
            one(*tensors(4), make_step(groups, commons, {"a": torch.zeros(9, 2, 4, 2, 8, dtype=dtype)}))


def test_an_output_of_another_dtype() -> None:
    one = layer("a", "TORCH_SDPA")
    step = step_of(one, lengths=[(4, 4)])
    with pytest.raises(MetadataError, match="unsupported output dtype"):
        one(*tensors(4), step, torch.empty(4, 4, 8, dtype=torch.int32))


def test_padding_without_a_request_gives_zeros() -> None:
    one = layer("a", "TORCH_SDPA")
    step = make_common([(4, 4)], max_seq_len=8)
    none = torch.zeros(1, dtype=torch.int32)
    empty = step.replace(
        query_start_loc=none,
        query_start_loc_cpu=none,
        seq_lens=none[:0],
        seq_lens_cpu=none[:0],
        num_reqs=0,
        block_table=step.block_table[:0],
        slot_mapping=torch.full((4,), -1),
    )
    groups = init_attention_groups([one], {"self": SPEC}, CPU)
    made = make_step(groups, {"self": empty}, {"a": torch.full((9, 2, 4, 2, 8), float("nan"))})
    assert not one(*tensors(4), made).any()
