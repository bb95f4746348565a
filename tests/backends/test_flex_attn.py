"""FLEX_ATTN: maps of tiles against the rules they stand for, and what torch compiles, traced on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from omni_attn import AttentionMetadata
from omni_attn.backends import flex_kernels
from omni_attn.backends.flex_attn import FlexAttentionBackend
from omni_attn.backends.flex_plans import FlexMetadata, _document_plan
from omni_attn.backends.metadata import PackedPadding
from omni_attn.errors import BackendImportError
from omni_attn.ops.masks import document_mask
from omni_attn.ops.reference import reference_attention
from omni_attn.products import build_product
from omni_attn.testing import fake_kernels, fake_package

LENGTHS = (300, 260)
POSITIONS = [
    (False, None),
    (True, None),
    (False, (40, 130)),
    (True, (150, 0)),
    (False, (-1, 7)),
    (False, (7, -1)),
]


def tensors(queries: int, keys: int, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, n, h, 16) for n, h in ((queries, 4), (keys, 2), (keys, 2))]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def built(
    lengths: tuple[int, int], record: AttentionMetadata | None = None, **needs: Any
) -> tuple[Any, FlexMetadata]:
    """An impl, and what its builder makes of a record."""
    geometry: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "softmax_scale": 0.25,
        **needs,
    }
    builder = FlexAttentionBackend.get_builder_cls()(**geometry)
    product = build_product(builder, record or AttentionMetadata(), lengths)
    assert isinstance(product, FlexMetadata)
    return FlexAttentionBackend.get_impl_cls()(**geometry), product


def random_masks(lengths: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Masks with whole tiles off, whole tiles on, and a row without any key."""
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(2, 4, *lengths, generator=generator) > 0.5
    keep[:, :, :128, 128:] = False
    keep[:, :, 128:, :128] = True
    keep[0, 1, 140] = False
    padding = torch.rand(2, lengths[1], generator=generator) > 0.5
    padding[0, 100:], padding[1, :128] = False, True
    bias = torch.randn(1, 4, *lengths, generator=generator).masked_fill(~keep[:1], float("-inf"))
    return {
        "padding": padding,
        "bool": keep,
        "bool of all heads": keep[:, :1].contiguous(),
        "bool of all items": keep[:1],
        "float": bias,
        "float per key": torch.randn(2, lengths[1], generator=generator),
        "float16": bias.half(),
        "float64": bias.double(),
    }


MASKS = random_masks(LENGTHS)


# --- tiles: the stand-in counts what the map of tiles says, so a wrong map is a wrong number


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
@pytest.mark.parametrize("kind", [None, *MASKS])
def test_masks_of_several_tiles(kind: str | None, positions: tuple[bool, Any]) -> None:
    causal, window = positions
    query, key, value = tensors(*LENGTHS)
    mask = None if kind is None else MASKS[kind]
    record = AttentionMetadata(attn_mask=mask)
    with fake_kernels("FLEX_ATTN"):
        impl, product = built(LENGTHS, record, causal=causal, window=window)
        output, lse = impl.forward_with_lse(query, key, value, product)
        assert torch.equal(impl.forward(query, key, value, product), output)
    if mask is not None and mask.dim() == 2 and mask.dtype != torch.bool:
        mask = mask[:, None, None]
    expected, expected_lse = reference_attention(
        query, key, value, attn_mask=mask, causal=causal, window=window
    )
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
@pytest.mark.parametrize("on_device", [True, False])
def test_packed_sequences_of_several_tiles(on_device: bool, positions: tuple[bool, Any]) -> None:
    causal, window = positions
    query, key, value = tensors(600, 520, batch=1)
    cu_q, cu_k = (0, 128, 130, 130, 400, 560), (0, 5, 133, 300, 300, 500)
    for poisoned, end in ((query, 560), (key, 500), (value, 500)):
        poisoned[:, end:] = float("nan")
    stated: Any = [torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k)] if on_device else (cu_q, cu_k)
    record = AttentionMetadata(cu_seqlens_q=stated[0], cu_seqlens_k=stated[1])
    with fake_kernels("FLEX_ATTN") as log:
        impl, product = built((600, 520), record, causal=causal, window=window)
        output = impl.forward(query, key, value, product)
        assert len(log) == 1, "one kernel for all sequences"
    boundaries = [torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k)]
    mask = document_mask(*boundaries, (600, 520), causal=causal, window=window)[None, None]
    clean = [x.nan_to_num(0.0) for x in (query, key, value)]
    torch.testing.assert_close(
        output.double(), reference_attention(*clean, attn_mask=mask)[0], atol=1e-5, rtol=0
    )


