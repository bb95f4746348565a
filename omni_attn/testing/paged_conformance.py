"""PagedBackendConformance: what every backend over a paged KV cache agrees on, as a test class.

    class TestMine(PagedBackendConformance):
        def get_backend(self):
            return MyBackend

Each test writes a cache through the impl under test, among pages of NaN, and compares with float64 attention over the
tokens that were written. What the facts do not claim is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from omni_attn.backends.paged import PAD_SLOT
from omni_attn.facts import AttentionRequest
from omni_attn.testing.harness import raised
from omni_attn.testing.paged_harness import MIXED, PagedHarness, written_and_attended

__all__ = ["MIXED", "PagedBackendConformance", "PagedHarness", "written_and_attended"]


class PagedBackendConformance(PagedHarness):
    """One factory method to write, `get_backend`; PagedHarness says what else can be set."""

    def test_paged_equals_dense(self) -> None:
        """Ragged batches, with every page size and causality that the facts claim."""
        for size in self.sizes:
            for causal in self.flags:
                self.check(self.scene(block_size=size, causal=causal))

    def test_one_query_each(self) -> None:
        """Decode: one token of each request, of unequal histories."""
        for causal in self.flags:
            self.check(self.scene(((1, 1), (1, 8), (1, 33), (1, 64)), causal=causal))

    def test_a_chunk_over_a_long_history(self) -> None:
        """One request, many more keys than queries, as a chunk of a video has them."""
        for causal in self.flags:
            self.check(self.scene(((24, 152),), causal=causal))

    def test_layouts(self) -> None:
        """Every layout in memory that the facts claim gives the same numbers."""
        for layout in self.cache.layouts:
            self.check(self.scene(causal=self.flags[0]), layout)

    def test_order_of_pages_is_irrelevant(self) -> None:
        """Where the pages lie changes nothing, not one bit."""
        first, second = (self.check(self.scene(page_seed=seed, causal=self.flags[0])) for seed in (0, 1))
        assert torch.equal(first, second)

    def test_grouped_heads_repeat_interleaved(self) -> None:
        """Key-value head j serves a run of neighbouring query heads, in decode and in prefill."""
        if not self.facts.gqa:
            return self.refused(
                num_kv_heads=self.kv_heads, kv_cache=self.cache_spec(num_kv_heads=self.kv_heads)
            )
        for lengths in (MIXED, ((1, 20), (1, 7))):
            for heads in {1, self.kv_heads}:
                self.check(self.scene(lengths, num_kv_heads=heads, causal=self.flags[0]))
        return None

    def test_window(self) -> None:
        """(left, right) tokens around a query's own position."""
        windows = ((True, (4, 0)), (False, (5, 3)), (False, (11, -1)), (False, (0, 0)))
        for causal, window in windows:
            if causal not in self.flags:
                continue
            if self.reasons(causal=causal, window=window):
                self.refused(causal=causal, window=window)
                continue
            for lengths in (MIXED, ((1, 20), (1, 7)), ((3, 70),)):
                self.check(self.scene(lengths, causal=causal), window=window)

    def test_batch_invariance(self) -> None:
        """A request gives the same bits alone and among others, where the facts claim it."""
        if not self.facts.batch_invariant:
            self.refused(batch_invariant=True, causal=self.flags[0])
            return
        scene = self.scene(causal=self.flags[0])
        together = self.attend(scene, self.ready(scene))
        for row, (count, _) in enumerate(MIXED):
            first = int(scene.common.query_start_loc_cpu[row])
            alone = scene.only(row)
            given = self.attend(alone, self.ready(alone))
            assert torch.equal(given, together[first : first + count])

    def test_softmax_scale(self) -> None:
        """A scale of the layer's own."""
        if self.facts.custom_scale:
            self.check(self.scene(causal=self.flags[0]), softmax_scale=0.5 * self.head_size**-0.5)

    def test_causal_by_request(self) -> None:
        """Causal and non-causal requests in one batch, told on the device."""
        if not self.cache.causal_by_request:
            self.skip("takes one causality for all requests")
        flags = torch.tensor([0, 1, 1, 0], dtype=torch.int32, device=self.device)
        self.check(self.scene(causal=flags))
        self.check(self.scene(causal=1 - flags))

    def test_cache_of_fewer_bits(self) -> None:
        """fp8: numbers are rounded when they are written, and only then; each scale is undone."""
        if "fp8_e4m3" not in self.cache.cache_dtypes:
            self.skip("takes the layer's own dtype only")
        scene = self.scene(dtype="fp8_e4m3", causal=self.flags[0])
        self.check(scene)
        impl, builder, cache = self.ready(scene)
        impl.key_scale, impl.value_scale = 0.5, 4.0
        impl.update_kv_cache(*scene.history, cache, scene.history_slots)
        impl.update_kv_cache(scene.key, scene.value, cache, scene.slot_mapping)
        # Powers of two: the same digits, but for the smallest numbers.
        expected = scene.expected(causal=self.flags[0])
        error = (self.attend(scene, (impl, builder, cache)).double() - expected).abs().max().item()
        assert error < 0.02, f"error {error:.1e} with scales, allowed 2e-2"
        impl.update_kv_cache(scene.key * 1e4, scene.value * 1e4, cache, scene.slot_mapping)
        assert bool(self.attend(scene, (impl, builder, cache)).isfinite().all()), "large numbers became NaN"
        broken = scene.value.clone()
        broken[0] = float("nan")
        impl.update_kv_cache(scene.key, broken, cache, scene.slot_mapping)
        assert bool(self.attend(scene, (impl, builder, cache))[0].isnan().all()), "NaN became a number"

    def test_padded_batch(self) -> None:
        """Requests and tokens of a captured graph that are not in use change nothing for those that are."""
        self.check(self.scene(causal=self.flags[0], padded_reqs=2, padded_tokens=3))

    def test_a_bound_on_the_keys_beyond_the_page_table(self) -> None:
        """max_seq_len may be more than the page table holds: a graph has one bound for all of its tables."""
        scene = self.scene(causal=self.flags[0])
        held = scene.common.block_table.shape[1] * scene.spec.block_size
        self.check(replace(scene, common=scene.common.replace(max_seq_len=2 * held + 1)))

    def test_all_padding(self) -> None:
        """A batch without any request in use runs, and writes nothing."""
        scene = self.scene(((0, 0), (0, 0)), padded_tokens=2, causal=self.flags[0])
        _, _, cache = prepared = self.ready(scene)
        nobody = replace(scene, common=scene.common.unpadded(0, 2).replace(max_seq_len=9))
        for padding in (scene, nobody):
            self.attend(padding, prepared)
            assert bool(cache.float().isnan().all()), "a slot of -1 was written"

    def test_slots_that_are_not_written(self) -> None:
        """-1 skips a token; a slot_mapping may be shorter than the tokens; nothing else changes."""
        scene = self.scene(causal=self.flags[0])
        impl, _, cache = self.ready(scene)
        before = cache.clone().float()
        slots = scene.slot_mapping.clone()
        slots[1::2] = PAD_SLOT
        impl.update_kv_cache(scene.key + 1, scene.value - 1, cache, slots)
        pages, places = slots[::2] // scene.spec.block_size, slots[::2] % scene.spec.block_size
        for index, tensor in enumerate((scene.key + 1, scene.value - 1)):
            assert torch.equal(cache[pages, index, places].float(), tensor[::2].to(cache.dtype).float())
        cache[pages, :, places] = before[pages, :, places].to(cache.dtype)
        assert torch.equal(cache.float().nan_to_num(7.0), before.nan_to_num(7.0)), "another slot was written"
        impl.update_kv_cache(scene.key + 1, scene.value - 1, cache, scene.slot_mapping[:1])
        page, place = divmod(int(scene.slot_mapping[0]), scene.spec.block_size)
        cache[page, :, place] = before[page, :, place].to(cache.dtype)
        assert torch.equal(cache.float().nan_to_num(7.0), before.nan_to_num(7.0)), "another slot was written"

    def test_slots_are_written_over(self) -> None:
        """A denoising step writes where the one before it wrote: the later one counts."""
        before, scene = (self.scene(seed=seed, causal=self.flags[0]) for seed in (1, 0))
        impl, builder, cache = self.ready(before)
        impl.update_kv_cache(*scene.history, cache, scene.history_slots)
        impl.update_kv_cache(scene.key, scene.value, cache, scene.slot_mapping)
        self.close(self.attend(scene, (impl, builder, cache)), scene.expected(causal=self.flags[0]))

    def test_strided_inputs_are_read_and_left_alone(self) -> None:
        """Slices of one fused projection give the same numbers and stay as they were."""
        scene = self.scene(causal=self.flags[0])
        prepared = impl, builder, cache = self.ready(scene)
        fused = torch.stack((scene.query, scene.key, scene.value), dim=1)
        copy = fused.clone()
        query, key, value = fused.unbind(1)
        impl.update_kv_cache(key, value, cache, scene.slot_mapping)
        plain = self.attend(scene, prepared)
        outputs = torch.empty_like(scene.query), torch.empty_like(scene.query.mT.contiguous()).mT
        for output in outputs:
            impl.forward(query, key, value, cache, builder.build(scene.common), output)
            assert torch.equal(output, plain)
        assert torch.equal(fused, copy)

    def test_tables_with_gaps(self) -> None:
        """Lengths, pages and slots that are parts of larger tables; a column of them steps over whole rows."""
        for lengths in (MIXED, ((1, 20), (1, 7), (1, 1))):
            scene = self.scene(lengths, causal=self.flags[0])
            assert torch.equal(self.check(scene.with_gaps()), self.check(scene))

    def test_metadata_for_other_pages(self) -> None:
        """update_block_table gives a new object with other pages and slots, and leaves the first alone."""
        scene, moved = (self.scene(page_seed=seed, causal=self.flags[0]) for seed in (0, 5))
        prepared = _, builder, _ = self.ready(scene)
        if not builder.supports_update_block_table:
            self.skip("its builder makes metadata anew for other pages")
        metadata = builder.build(scene.common)
        other = builder.update_block_table(metadata, moved.common.block_table, moved.common.slot_mapping)
        assert other is not metadata
        expected = scene.expected(causal=self.flags[0])
        self.close(self.attend(moved, self.ready(moved), other), expected)
        self.close(self.attend(scene, prepared, metadata), expected)

    def test_a_run_without_metadata_gives_zeros(self) -> None:
        """The run that measures memory."""
        scene = self.scene(causal=self.flags[0])
        impl, _, cache = self.ready(scene)
        output = torch.full_like(scene.query, float("nan"))
        assert impl.forward(scene.query, scene.key, scene.value, cache, None, output) is output
        assert not output.any()

    def test_compiles_into_one_graph(self) -> None:
        """torch.compile(fullgraph=True) of the write and the attention gives eager's numbers, in prefill and decode."""
        if self.facts.compile_mode == "eager_only":
            return self.refused(compile=True, causal=self.flags[0])
        for lengths in (MIXED, ((1, 20), (1, 7))):
            scene = self.scene(lengths, causal=self.flags[0])
            impl, builder, filled = self.ready(scene)
            eager = self.attend(scene, (impl, builder, filled))
            cache = scene.empty_cache(self.cache.layouts[0])
            impl.update_kv_cache(*scene.history, cache, scene.history_slots)
            torch.compiler.reset()
            compiled = torch.compile(written_and_attended, fullgraph=True, backend="aot_eager")
            output, metadata = torch.empty_like(eager), builder.build(scene.common)
            tensors = (scene.query, scene.key, scene.value, cache, scene.slot_mapping)
            with torch.no_grad():
                compiled(impl, *tensors, metadata, output)
            self.close(output, eager)
            assert torch.equal(cache.nan_to_num(9.0), filled.nan_to_num(9.0)), (
                "the cache was written otherwise"
            )
        return None

    def test_output_scales_are_refused(self) -> None:
        """An impl without quantised output says so by its name, whether or not there is metadata."""
        scene = self.scene(causal=self.flags[0])
        impl, builder, cache = self.ready(scene)
        for metadata in (None, builder.build(scene.common)):
            for name in ("output_scale", "output_block_scale"):
                arguments = (scene.query, scene.key, scene.value, cache, metadata, scene.query.clone())
                scale = {name: torch.ones(1, device=self.device)}
                error = raised(NotImplementedError, lambda: impl.forward(*arguments, **scale))  # noqa: B023
                assert type(impl).__name__ in str(error), str(error)

    def test_facts_judge_the_cache(self) -> None:
        """A page size or dtype that the kernel does not take is a reason, and what is tested here is none."""
        assert not self.reasons(causal=self.flags[0])
        needs: dict[str, Any] = {"role": "self", "num_heads": self.heads, "head_size": self.head_size}
        assert AttentionRequest(**needs, kv_cache=self.cache_spec()).kv_cache == self.cache_spec()
        unused = {"float64", "float32", "float16", "bfloat16", "fp8_e4m3"} - {self.cache_spec().dtype}
        for dtype in unused - self.cache.cache_dtypes:
            self.refused(dtype=self.cache_spec().dtype, kv_cache=self.cache_spec(dtype=dtype))
