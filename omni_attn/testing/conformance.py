"""BackendConformance: what every backend agrees on, as a test class for anybody's backend.

    class TestMine(BackendConformance):
        def get_backend(self):
            return MyBackend

pytest collects the test_ methods; `run_conformance` runs them without pytest. What the facts say a backend cannot do
is checked to be refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from omni_attn.backends.metadata import AttentionMetadata, PackedPadding
from omni_attn.ops.reference import reference_attention
from omni_attn.testing.harness import BackendHarness, raised


class BackendConformance(BackendHarness):
    """One factory method to write, `get_backend`; BackendHarness says what else can be set."""

    # -- what every backend agrees on

    def test_dense_equals_reference(self) -> None:
        """[B, S, H, D] in and out, also where a swap of dimensions would fit by shape."""
        shapes = [(1, self.heads, self.heads), (2, 5, 5)]
        if self.facts.unequal_lengths:
            shapes += [(1, 7, 3), (2, 3, 9)]
        for batch, queries, keys in shapes:
            query, key, value = self.tensors(batch, queries, keys)
            output = self.run(query, key, value)
            self.close(output, reference_attention(query, key, value)[0])
            assert output.is_contiguous() and output.dtype == self.dtype

    def test_strided_inputs_are_read_and_left_alone(self) -> None:
        """Slices of one fused projection give the same numbers and stay as they were."""
        parts = self.tensors(2, 6, 6)
        fused = torch.stack(parts, dim=2)
        query, key, value = fused.unbind(2)
        self.close(self.run(query, key, value), reference_attention(*parts)[0])
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts)
        self.close(self.run(query, key, value), reference_attention(*parts)[0])
        assert torch.equal(fused, torch.stack(parts, dim=2))
        query, key, value = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in parts)
        self.close(self.run(query, key, value), reference_attention(*parts)[0])

    def test_softmax_scale(self) -> None:
        """A scale of the layer's own is honoured, or refused."""
        # Below the usual scale: above it a quantised kernel's error would grow with the scores.
        scale = 0.5 * self.head_size**-0.5
        if not self.facts.custom_scale:
            return self.refused(softmax_scale=scale)
        query, key, value = self.tensors(1, 5, 5)
        expected = reference_attention(query, key, value, softmax_scale=scale)[0]
        return self.close(self.run(query, key, value, softmax_scale=scale), expected)

    def test_grouped_heads_repeat_interleaved(self) -> None:
        """Key-value head j serves a run of neighbouring query heads."""
        if not self.facts.gqa:
            return self.refused(num_kv_heads=self.kv_heads)
        query, key, value = self.tensors(2, 5, 6, kv_heads=self.kv_heads)
        return self.close(self.run(query, key, value), reference_attention(query, key, value)[0])

    def test_causal_is_aligned_at_the_bottom_right(self) -> None:
        """Also for unequal lengths; queries before the first key give zeros."""
        if not self.facts.causal:
            return self.refused(causal=True)
        for queries, keys in ((6, 6), (3, 5), (5, 3)):
            query, key, value = self.tensors(2, queries, keys)
            if query.shape[1] != key.shape[1] and not self.facts.causal_unequal_lengths:
                self.refused(causal=True, max_seqlen_q=query.shape[1], max_seqlen_k=key.shape[1])
                self.build_fails(AttentionMetadata(), "causal", queries=queries, keys=keys, causal=True)
                continue
            expected = reference_attention(query, key, value, causal=True)[0]
            self.close(self.run(query, key, value, causal=True), expected)
        return None

    def test_window(self) -> None:
        """(left, right) tokens around a query's own position."""
        for queries, keys, causal, window in (
            (8, 8, False, (2, 1)),
            (4, 8, False, (3, -1)),
            (8, 8, True, (2, 0)),
        ):
            if causal and not self.facts.causal:
                continue
            if self.reasons(causal=causal, window=window):
                self.refused(causal=causal, window=window)
                continue
            query, key, value = self.tensors(1, queries, keys)
            expected = reference_attention(query, key, value, causal=causal, window=window)[0]
            self.close(self.run(query, key, value, causal=causal, window=window), expected)

    def test_key_padding(self) -> None:
        """[B, K] masks: right, left and holed padding, unequal lengths, and an item without any key."""
        masks = (
            [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]],
            [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
            [[1, 0, 1, 0, 1], [0, 1, 1, 0, 1]],
            [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]],
        )
        if "padding" not in self.facts.mask_kinds:
            self.refused(mask_usage="padding")
            return self.build_fails(self.masked(masks[0]), "attn_mask", queries=12, keys=5)
        for queries in (12, 3, 5):
            query, key, value = self.tensors(2, queries, 5)
            for rows in masks:
                record = self.masked(rows)
                expected = reference_attention(query, key, value, attn_mask=record.attn_mask)[0]
                self.close(self.run(query, key, value, record), expected)
        return None

    def test_prefix_lengths_beside_the_mask(self) -> None:
        """kv_lengths is the same statement as the mask; a disagreement is refused with both numbers."""
        if "padding" not in self.facts.mask_kinds:
            self.skip("takes no padding masks")
        rows = [[1, 1, 1, 0, 0]]
        query, key, value = self.tensors(1, 4, 5)
        record = self.masked(rows, kv_lengths=(3,))
        self.close(
            self.run(query, key, value, record),
            reference_attention(query, key, value, attn_mask=record.attn_mask)[0],
        )
        wrong = self.masked(rows, kv_lengths=(2,), validate="values")
        self.build_fails(wrong, "3", "2", keys=5)
        holed = self.masked([[1, 0, 1, 1, 0]], kv_lengths=(3,), validate="values")
        return self.build_fails(holed, "hole", keys=5)

    def test_arbitrary_masks(self) -> None:
        """[B|1, H|1, Sq, Sk]: bool keeps, float is added; a dead row is zeros, the lowest number is a number.

        A kernel for bool masks alone refuses the float ones.
        """
        query, key, value = self.tensors(2, 6, 6)
        keep = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.4
        keep[0, :, 2] = False
        if "arbitrary" not in self.facts.mask_kinds:
            self.refused(mask_usage="arbitrary")
            return self.build_fails(AttentionMetadata(attn_mask=keep), "attn_mask")
        by_head = keep[:1].repeat(1, self.heads, 1, 1)
        by_head[:, 0] = by_head[:, 0].flip(-1)
        masks = [keep, keep[:1], by_head, torch.zeros(2, 1, 6, 6).masked_fill(~keep, float("-inf"))]
        masks += [
            torch.randn(1, self.heads, 6, 6).to(self.dtype).float(),
            masks[3].bfloat16(),
            keep[:, 0, 1].float(),
        ]
        if self.dtype != torch.float16:  # fp16's lowest number is too near to the scores to hide anything
            masks.append(torch.zeros(2, 1, 6, 6).masked_fill(~keep, torch.finfo(self.dtype).min))
        for mask in masks:
            placed = mask.to(self.device)
            too_many = mask.dim() == 4 and mask.shape[1] > 1 and not self.facts.head_masks
            if too_many or (mask.dtype != torch.bool and not self.facts.float_masks):
                self.build_fails(AttentionMetadata(attn_mask=placed), "attn_mask")
                continue
            output = self.run(query, key, value, AttentionMetadata(attn_mask=placed))
            self.close(output, reference_attention(query, key, value, attn_mask=placed)[0])
        return None

    def test_causal_with_a_mask(self) -> None:
        """Both hold at once, or the pair is refused."""
        rows = [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
        if not self.facts.causal or "padding" not in self.facts.mask_kinds:
            self.skip("is not causal, or takes no padding masks")
        if not self.facts.causal_with_mask:
            self.refused(causal=True, mask_usage="padding")
            return self.build_fails(self.masked(rows), "causal", causal=True)
        query, key, value = self.tensors(2, 6, 6)
        record = self.masked(rows)
        expected = reference_attention(query, key, value, attn_mask=record.attn_mask, causal=True)[0]
        return self.close(self.run(query, key, value, record, causal=True), expected)

    def test_a_mask_that_hides_nothing(self) -> None:
        """Equals no mask bit for bit: an all-true mask on the host, and any mask of mode "none"."""
        query, key, value = self.tensors(2, 6, 6)
        plain = self.run(query, key, value)
        for shape in ((2, key.shape[1]), (1, 1, query.shape[1], key.shape[1])):
            record = AttentionMetadata(attn_mask=torch.ones(shape, dtype=torch.bool, device="cpu"))
            assert torch.equal(self.run(query, key, value, record), plain)
        hiding = torch.zeros(2, key.shape[1], dtype=torch.bool)
        record = AttentionMetadata(attn_mask=hiding, mask_mode="none")
        assert torch.equal(self.run(query, key, value, record), plain)

    def test_ambiguous_masks_are_refused(self) -> None:
        """Integer masks, 3-D masks and masks of a wrong length, by name and number."""
        self.build_fails(AttentionMetadata(attn_mask=torch.ones(2, 6, dtype=torch.uint8)), "attn_mask")
        self.build_fails(AttentionMetadata(attn_mask=torch.zeros(2, 6, 6, dtype=torch.bool)), "attn_mask")
        self.build_fails(AttentionMetadata(attn_mask=torch.zeros(2, 5, dtype=torch.bool)), "attn_mask")

    def test_packed_equals_one_by_one(self) -> None:
        """cu_seqlens isolate sequences; tokens behind the last boundary are neither read nor answered."""
        first = self.tokens(5)
        boundaries = (0, first, first + self.tokens(4))
        query, key, value = self.tensors(1, boundaries[-1] + 3, boundaries[-1] + 3)
        if not self.facts.packing:
            self.refused(packed=True)
            return self.build_fails(
                AttentionMetadata(cu_seqlens_q=boundaries), "cu_seqlens_q", queries=12, keys=12
            )
        for poisoned in (query, key, value):
            poisoned[:, boundaries[-1] :] = float("nan")
        on_device = torch.tensor(boundaries, dtype=torch.int32, device=self.device)
        for causal in (False, True) if self.facts.causal else (False,):
            for stated in (boundaries, on_device):
                record = AttentionMetadata(cu_seqlens_q=stated)
                hidden = stated is on_device and on_device.device.type != "cpu"
                if hidden and not self.facts.device_boundaries:
                    tokens = boundaries[-1]
                    self.build_fails(record, "cu_seqlens", queries=tokens, keys=tokens, causal=causal)
                    continue
                output = self.run(query, key, value, record, causal=causal)
                for start, end in pairwise(boundaries):
                    part = slice(start, end)
                    expected = reference_attention(
                        query[:, part], key[:, part], value[:, part], causal=causal
                    )[0]
                    self.close(output[:, part], expected)
                assert not output[:, boundaries[-1] :].any()
        return None

    def test_packed_padding(self) -> None:
        """The first tokens are real; what lies behind them does not leak, and comes out as zeros."""
        keys = self.key_tokens(7)
        queries = self.query_tokens(5) if self.facts.unequal_lengths else keys
        query, key, value = self.tensors(1, queries + 3, keys + 3)
        record = AttentionMetadata(packed_padding=PackedPadding(q_length=queries, kv_length=keys))
        if not (self.facts.packing or self.facts.packed_padding):
            return self.build_fails(record, "packed_padding", queries=8, keys=10)
        expected = reference_attention(query[:, :queries], key[:, :keys], value[:, :keys])[0]
        query[:, queries:], key[:, keys:], value[:, keys:] = float("nan"), float("nan"), float("nan")
        output = self.run(query, key, value, record)
        self.close(output[:, :queries], expected)
        assert not output[:, queries:].any()
        there = self.key_tokens(6)
        beyond = AttentionMetadata(packed_padding=PackedPadding(q_length=queries, kv_length=there + 1))
        return self.build_fails(beyond, str(there + 1), str(there), queries=queries, keys=6)

    def test_batch_equals_single_runs(self) -> None:
        """Items of a batch do not see one another."""
        query, key, value = self.tensors(3, 5, 7)
        together = self.run(query, key, value)
        for item in range(3):
            rows = slice(item, item + 1)
            self.close(together[rows], self.run(query[rows], key[rows], value[rows]))

    def test_no_key_at_all(self) -> None:
        """Zero key tokens give zeros."""
        query, key, value = self.tensors(2, 5, 0)
        output = self.run(query, key, value)
        assert output.shape == query.shape and not output.any()

    def test_value_head_size(self) -> None:
        """Value heads of another size are served, or refused."""
        query, key, value = self.tensors(1, 5, 6)
        if not self.facts.value_head_size:
            return self.refused(value_head_size=self.head_size * 2)
        wide = torch.cat([value, value + 1], dim=-1)
        return self.close(self.run(query, key, wide), reference_attention(query, key, wide)[0])

    def test_lse(self) -> None:
        """Natural log of the sum of exponentials, [B, H, Sq] float32."""
        query, key, value = self.tensors(2, 7, 6)
        impl, product = self.prepared(query, key, value)
        if not self.facts.lse:
            error = raised(TypeError, lambda: impl.forward_with_lse(query, key, value, product))
            assert "lse" in str(error).lower(), str(error)
            return
        for causal in (False, True) if self.facts.causal else (False,):
            if causal and not self.facts.causal_unequal_lengths:
                query, key, value = self.tensors(2, 6, 6)
            impl, product = self.prepared(query, key, value, causal=causal)
            output, lse = impl.forward_with_lse(query, key, value, product)
            expected, expected_lse = reference_attention(query, key, value, causal=causal)
            self.close(output, expected)
            assert lse.dtype == torch.float32
            seen = expected_lse != float("-inf")
            assert bool((lse[~seen] == float("-inf")).all())
            self.close(lse[seen], expected_lse[seen])

    def test_backward_of_lse(self) -> None:
        """Gradients flow through output and log-sum-exp, as a ring needs them, or training in a ring is refused."""
        if self.reasons(requires_grad=True, sequence_parallel="ring"):
            return self.refused(requires_grad=True, sequence_parallel="ring")
        leaves = [x.requires_grad_() for x in self.tensors(1, 5, 6)]
        doubles = [x.detach().double().requires_grad_() for x in leaves]
        query, key, value = leaves
        impl, product = self.prepared(query, key, value)
        parts = impl.forward_with_lse(query, key, value, product), reference_attention(*doubles)
        for output, lse in parts:
            torch.autograd.backward(output.sum(dim=1).square().sum() + lse.square().sum())
        return self._close_gradients(leaves, doubles)

    def test_backward(self) -> None:
        """Gradients of query, key and value equal those of the reference."""
        if self.reasons(requires_grad=True):
            return self.refused(requires_grad=True)
        leaves = [x.requires_grad_() for x in self.tensors(1, 5, 6)]
        doubles = [x.detach().double().requires_grad_() for x in leaves]
        outputs = self.run(leaves[0], leaves[1], leaves[2]), reference_attention(*doubles)[0]
        for output in outputs:
            torch.autograd.backward(output.sum(dim=1).square().sum())
        return self._close_gradients(leaves, doubles)

    def _close_gradients(self, leaves: list[torch.Tensor], doubles: list[torch.Tensor]) -> None:
        for leaf, double in zip(leaves, doubles, strict=True):
            assert leaf.grad is not None and double.grad is not None
            scale = double.grad.abs().max().clamp(min=1.0)
            self.close(leaf.grad.double() / scale, double.grad / scale)

    def test_compiles_into_one_graph(self) -> None:
        """torch.compile(fullgraph=True) gives eager's numbers, with and without a mask."""
        if self.facts.compile_mode == "eager_only":
            return self.refused(compile=True)
        query, key, value = self.tensors(2, 6, 6)
        records = [AttentionMetadata()]
        records += [self.masked([[1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 1]])] * (
            "padding" in self.facts.mask_kinds
        )
        for record in records:
            torch.compiler.reset()
            impl, product = self.prepared(query, key, value, record)
            compiled = torch.compile(impl.forward, fullgraph=True, backend="aot_eager")
            with torch.no_grad():
                output = compiled(query, key, value, product)
                assert output.is_contiguous()
                self.close(output, impl.forward(query, key, value, product))
        return None


def conformance_tests(suite: BackendHarness) -> list[str]:
    """Names of a suite's tests, in the order in which they run."""
    return sorted(name for name in dir(suite) if name.startswith("test_"))


def run_conformance(suite: BackendHarness) -> Iterator[tuple[str, Exception | None]]:
    """Runs each test of a suite: (its name, None if it passed, else what it raised).

    A test with nothing to check on this backend raises unittest.SkipTest.
    """
    for name in conformance_tests(suite):
        suite.setup_method()
        try:
            getattr(suite, name)()
        except Exception as error:
            yield name, error
        else:
            yield name, None
        finally:
            suite.teardown_method()
