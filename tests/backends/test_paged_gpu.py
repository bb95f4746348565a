"""Paged backends on the real kernels of this machine's GPU: conformance, CUDA graphs, tensor memory, far offsets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.flash_attn import FlashAttentionBackend
from omni_attn.backends.flashinfer_attn import FlashInferBackend
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.backends.triton_attn import TritonAttentionBackend
from omni_attn.ops.reference import reference_attention
from omni_attn.platforms import current_omni_platform
from omni_attn.testing import PagedBackendConformance
from omni_attn.testing.paged_conformance import PagedHarness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an NVIDIA GPU, found none on this machine"
    ),
    pytest.mark.filterwarnings("default"),  # kernel packages warn about much that is not ours
]


class OnGPU(PagedBackendConformance):
    """bfloat16 on the GPU; skipped where the backend's own facts refuse this machine."""

    device = "cuda"
    dtype = torch.bfloat16
    head_size = 128
    heads, kv_heads = 8, 2
    block_sizes = (8, 16, 64, 128, 24)

    def setup_method(self) -> None:
        self.machine = current_omni_platform("cuda").device
        if reasons := self.reasons(dtype=str(self.dtype).removeprefix("torch."), causal=self.flags[0]):
            pytest.skip("; ".join(reasons))
        super().setup_method()

    def test_long_requests(self) -> None:
        """Many tiles, many splits, both ends of a window."""
        for causal in self.flags:
            for lengths in (((300, 2000), (1, 5000), (130, 130)), ((1, 9000),), ((1, 700),) * 70):
                self.check(self.scene(lengths, causal=causal))
                if not self.reasons(causal=causal, window=(500, 0)):
                    self.check(self.scene(lengths, causal=causal), window=(500, 0))

    def test_building_waits_for_nothing(self) -> None:
        """No copy from the device to the host in build, write and forward."""
        scene = self.scene(causal=self.flags[0])
        impl, _, cache = prepared = self.ready(scene)
        self.attend(scene, prepared)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            impl.update_kv_cache(scene.key, scene.value, cache, scene.slot_mapping)
            self.attend(scene, prepared)
        finally:
            torch.cuda.set_sync_debug_mode("default")


class TestTorchSDPA(OnGPU):
    def get_backend(self) -> type[AttentionBackend]:
        return TorchSDPABackend


class TestTriton(OnGPU):
    variant: str | None = "split"

    def get_backend(self) -> type[AttentionBackend]:
        return TritonAttentionBackend


class TestTritonHalf(TestTriton):
    dtype = torch.float16
    head_size = 64


class TestTritonSingle(TestTriton):
    dtype = torch.float32
    tolerance = 2e-5


class TestTritonWide(TestTriton):
    head_size = 256


class TestTritonOdd(TestTriton):
    head_size = 72


class TestTritonInvariant(TestTriton):
    variant = "invariant"


class TestFlash3(OnGPU):
    variant: str | None = "fa3"
    block_sizes = (8, 16, 60, 24, 1)

    def get_backend(self) -> type[AttentionBackend]:
        return FlashAttentionBackend


class TestFlash3Wide(TestFlash3):
    head_size = 256


class TestFlash3Narrow(TestFlash3):
    head_size = 64
    dtype = torch.float16


class TestFlash4(TestFlash3):
    variant = "fa4"


class TestFlashInferFA3(OnGPU):
    variant: str | None = "fa3"

    def get_backend(self) -> type[AttentionBackend]:
        return FlashInferBackend


class TestFlashInferFA2(TestFlashInferFA3):
    variant = "fa2"


class TestFlashInferOneHeadEach(TestFlashInferFA2):
    """Decode without tensor cores."""

    heads, kv_heads = 2, 1


class Harness(PagedHarness):
    device, dtype, head_size, variant = "cuda", torch.bfloat16, 128, "split"
    heads = 8

    def get_backend(self) -> type[AttentionBackend]:
        return TritonAttentionBackend


