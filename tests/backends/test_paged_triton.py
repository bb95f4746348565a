"""TRITON_ATTN's kernels under the conformance class: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.triton_attn import TritonAttentionBackend
from omni_attn.facts.kv_cache import KV_LAYOUTS, FullAttentionSpec
from omni_attn.kv_cache.build import make_step
from omni_attn.kv_cache.groups import init_attention_groups
from omni_attn.ops.paged import write
from omni_attn.ops.paged.operators import attend_pages
from omni_attn.ops.paged.plan import Plan, Tile
from omni_attn.ops.paged.write import write_in_torch
from omni_attn.paged_layer import PagedAttention
from omni_attn.selector import use_attention_config
from omni_attn.testing import PagedBackendConformance, fake_device
from omni_attn.testing.paged_conformance import written_and_attended
from omni_attn.testing.paged_harness import PagedHarness
from omni_attn.testing.paged_scene import make_scene
from tests.ops.triton_here import DEVICE as PLACE
from tests.ops.triton_here import HERE, INTERPRETED, in_another_process, interpret, needs_triton

DEVICE = PLACE.type


@in_another_process
def test_in_the_interpreter() -> None:
    interpret(__file__)


@pytest.mark.skipif(HERE, reason="the interpreter compiles nothing, and a GPU runs the case below")
@pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton, which has no package for this platform"
)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
def test_splits_of_one_row_compile() -> None:
    """An argument of 1 is a constant for the compiler, which is no tensor: one token of one head."""
    compiler, targets = import_module("triton.compiler"), import_module("triton.backends.compiler")
    kernel = import_module("omni_attn.ops.paged.triton_attend").merge_splits_kernel
    constants = {"rows": 1, "heads": 1, "D": 8, "BLOCK_D": 16, "ROWS": 8}
    kinds = {"part_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*fp16"}
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names
    }
    source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert compiler.compile(source, target=targets.GPUTarget("cuda", 90, 32)).asm["ptx"]


def everywhere(_: torch.Tensor) -> bool:
    """For a compiler, which traces no mock."""
    return True


@contextmanager
def written_by_triton() -> Iterator[None]:
    """The write kernel runs wherever tensors are; elsewhere the definition in torch would take its place.

    But for fp8 in the interpreter, which loses the carry of a rounding.
    """
    kernels = import_module("omni_attn.ops.paged.triton_write")

    def found(_: torch.Tensor, kv_cache: torch.Tensor) -> object:
        return None if INTERPRETED and kv_cache.dtype == write.FP8 else kernels

    with (
        mock.patch.object(write, "write_kernels", found),
        mock.patch.object(write, "may_have_kernels", everywhere),
    ):
        yield


class OnTriton(PagedHarness):
    device = DEVICE
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    heads = 4 if DEVICE == "cuda" else 2
    kv_heads = 2 if DEVICE == "cuda" else 1

    def get_backend(self) -> type[AttentionBackend]:
        return TritonAttentionBackend


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
class TestTritonAttention(OnTriton, PagedBackendConformance):
    """The kernels that read; in the interpreter, caches are written in torch."""

    block_sizes = (8, 24, 64)

    def test_steps_of_other_lengths_compile_nothing_anew(self) -> None:
        """Lengths, tables, slots and plans of a second step make them dynamic; a decode is another regime."""
        compiled = CompileCounterWithBackend("aot_eager")
        torch.compiler.reset()
        step = torch.compile(written_and_attended, fullgraph=True, backend=compiled)
        counts = []
        impl = None
        for lengths in (((5, 9), (3, 30)), ((9, 14), (4, 44), (2, 2)), ((40, 90),) * 2, ((2, 3),) * 5):
            scene = self.scene(lengths, causal=True)
            own, builder, cache = self.ready(scene)
            impl = impl or own
            output, metadata = torch.empty_like(scene.query), builder.build(scene.common)
            tensors = (scene.query, scene.key, scene.value, cache, scene.slot_mapping)
            with torch.no_grad():
                step(impl, *tensors, metadata, output)
            self.close(output, scene.expected(causal=True))
            counts.append(compiled.frame_count)
        assert counts == [1, 2, 2, 2]

    def test_equal_layers_compile_once(self) -> None:
        """Blocks that get their own part of a step; their caches may have scales of their own."""
        scene = self.scene(dtype="fp8_e4m3", causal=True)
        config: Any = {"default": {"backend": "TRITON_ATTN", "variant": self.variant}}
        machine = None if DEVICE == "cuda" else fake_device("sm_90", packages={"triton": "3.6.0"})
        with use_attention_config(config, platform=machine):
            layers = [
                PagedAttention(
                    self.heads,
                    self.head_size,
                    role="self",
                    num_kv_heads=self.heads,
                    kv_cache=scene.spec,
                    prefix=f"blocks.{index}",
                    dtype=self.dtype,
                    causal=True,
                    compile=True,
                )
                for index in range(4)
            ]
        groups = init_attention_groups(layers, {"self": scene.spec}, scene.query.device)
        caches = {layer.prefix: scene.empty_cache() for layer in layers}
        compiled = CompileCounterWithBackend("aot_eager")
        torch.compiler.reset()
        for scales in ((1.0,) * 4, (0.5, 0.75, 1.25, 1.5)):
            for layer, scale in zip(layers, scales, strict=True):
                assert layer.impl is not None
                layer.impl.key_scale = scale
                cache = caches[layer.prefix]
                layer.impl.update_kv_cache(*scene.history, cache, scene.history_slots)
            step = make_step(groups, {"self": scene.common}, caches)
            for layer in layers:
                run = torch.compile(layer, fullgraph=True, backend=compiled)
                tensors = (scene.query, scene.key, scene.value)
                with torch.no_grad():
                    output = run(*tensors, step[layer.prefix])
                    self.close(output, layer(*tensors, step[layer.prefix]).double())
            assert compiled.frame_count == (1 if scales[-1] == 1.0 else 2)

    def test_the_operators_are_sound(self) -> None:
        """Schemas say what is written, and fakes what comes back."""
        scene = self.scene(causal=torch.tensor([0, 1, 1, 0], dtype=torch.int32, device=self.device))
        impl, builder, cache = self.ready(scene)
        metadata = builder.build(scene.common)
        tables = (metadata.query_start_loc, metadata.seq_lens, metadata.block_table, metadata.causal)
        numbers = (False, metadata.max_query_len, metadata.max_seq_len, -1, -1, impl.softmax_scale, None)
        output = torch.zeros_like(scene.query)
        given = (scene.query, cache, output, *tables, *numbers, False, self.variant == "invariant")
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(attend_pages, given, test_utils=checks)
        written = (scene.key, scene.value, cache, scene.slot_mapping, None)
        torch.library.opcheck(write._write_opaquely, written, test_utils=checks)


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
class TestTritonInvariant(OnTriton):
    """The same kernels, cut in one way; a GPU runs all tests with them."""

    variant = "invariant"
    block_sizes = (8, 64)

    test_paged_equals_dense = PagedBackendConformance.test_paged_equals_dense
    test_one_query_each = PagedBackendConformance.test_one_query_each
    test_the_operators_are_sound = TestTritonAttention.test_the_operators_are_sound
    test_batch_invariance = PagedBackendConformance.test_batch_invariance
    test_a_chunk_over_a_long_history = PagedBackendConformance.test_a_chunk_over_a_long_history


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
class TestTritonWrites(OnTriton):
    """The kernel that writes, in tests of what is written."""

    test_the_operators_are_sound = TestTritonAttention.test_the_operators_are_sound
    test_layouts = PagedBackendConformance.test_layouts
    test_cache_of_fewer_bits = PagedBackendConformance.test_cache_of_fewer_bits
    test_all_padding = PagedBackendConformance.test_all_padding
    test_slots_that_are_not_written = PagedBackendConformance.test_slots_that_are_not_written
    test_slots_are_written_over = PagedBackendConformance.test_slots_are_written_over
    test_strided_inputs = PagedBackendConformance.test_strided_inputs_are_read_and_left_alone
    test_tables_with_gaps = PagedBackendConformance.test_tables_with_gaps

    def kernels(self) -> AbstractContextManager[Any]:
        return written_by_triton()


@needs_triton
def test_heads_that_lie_far_apart_are_written() -> None:
    """Keys of a tensor with heads first: the third head lies more than 2**31 numbers behind the first."""
    far = 2**30 + 16
    wide = torch.empty(2 * far + 32, dtype=torch.float16, device=DEVICE)
    key = wide.as_strided((2, 3, 16), (16, far, 1))
    key.copy_(torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)))
    cache = torch.zeros(3, 2, 4, 3, 16, dtype=torch.float16, device=DEVICE)
    slots = torch.tensor([5, 9], device=DEVICE)
    import_module("omni_attn.ops.paged.triton_write").write_pages(key, key, cache, slots)
    assert torch.equal(cache.transpose(1, 2).flatten(0, 1)[slots], torch.stack((key, key), dim=1))


@needs_triton
def test_a_request_longer_than_its_bound_stays_in_its_row() -> None:
    """The plan was made for 16 tokens, and a length on the device says 40: nothing behind the row is touched."""
    gather = import_module("omni_attn.ops.paged.triton_gather")
    cache = torch.randn(12, 2, 8, 1, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    table = torch.arange(1, 11, dtype=torch.int32, device=DEVICE).view(2, 5)
    lengths = torch.tensor([40, 9], dtype=torch.int32, device=DEVICE)
    pages, rows, lens = gather.gather_requests(cache, table, lengths, 16)
    assert rows.tolist() == [[0], [1]] and lens.tolist() == [16, 9]
    for request, pair in enumerate(((1, 2), (6, 7))):
        wanted = torch.cat([cache[page] for page in pair], dim=1)[:, : lens[request]]
        assert torch.equal(pages[request, :, : lens[request]], wanted)


@needs_triton
def test_of_two_bounds_on_the_host_the_plan_keeps_the_larger() -> None:
    harness = TestTritonAttention()
    scene = harness.scene(((2, 40), (1, 9)))
    _, builder, _ = harness.ready(scene)
    common = scene.common.replace(max_seq_len=8, seq_lens_cpu=torch.tensor([40, 9], dtype=torch.int32))
    assert builder.build(common).max_seq_len == 40
    assert builder.build_for_cudagraph_capture(common).max_seq_len == 8, "one number for all replays"


# --- what a plan may choose, at sizes that force each of it

TILES = (Tile(16, 16, 4, 1), Tile(32, 16, 4, 2))
BATCHES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=3)
WINDOWS = st.one_of(st.none(), st.tuples(st.integers(-1, 20), st.integers(-1, 20)))


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=10 if INTERPRETED else 100, deadline=None, derandomize=True)
@given(
    batch=BATCHES,
    block_size=st.sampled_from((1, 3, 8, 32)),
    ratio=st.sampled_from((1, 3, 4)),
    causal=st.sampled_from(("no", "yes", "by request")),
    window=WINDOWS,
    tile=st.sampled_from(TILES),
    splits=st.integers(1, 4),
    layout=st.sampled_from(KV_LAYOUTS),
    cache_dtype=st.sampled_from(("float32", "fp8_e4m3")),
    gathered=st.booleans(),
)
@example(
    batch=[(1, 40)],
    block_size=8,
    ratio=1,
    causal="yes",
    window=None,
    tile=TILES[0],
    splits=3,
    layout="NHD",
    cache_dtype="float32",
    gathered=False,
)
def test_any_cut_of_any_batch(
    batch: list[tuple[int, int]],
    block_size: int,
    ratio: int,
    causal: str,
    window: tuple[int, int] | None,
    tile: Tile,
    splits: int,
    layout: str,
    cache_dtype: str,
    gathered: bool,
) -> None:
    """Requests of (query tokens, earlier tokens), one of them perhaps without either."""
    lengths = [(count, count + earlier) for count, earlier in batch]
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=cache_dtype)
    flags = [causal == "yes" or (causal == "by request" and row % 2 == 0) for row in range(len(lengths))]
    stated: bool | torch.Tensor = flags[0]
    if causal == "by request":
        stated = torch.tensor(flags, dtype=torch.int32, device=DEVICE)
    scene = make_scene(lengths, spec=spec, num_heads=ratio, device=DEVICE, causal=stated)
    cache = scene.empty_cache(layout)
    write_in_torch(*scene.history, cache, scene.history_slots)
    write_in_torch(scene.key, scene.value, cache, scene.slot_mapping)
    rows = [count * ratio for count, _ in lengths]
    even = -(-max(rows) // tile.block_m)
    each = even if even * len(rows) <= sum(rows) // tile.block_m + len(rows) else 0
    tiles = even * len(rows) if each else sum(rows) // tile.block_m + len(rows)
    output = torch.full_like(scene.query, float("nan"))
    if scene.query.shape[0]:
        common = scene.common
        attention = import_module("omni_attn.ops.paged.triton_attention")
        # Wherever there is no tensor memory, too; the kernel copies numbers of any dtype but never converts them.
        with mock.patch.object(attention, "_gathers", lambda cache: cache.dtype != write.FP8):
            attention.attend_pages(
                scene.query,
                cache,
                output,
                query_start_loc=common.query_start_loc,
                seq_lens=common.seq_lens,
                block_table=common.block_table,
                causal=stated,
                window=window,
                softmax_scale=8**-0.5,
                plan=Plan(tile, tiles, each, splits, 64 if gathered else 0),
            )
    error = (output.double() - scene.expected(causal=flags, window=window)).abs()
    assert not error.numel() or error.max() < 1e-5  # and no NaN