def tiles_of(product: FlexMetadata) -> tuple[int, int]:
    """Numbers of partial and of full tiles of an item and head."""
    block_mask = product.plan_on(torch.device("cpu")).block_mask
    assert block_mask is not None and block_mask.full_kv_num_blocks is not None
    return int(block_mask.kv_num_blocks[0, 0].sum()), int(block_mask.full_kv_num_blocks[0, 0].sum())


def test_tiles_that_hide_everything_are_skipped_and_full_ones_are_not_judged() -> None:
    with fake_kernels("FLEX_ATTN"):
        assert tiles_of(built((1024, 1024), causal=True)[1]) == (8, 28)
        # Left edge, inside and right edge of the window, less what lies outside of the sequence.
        assert tiles_of(built((1024, 1024), window=(256, 256))[1]) == (2 * 6, 8 + 2 * 7)
        documents = AttentionMetadata(cu_seqlens_q=torch.tensor([0, 256, 1024], dtype=torch.int32))
        assert tiles_of(built((1024, 1024), documents)[1]) == (0, 2**2 + 6**2)
        padded = torch.ones(1, 1024, dtype=torch.bool)
        padded[:, 600:] = False
        record = AttentionMetadata(attn_mask=padded)
        assert tiles_of(built((256, 1024), record)[1]) == (2, 2 * 4)
        added = AttentionMetadata(attn_mask=torch.randn(1, 1, 200, 300))
        assert tiles_of(built((200, 300), added)[1]) == (0, 2 * 3)


def test_what_only_the_host_knows_is_planned_once() -> None:
    query, key, value = tensors(200, 200)
    with fake_kernels("FLEX_ATTN"):
        impl, product = built((200, 200), causal=True)
        assert not product.plans
        impl.forward(query, key, value, product)
        plan = product.plans[query.device]
        impl.forward(query, key, value, product)
    assert product.plan is None and product.plans == {query.device: plan}


def test_a_plan_belongs_to_one_device() -> None:
    with fake_kernels("FLEX_ATTN"):
        _, product = built((200, 200), causal=True)
        devices = torch.device("cpu"), torch.device("meta")
        masks = [product.plan_on(device).block_mask for device in devices]
    assert [mask.kv_indices.device for mask in masks] == list(devices)


def test_one_sequence_with_padding_is_a_slice() -> None:
    query, key, value = tensors(200, 300, batch=1)
    record = AttentionMetadata(packed_padding=PackedPadding(150, 260))
    key[:, 260:] = value[:, 260:] = float("nan")
    with fake_kernels("FLEX_ATTN"):
        impl, product = built((200, 300), record, causal=True)
        output, lse = impl.forward_with_lse(query, key, value, product)
    expected, expected_lse = reference_attention(query[:, :150], key[:, :260], value[:, :260], causal=True)
    torch.testing.assert_close(output[:, :150].double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse[..., :150].double(), expected_lse, atol=1e-5, rtol=0)
    assert not output[:, 150:].any() and bool((lse[..., 150:] == float("-inf")).all())