@pytest.mark.parametrize(
    "lengths", [((48, 700), (48, 200)), ((1, 700), (1, 90), (1, 1)), ((1, 4000),)], ids=str
)
def test_a_captured_step_replays_over_other_pages_and_lengths(lengths: tuple[tuple[int, int], ...]) -> None:
    """Pages, lengths and slots are read at each replay; tiles and splits stay."""
    harness = Harness()
    scene = harness.scene(lengths, block_size=16)
    other = harness.scene([(q, max(q, n - 37)) for q, n in lengths], block_size=16, seed=3, page_seed=8)
    impl, builder, cache = harness.ready(scene)
    _, _, moved = harness.ready(other)
    width = scene.common.block_table.shape[1]
    table = torch.zeros_like(scene.common.block_table)
    table[:, : other.common.block_table.shape[1]] = other.common.block_table[:, :width]
    static = scene.common
    inputs = [scene.query.clone(), scene.key.clone(), scene.value.clone()]
    whole = torch.full((max(len(cache), len(moved)), *cache.shape[1:]), float("nan"), device="cuda").to(
        cache.dtype
    )
    whole[: len(cache)] = cache
    metadata = builder.build_for_cudagraph_capture(static)
    output = torch.empty_like(scene.query)

    def step() -> None:
        assert static.slot_mapping is not None
        impl.update_kv_cache(inputs[1], inputs[2], whole, static.slot_mapping)
        impl.forward(inputs[0], None, None, whole, metadata, output)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    harness.close(output, scene.expected(causal=False))
    # Another step in the same memory.
    whole.fill_(float("nan"))
    whole[: len(moved)] = moved
    static.block_table.copy_(table)
    static.seq_lens.copy_(other.common.seq_lens)
    assert static.slot_mapping is not None
    static.slot_mapping.copy_(other.slot_mapping)
    for tensor, fresh in zip(inputs, (other.query, other.key, other.value), strict=True):
        tensor.copy_(fresh)
    graph.replay()
    harness.close(output, other.expected(causal=False))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [64, 192])
@pytest.mark.parametrize("lengths", [((300, 1500),), ((1, 1500), (1, 64), (1, 300))], ids=str)
def test_whole_blocks_in_pages(layout: str, block_size: int, lengths: tuple[tuple[int, int], ...]) -> None:
    """What tensor memory fetches on Hopper: blocks of 64 tokens that lie within a page."""
    harness = Harness()
    for causal in (True, False):
        for kv_heads in (2, 8):
            scene = harness.scene(lengths, block_size=block_size, num_kv_heads=kv_heads, causal=causal)
            harness.check(scene, layout)


@pytest.mark.parametrize("block_size", [8, 64])
def test_offsets_beyond_32_bits(block_size: int) -> None:
    """The last pages of a cache of more than 2 ** 31 numbers."""
    harness = Harness()
    scene = harness.scene(((40, 200), (1, 90)), block_size=block_size)
    page = 2 * block_size * 8 * 128
    shift = 2**31 // page + 1
    if torch.cuda.mem_get_info()[0] < 3 * 2**31:
        pytest.skip("needs 6 GiB of free memory")
    cache = torch.empty(shift + scene.num_pages, 2, block_size, 8, 128, dtype=torch.bfloat16, device="cuda")
    cache[-scene.num_pages :] = float("nan")
    impl, builder, _ = harness.ready(scene)
    common = replace(scene.common, block_table=scene.common.block_table + shift)
    impl.update_kv_cache(*scene.history, cache, scene.history_slots + shift * block_size)
    impl.update_kv_cache(scene.key, scene.value, cache, scene.slot_mapping + shift * block_size)
    output = torch.empty_like(scene.query)
    impl.forward(scene.query, None, None, cache, builder.build(common), output)
    harness.close(output, scene.expected(causal=False))


def test_a_video_chunk_over_its_history() -> None:
    """One page per stream of any size, and pages of 8, at the shape of a 480p chunk; sampled rows."""
    harness = Harness()
    harness.heads = 12
    for block_size in (8, 1560, 9360):
        scene = harness.scene(((4680, 9360),), block_size=block_size)
        output = harness.attend(scene, harness.ready(scene))
        rows = torch.arange(0, 4680, 73, device="cuda")
        expected = reference_attention(scene.query[rows][None], scene.keys[0][None], scene.values[0][None])[
            0
        ][0]
        harness.close(output[rows], expected)
