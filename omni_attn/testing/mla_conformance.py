"""MLABackendConformance: what every backend over a paged cache of latents agrees on, as a test class.

    class TestMine(MLABackendConformance):
        def get_backend(self):
            return MyBackend

Each test runs an MLAAttention layer over pages among others of NaN, and compares with the open form of the formula in
float64. The backend has to be registered.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from omni_attn.backends.paged import NULL_BLOCK, PAD_SLOT
from omni_attn.errors import MetadataError
from omni_attn.testing.harness import raised
from omni_attn.testing.mla_harness import DECODES, MIXED, MLAHarness

__all__ = ["DECODES", "MIXED", "MLABackendConformance", "MLAHarness"]


class MLABackendConformance(MLAHarness):
    """The tests; see the module."""

    def test_equals_the_open_form(self) -> None:
        """Decodes and prefills in one batch, for each page size."""
        for size in self.block_sizes:
            scene = self.scene(block_size=size)
            self.close(self.attend(scene), scene.expected(scale=self.scale))

    def test_decodes_alone_and_prefills_alone(self) -> None:
        """A step may have one side only; the scale is the layer's."""
        for lengths in (DECODES, ((5, 5),), ((7, 30), (1, 12))):
            scene = self.scene(lengths)
            output = self.attend(scene, softmax_scale=0.3)
            self.close(output, scene.expected(scale=0.3))

    def test_earlier_tokens_in_chunks(self) -> None:
        """However small the workspace is: chunks are merged by log-sum-exp."""
        lengths = ((1, 9), (4, 37), (3, 3), (2, 20), (5, 12))
        for workspace in (8, 16, 1024):
            scene = self.scene(lengths)
            self.close(self.attend(scene, workspace=workspace), scene.expected(scale=self.scale))

    def test_decodes_of_several_tokens(self) -> None:
        """Each token of a decode sees what came before it, whatever the threshold is."""
        lengths = ((1, 19), (3, 20), (2, 2), (4, 30), (6, 6))
        for threshold in (1, 3, 8):
            scene = self.scene(lengths)
            output = self.attend(scene, decode_threshold=threshold)
            self.close(output, scene.expected(scale=self.scale, decode_threshold=threshold))

    def test_blocks_that_are_not_causal(self) -> None:
        """Tokens of a block see one another and all that came before; padding lies behind them."""
        scene = self.scene(((4, 4), (4, 21), (4, 12)), causal=False, padded_reqs=1, padded_tokens=4)
        self.close(self.attend(scene, non_causal_blocks=True), scene.expected(scale=self.scale))

    def test_compiles_into_one_graph(self) -> None:
        """torch.compile(fullgraph=True) of a layer: decodes, prefills, and both."""
        facts = self.get_backend().facts.mla
        if facts is None or facts.compile_mode == "eager_only":
            self.skip("does not run under torch.compile")
        for lengths in (MIXED, DECODES, ((7, 30), (5, 5))):
            torch.compiler.reset()
            scene = self.scene(lengths)
            self.close(self.attend_compiled(scene), self.attend(scene).double())

    def test_order_of_pages_does_not_matter(self) -> None:
        """The same bits from other pages."""
        one, other = (self.attend(self.scene(page_seed=seed)) for seed in (0, 1))
        assert torch.equal(one, other), "pages in another order gave another result"

    def test_padding_gives_zeros_and_changes_nothing(self) -> None:
        """Requests without tokens, and tokens of no request, as a CUDA graph needs them."""
        for lengths in (DECODES, MIXED):
            scene = self.scene(lengths, padded_reqs=3, padded_tokens=2)
            output = self.attend(scene)
            self.close(output, scene.expected(scale=self.scale))
            assert not output[-2:].any(), "padding is not zeros"

    def test_padding_alone(self) -> None:
        """A batch in which no request is real."""
        scene = self.scene(((0, 0), (0, 0)), padded_tokens=4, spare_columns=1)
        output = self.attend(scene)
        assert not output.any(), "padding is not zeros"

    def test_tokens_of_nobody(self) -> None:
        """A step without any request has padding alone."""
        scene = self.scene(((0, 0),), padded_tokens=3)
        nobody = scene.with_common(**vars(scene.common.unpadded(0, 3).replace(max_seq_len=9)))
        assert not self.attend(nobody).any()

    def test_slots(self) -> None:
        """Only named slots change; without slots nothing is written, and prefills need no slot of their own."""
        scene = self.scene(((3, 11),))
        layer = self.layer(scene)
        cache = self.filled(scene, layer)
        before = cache.clone()
        hidden = scene.with_common(slot_mapping=torch.full_like(scene.pages.slot_mapping, PAD_SLOT))
        for stated in (hidden, scene.with_common(slot_mapping=None)):
            self.close(self.attend(stated, cache), scene.expected(scale=self.scale))
            assert torch.equal(cache.nan_to_num(7.0), before.nan_to_num(7.0)), "an unnamed slot changed"
        self.attend(scene, cache)
        slots = scene.pages.slot_mapping
        written = cache[slots // cache.shape[1], slots % cache.shape[1]]
        assert torch.equal(written, torch.cat((scene.latent, scene.rope_key), dim=1)), (
            "another row was written"
        )
        rest = torch.ones(cache.shape[:2], dtype=torch.bool, device=cache.device)
        rest[slots // cache.shape[1], slots % cache.shape[1]] = False
        assert torch.equal(cache[rest].nan_to_num(7.0), before[rest].nan_to_num(7.0)), "another slot changed"

    def test_fp8(self) -> None:
        """A cache of float8_e4m3fn: what it keeps counts, for all but a prefill's own tokens."""
        if "fp8_e4m3" not in self.get_backend().get_cache_facts(self.variant, "mla").cache_dtypes:
            self.skip("its facts name no fp8_e4m3")
        scene = self.scene(cache_dtype="fp8_e4m3")
        self.close(self.attend(scene, workspace=8), scene.expected(scale=self.scale))

    def test_scaled_cache(self) -> None:
        """What is kept is the latent over its scale."""
        scene = self.scene()
        layer = self.layer(scene)
        layer.impl.latent_scale = 4.0
        cache = self.filled(scene, layer)
        step = self.step(scene, layer, cache)
        output = layer(scene.query, scene.latent, scene.rope_key, step)
        self.close(output, scene.expected(scale=self.scale))
        rows = scene.history[0][:3] / 4
        slots = scene.pages.history_slots[:3]
        kept = cache[slots // cache.shape[1], slots % cache.shape[1], : self.latent]
        assert torch.equal(kept, rows), "the cache keeps another number"

    def test_upper_bounds_on_the_host(self) -> None:
        """The host may state more keys than there are: those beyond do not count, and no page of theirs is read."""
        scene = self.scene()
        totals = scene.common.seq_lens_cpu
        assert totals is not None
        stated = scene.with_common(seq_lens_cpu=totals + 5, max_seq_len=scene.common.max_seq_len + 5)
        self.close(self.attend(stated, workspace=8), scene.expected(scale=self.scale))

    def test_another_table(self) -> None:
        """update_block_table: the same step in other pages, and the first metadata stays as it is."""
        one, other = self.scene(page_seed=0), self.scene(page_seed=1)
        layer = self.layer(one, workspace=8)
        builder = layer.make_builder(one.pages.spec, ("layer",), one.query.device)
        first = builder.build(one.common)
        moved = builder.update_block_table(first, other.common.block_table, other.common.slot_mapping)
        outputs = []
        for scene, metadata in ((other, moved), (one, first)):
            cache = self.filled(scene, layer)
            step = self.step(scene, layer, cache)
            call = step["layer"]._replace(metadata=metadata)
            outputs.append(layer(scene.query, scene.latent, scene.rope_key, call))
        assert torch.equal(*outputs), "the same step in other pages gave another result"
        self.close(outputs[0], one.expected(scale=self.scale))

    def test_one_request_alone(self) -> None:
        """Others in the batch do not matter."""
        scene = self.scene()
        together = self.attend(scene)
        for row in range(len(MIXED)):
            first, last = scene.common.query_start_loc_cpu[row : row + 2].tolist()
            self.close(self.attend(scene.only(row)), together[first:last].double())

    def test_strided_inputs(self) -> None:
        """Views into larger tensors, which are not modified."""
        scene = self.scene()
        layer = self.layer(scene, workspace=8)
        step = self.step(scene, layer, self.filled(scene, layer))
        wide = scene.query.repeat(1, 2, 2)[:, ::2, : scene.query.shape[2]]
        row = torch.cat((scene.rope_key, scene.latent, scene.rope_key), dim=1)
        parts = row.split((self.rope, self.latent, self.rope), dim=1)  # type: ignore[no-untyped-call]
        before = wide.clone()
        output = layer(wide, parts[1], parts[2][:, None], step)
        plain = layer(wide.contiguous(), scene.latent, scene.rope_key, step)
        by_channel = torch.empty_like(plain.mT.contiguous()).mT
        layer(wide, parts[1], parts[2][:, None], step, by_channel)
        self.close(by_channel, plain.double())  # another order of memory, another order of sums
        assert torch.equal(output, plain) and torch.equal(wide, before)

    def test_tables_with_gaps(self) -> None:
        """Lengths, pages and slots that are parts of larger tables."""
        scene = self.scene()
        for workspace in (8, 1024):
            given = self.attend(replace(scene, pages=scene.pages.with_gaps()), workspace=workspace)
            assert torch.equal(given, self.attend(scene, workspace=workspace))

    def test_profile_runs_and_scales(self) -> None:
        """Without a step there are zeros; an output scale is refused by name."""
        scene = self.scene()
        layer = self.layer(scene, workspace=64)
        output = scene.query.new_full((len(scene.query), self.heads, self.value), float("nan"))
        layer(scene.query, scene.latent, scene.rope_key, None, output)
        assert not output.any(), "a run that measures memory gives zeros"
        inputs, one = (scene.query, scene.latent, scene.rope_key, None), torch.ones(1)
        for call in (
            lambda: layer(*inputs, output_scale=one),
            lambda: layer(*inputs, output_block_scale=one),
        ):
            assert type(layer.impl).__name__ in str(raised(NotImplementedError, call))

    def test_null_page(self) -> None:
        """A page of NaN that padding points at is not read."""
        scene = self.scene(DECODES, padded_reqs=2, padded_tokens=2)
        assert bool((scene.common.block_table[-2:] == NULL_BLOCK).all())
        assert bool(self.attend(scene).isfinite().all())

    def test_foreign_metadata(self) -> None:
        """What another builder made is refused."""
        scene = self.scene()
        layer = self.layer(scene)
        step = self.step(scene, layer, self.filled(scene, layer))
        call = step["layer"]._replace(metadata=object())
        error = raised(MetadataError, lambda: layer(scene.query, scene.latent, scene.rope_key, call))
        assert "MLAMetadata" in str(error)
