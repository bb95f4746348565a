"""FLASH_ATTN and FLASHINFER_ATTN over pages: what is told, what is planned when, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from omni_attn.backends import flash_paged_kernels
from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.flash_attn import FlashAttentionBackend
from omni_attn.backends.flashinfer_attn import FlashInferBackend
from omni_attn.config import AttentionSpec
from omni_attn.errors import BackendImportError, MetadataError
from omni_attn.facts import AttentionRequest, FullAttentionSpec
from omni_attn.kv_cache import BatchDescriptor, select_common_block_size
from omni_attn.testing import fake_device, fake_kernels, fake_package
from omni_attn.testing.paged_conformance import PagedHarness
from tests.kv_cache.paged_model import CHUNK, PAGE, PAGES_OF_A_STREAM, World

PEERS = [("FLASH_ATTN", "fa3"), ("FLASH_ATTN", "fa4"), ("FLASHINFER_ATTN", "fa3"), ("FLASHINFER_ATTN", "fa2")]
PACKAGES = {"tokenspeed-fa3": "3.0.0", "flash-attn-4": "4.0.0b36", "flashinfer-python": "0.6.18"}
BACKENDS: dict[str, type[AttentionBackend]] = {
    "FLASH_ATTN": FlashAttentionBackend,
    "FLASHINFER_ATTN": FlashInferBackend,
}
MOST = PAGE * PAGES_OF_A_STREAM
every_peer = pytest.mark.parametrize(("name", "variant"), PEERS)


def harness(name: str, variant: str) -> PagedHarness:
    made = PagedHarness()
    made.get_backend, made.variant, made.head_size = (lambda: BACKENDS[name]), variant, 64
    return made


def world(name: str, variant: str) -> World:
    platform = fake_device("sm_90", packages=PACKAGES)
    config = {"default": {"backend": name, "variant": variant}}
    return World.make(config, platform, dtype=torch.float16, head_size=64)


# -- in a model


@every_peer
def test_replays_follow_pages_and_lengths(name: str, variant: str) -> None:
    """Uniform chunks padded to a larger graph, mixed batches, and one token of each request."""
    graphs: list[tuple[BatchDescriptor, bool]] = [
        (BatchDescriptor(num_tokens=4 * CHUNK, num_reqs=4, query_len=CHUNK, max_seq_len=MOST), False),
        (BatchDescriptor(num_tokens=3, num_reqs=3, query_len=1, max_seq_len=MOST), True),
        (BatchDescriptor(num_tokens=40, num_reqs=4, max_seq_len=MOST), True),
    ]
    steps = {
        False: [{"a": CHUNK}, {"a": CHUNK, "b": CHUNK}, {"c": CHUNK, "a": CHUNK, "b": CHUNK}],
        True: [{"a": 1}, {"a": 1, "b": 1}, {"c": 9, "b": 1}, {"c": 1, "a": 1, "b": 1}, {"b": 16, "a": 3}],
    }
    with fake_kernels(name, variant):
        for causal in (False, True):
            made = world(name, variant)
            runner = made.runner()
            sizes = [size for size, only_causal in graphs if only_causal == causal]
            made.open({"warm": 1 if causal else CHUNK})
            tokens = 1 if causal else CHUNK
            runner.capture(sizes, made.tensors(tokens, 0), {"self": made.common(["warm"], causal=causal)})
            made.table.remove("warm")
            for seed, lengths in enumerate(steps[causal]):
                twin = made.twin
                for one in (made, twin):
                    one.open(lengths)
                inputs = made.tensors(sum(lengths.values()), seed)
                ran = runner(inputs, {"self": made.common(list(lengths), causal=causal)})
                wanted = twin.eager(inputs, twin.common(list(lengths), causal=causal))
                torch.testing.assert_close(ran, wanted)
                for one in (made, twin):
                    one.commit(list(lengths))
            assert runner.replays == len(steps[causal]) and not runner.eager


@every_peer
def test_layers_of_a_group_share_one_plan_and_one_call_each(name: str, variant: str) -> None:
    with fake_kernels(name, variant) as log:
        made = world(name, variant)
        made.open({"a": CHUNK, "b": 3})
        common = made.common(["a", "b"])
        for seed in range(3):
            made.eager(made.tensors(CHUNK + 3, seed), common)
        layers = len(made.model.attention)
        assert len(log) == 3 * layers
        assert len(log.plans) == (1 if name == "FLASHINFER_ATTN" else 0)


def test_pages_of_a_whole_frame_are_handed_over_in_parts() -> None:
    sizes = {"FLASH_ATTN (fa3)": FlashAttentionBackend.get_supported_kernel_block_sizes("fa3")}
    for size, parts in ((1560, 60), (4680, 60), (128, 32), (64, 32), (63, 63), (8, 8), (67, 1)):
        assert select_common_block_size(size, sizes) == parts
    sizes["FLASHINFER_ATTN (fa2)"] = FlashInferBackend.get_supported_kernel_block_sizes("fa2")
    assert select_common_block_size(1560, sizes) == 60


# -- FLASH_ATTN


def test_the_table_is_no_wider_than_the_longest_request() -> None:
    """Its width is how far a kernel thinks keys may go, and how it splits them."""
    with fake_kernels("FLASH_ATTN", "fa3"):
        tested = harness("FLASH_ATTN", "fa3")
        scene = tested.scene(((3, 20), (2, 40)), spare_columns=7)
        _, builder, _ = tested.ready(scene)
        metadata = builder.build(scene.common)
        assert metadata.block_table.shape == (2, 5) != scene.common.block_table.shape
        assert metadata.block_table.data_ptr() == scene.common.block_table.data_ptr()
        other = builder.update_block_table(metadata, scene.common.block_table.clone(), None)
        assert other.block_table.shape == (2, 5) and other.slot_mapping is None


_SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, Tensor? page_table=None, float? softmax_scale=None, bool is_causal=False, "
    "int window_size_left=-1, int window_size_right=-1, int num_splits=0) -> ()"
)


@pytest.fixture
def operator() -> Iterator[Any]:
    """An operator with the arguments of FlashAttention 3's own, on the CPU."""
    calls: list[dict[str, Any]] = []

    def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *rest: Any) -> None:
        calls.append({"q": q, "k": k, "v": v, "rest": rest})
        assert out.stride(-1) == 1, "Output tensor must have contiguous last dimension"
        out.fill_(7.0)

    library = torch.library.Library("omni_attn_test_fa3", "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("fwd", fwd, "CPU")
    yield torch.ops.omni_attn_test_fa3, calls
    library._destroy()


def test_version_3_writes_into_the_output_where_its_operator_can(operator: Any) -> None:
    operators, calls = operator
    with (
        fake_kernels("FLASH_ATTN", "fa3") as log,
        fake_package(
            "flash_attn_interface", flash_attn_with_kvcache=lambda **_: None, flash_attn_3_gpu=operators
        ),
    ):
        tested = harness("FLASH_ATTN", "fa3")
        scene = tested.scene(causal=True)
        output = tested.attend(scene, tested.ready(scene, window=(5, 0), softmax_scale=0.3))
        by_channel = torch.empty_like(scene.query.mT.contiguous()).mT
        impl, builder, cache = tested.ready(scene)
        impl.forward(scene.query, None, None, cache, builder.build(scene.common), by_channel)
    assert bool((output == 7.0).all()) and not log.calls and len(calls) == 2
    assert bool((by_channel == 7.0).all())
    starts, lens, longest, table, scale, causal, *window = calls[0]["rest"][:8]
    common = scene.common
    assert (
        starts is not None
        and torch.equal(starts, common.query_start_loc)
        and torch.equal(lens, common.seq_lens)
    )
    assert (longest, scale, causal, window) == (9, 0.3, True, [5, 0]) and table.shape[0] == common.num_reqs


def test_an_operator_with_other_arguments_is_left_alone() -> None:
    library = torch.library.Library("omni_attn_test_old", "FRAGMENT")
    library.define("fwd(Tensor q, Tensor k, Tensor v) -> ()")
    with fake_package("flash_attn_interface", flash_attn_3_gpu=torch.ops.omni_attn_test_old):
        assert flash_paged_kernels._operator("flash_attn_interface") is None
    with fake_package("flash_attn_interface"):
        assert flash_paged_kernels._operator("flash_attn_interface") is None
    library._destroy()


@every_peer
def test_a_compiled_call_is_one_operator(name: str, variant: str) -> None:
    with fake_kernels(name, variant):
        tested = harness(name, variant)
        scene = tested.scene(causal=True)
        impl, builder, cache = tested.ready(scene)
        metadata = builder.build(scene.common)
        compiled = torch.compile(impl.forward, backend="aot_eager", fullgraph=True)
        output = torch.zeros_like(scene.query)
        compiled(scene.query, None, None, cache, metadata, output)
        tested.close(output, scene.expected(causal=True))


def test_a_build_without_pages_is_refused_and_not_imported() -> None:
    """fa3-fwd's wheel has no paged kernel, and says so."""
    request = _request()
    device = fake_device("sm_90", packages={"fa3-fwd": "0.0.3"})
    reasons = FlashAttentionBackend.validate_configuration(request, device, None)
    assert any(
        "needs a paged KV cache, found fa3-fwd 0.0.3 built with FLASHATTENTION_DISABLE_PAGEDKV" in r
        for r in reasons
    )
    device = fake_device("sm_90", packages={"fa3-fwd": "0.0.3", "tokenspeed-fa3": "3.0.0"})
    assert not FlashAttentionBackend.validate_configuration(request, device, None)
    tested = harness("FLASH_ATTN", "fa3")
    with (
        fake_package("fa3_fwd_interface", flash_attn_with_kvcache=lambda **_: None),
        pytest.raises(BackendImportError, match="flash_attn_interface is not installed"),
    ):
        tested.ready(tested.scene())


def test_an_early_build_is_named() -> None:
    tested = harness("FLASH_ATTN", "fa4")
    with (
        fake_package("flash_attn.cute", flash_attn_varlen_func=lambda q, k, v, cu_seqlens_q: None),
        pytest.raises(BackendImportError, match=r"FLASH_ATTN \(fa4\): .* takes no .*page_table"),
    ):
        tested.ready(tested.scene())


# -- FLASHINFER_ATTN


def test_a_plan_lives_as_long_as_what_it_was_made_for() -> None:
    """A step that somebody still holds is not planned over; a wrapper that nobody needs is planned anew."""
    with fake_kernels("FLASHINFER_ATTN", "fa2"):
        tested = harness("FLASHINFER_ATTN", "fa2")
        first, second = tested.scene(), tested.scene(((3, 40), (5, 9)), page_seed=4)
        prepared = _, builder, _ = tested.ready(first)
        held, other = builder.build(first.common), builder.build(second.common)
        assert held.plan is not other.plan
        tested.close(tested.attend(first, prepared, held), first.expected(causal=False))
        kept = id(other.plan)
        del other
        gc.collect()
        assert id(builder.build(first.common).plan) == kept


@pytest.mark.parametrize(
    ("lengths", "wrapper"), [(((1, 20), (1, 7)), "Decode"), (((1, 20), (2, 7)), "Prefill")]
)
def test_one_token_of_each_request_is_decoded(lengths: Any, wrapper: str) -> None:
    with fake_kernels("FLASHINFER_ATTN", "fa2") as log:
        tested = harness("FLASHINFER_ATTN", "fa2")
        tested.check(tested.scene(lengths))
    assert log.calls == log.plans == [f"Batch{wrapper}WithPagedKVCacheWrapper"]


@pytest.mark.parametrize("variant", ["fa3", "fa2"])
def test_flashinfer_refuses_what_it_cannot_plan(variant: str) -> None:
    with fake_kernels("FLASHINFER_ATTN", variant):
        tested = harness("FLASHINFER_ATTN", variant)
        scene = tested.scene()
        _, builder, _ = tested.ready(scene)
        with pytest.raises(MetadataError, match="state seq_lens_cpu, exactly"):
            builder.build(replace(scene.common, seq_lens_cpu=None))
        with pytest.raises(MetadataError, match="says 900 keys, which is 113 pages of 8 tokens"):
            builder.build(replace(scene.common, seq_lens_cpu=scene.common.seq_lens_cpu.clamp(min=900)))
        _, builder, _ = tested.ready(scene, window=(3, 2))
        with pytest.raises(MetadataError, match=r"window=\(3, 2\)"):
            builder.build(scene.common)


def test_a_launch_that_a_graph_cannot_follow_raises() -> None:
    with fake_kernels("FLASHINFER_ATTN", "fa2"):
        tested = harness("FLASHINFER_ATTN", "fa2")
        scene = tested.scene(((4, 20), (4, 9)))
        _, builder, _ = tested.ready(scene)
        plan = builder.build_for_cudagraph_capture(scene.common).plan
        assert builder.build_for_cudagraph_capture(scene.common).plan is plan
        plan._wrapper._plan_info = [0]
        plan._wrapper.plan = lambda **_: setattr(plan._wrapper, "_plan_info", [1])
        with pytest.raises(RuntimeError, match=r"cudagraph_mode NONE"):
            builder.build_for_cudagraph_capture(scene.common)


def test_a_quant_block_is_refused_over_pages() -> None:
    device = fake_device("sm_90", packages=PACKAGES)
    spec = AttentionSpec(backend="FLASHINFER_ATTN", quant={"dtype_vo": "fp8_e4m3"})
    request = _request()
    reasons = FlashInferBackend.validate_configuration(request, device, spec)
    assert reasons == [
        "needs no quant block over a paged KV cache, found one: its kernels read the cache as it is"
    ]
    assert not FlashInferBackend.validate_configuration(
        request, device, AttentionSpec(backend="FLASHINFER_ATTN")
    )


# -- both


@every_peer
def test_causality_by_request_is_refused(name: str, variant: str) -> None:
    with fake_kernels(name, variant):
        tested = harness(name, variant)
        scene = tested.scene()
        _, builder, _ = tested.ready(scene)
        mixed = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
        with pytest.raises(MetadataError, match=rf"{name} \({variant}\) cannot take causal and non-causal"):
            builder.build(replace(scene.common, causal=mixed))


@every_peer
def test_an_output_may_be_a_part_of_a_larger_one(name: str, variant: str) -> None:
    with fake_kernels(name, variant):
        tested = harness(name, variant)
        scene = tested.scene()
        impl, builder, cache = tested.ready(scene)
        whole = torch.zeros(scene.query.shape[0], 2, *scene.query.shape[1:])
        output = whole[:, 0]
        assert impl.forward(scene.query, None, None, cache, builder.build(scene.common), output) is output
        tested.close(output, scene.expected(causal=False))
        assert not whole[:, 1].any()


def _request() -> AttentionRequest:
    cache = FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=128, dtype="bfloat16")
    return AttentionRequest(
        role="self", num_heads=4, num_kv_heads=2, head_size=128, dtype="bfloat16", kv_cache=cache
    )