# --- torch's own flex_attention, traced: what is compiled again, and what is not


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Compiled as on a GPU, but run as plain torch code; counts the frames."""
    torch.compiler.reset()
    flex_kernels._compiled.cache_clear()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(flex_kernels.torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(flex_kernels, "require_triton", lambda: None)
    with torch.no_grad():
        yield counter
    torch.compiler.reset()
    flex_kernels._compiled.cache_clear()


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_other_values_of_a_mask_are_no_other_compilation(
    frames: CompileCounterWithBackend, kind: str, causal: bool
) -> None:
    query, key, value = tensors(*LENGTHS)
    for mask in (MASKS[kind], MASKS[kind].flip(-1)):
        impl, product = built(LENGTHS, AttentionMetadata(attn_mask=mask), causal=causal)
        output = impl.forward(query, key, value, product)
        shown = mask[:, None, None] if mask.dim() == 2 and mask.dtype != torch.bool else mask
        expected = reference_attention(query, key, value, attn_mask=shown, causal=causal)[0]
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
        assert output.is_contiguous()
    assert frames.frame_count == 1


def test_more_shapes_than_a_function_may_be_recompiled_for(frames: CompileCounterWithBackend) -> None:
    """None of them runs uncompiled, and none is refused."""
    lengths = range(20, 25)
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in [*lengths, *lengths]:
            query, key, value = tensors(length, length)
            impl, product = built((length, length))
            output = impl.forward(query, key, value, product)
            torch.testing.assert_close(
                output.double(), reference_attention(query, key, value)[0], atol=1e-5, rtol=0
            )
    assert frames.frame_count == len(lengths)


def test_layers_of_one_kind_share_a_compilation(frames: CompileCounterWithBackend) -> None:
    query, key, value = tensors(*LENGTHS)
    for _ in range(3):
        impl, product = built(LENGTHS, window=(30, 30))
        impl.forward(query, key, value, product)
    impl.forward_with_lse(query, key, value, product)
    assert frames.frame_count == 2


def test_lse_of_the_traced_kernel(frames: CompileCounterWithBackend) -> None:
    query, key, value = tensors(*LENGTHS)
    for kind in ("bool", "float"):
        impl, product = built(LENGTHS, AttentionMetadata(attn_mask=MASKS[kind]))
        output, lse = impl.forward_with_lse(query, key, value, product)
        expected, expected_lse = reference_attention(query, key, value, attn_mask=MASKS[kind])
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=0)
        assert bool((expected_lse == float("-inf")).any())


RECORDS: dict[str, Callable[[int], AttentionMetadata]] = {
    "none": lambda seed: AttentionMetadata(),
    "padding": lambda seed: AttentionMetadata(attn_mask=MASKS["padding"].roll(seed, -1)),
    "float": lambda seed: AttentionMetadata(attn_mask=MASKS["float"].roll(seed, -1)),
    "host boundaries": lambda seed: AttentionMetadata(cu_seqlens_q=(0, 90, 250), cu_seqlens_k=(0, 130, 250)),
    "packed padding": lambda seed: AttentionMetadata(packed_padding=PackedPadding(200, 210)),
}


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("causal", [False, True])
def test_inside_compiled_code_it_is_part_of_the_graph(kind: str, causal: bool) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    query, key, value = tensors(*LENGTHS, batch=1 if kind in ("host boundaries", "packed padding") else 2)
    with fake_kernels("FLEX_ATTN"), torch.no_grad():
        impl, _ = built(LENGTHS, causal=causal)
        compiled = torch.compile(impl.forward, fullgraph=True, backend=counter)
        for seed in (0, 1, 2):
            _, product = built(LENGTHS, RECORDS[kind](seed), causal=causal)
            output = compiled(query, key, value, product)
            torch.testing.assert_close(output, impl.forward(query, key, value, product), atol=1e-5, rtol=0)
            assert output.is_contiguous()
    assert counter.frame_count == 1
    torch.compiler.reset()


def test_other_boundaries_on_the_device_are_no_other_compilation(frames: CompileCounterWithBackend) -> None:
    """Plans as the builder makes them of device tensors, which a CPU has none of: it reads its own at once."""
    query, key, value = tensors(*LENGTHS, batch=1)
    inner = CompileCounterWithBackend("aot_eager")
    impl, _ = built(LENGTHS, causal=True)
    compiled = torch.compile(impl.forward, fullgraph=True, backend=inner)
    for cu_q, cu_k in (((0, 90, 250), (0, 130, 250)), ((0, 10, 300), (0, 0, 260))):
        boundaries = [torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k)]
        mask = document_mask(*boundaries, LENGTHS, causal=True)[None, None]
        expected = reference_attention(query, key, value, attn_mask=mask)[0]
        product = FlexMetadata(_document_plan(*boundaries, LENGTHS, causal=True, window=None))
        for call in (impl.forward, compiled):
            torch.testing.assert_close(call(query, key, value, product).double(), expected, atol=1e-5, rtol=0)
    assert (frames.frame_count, inner.frame_count) == (1, 1)


# --- Triton, which torch compiles it to


@pytest.mark.parametrize(
    ("fault", "quoted"),
    [
        ({"raises": ModuleNotFoundError("No module named 'triton'", name="triton")}, "not installed"),
        ({"raises": ImportError("libtriton.so: undefined symbol: x")}, "broken: ImportError: libtriton.so"),
        ({"jit": None}, "has no jit"),
    ],
)
def test_triton_is_asked_for_when_a_layer_is_built(fault: dict[str, Any], quoted: str) -> None:
    with fake_package("triton", **fault), pytest.raises(BackendImportError) as caught:
        built((4, 4))
    assert (
        "FLEX_ATTN" in str(caught.value)
        and quoted in str(caught.value)
        and "pip install" in str(caught.value)
    )
