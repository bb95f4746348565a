"""Public faults of the groups G3, G4, G5 and G8 on real kernels, in bfloat16.

B17, B23, B25, B26, B29, B31, B32, B34, B35, B37, B52. What the facts of a kernel do not claim has to be refused by name
before the kernel runs. Each recipe also runs on plain torch on the CPU, which shows that the recipe is right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from omni_attn import Attention, AttentionConfig, AttentionMetadata, PackedPadding, use_attention_config
from omni_attn.ops.reference import reference_attention
from tests.gpu.machine import KERNELS, ON_CPU, Call, Kernel, every_kernel, on_gpu
from tests.layer.stands import HEAD_SIZE, refusal_of

Recipe = Callable[[Kernel], None]
SHORT = (1, 14, 15, 16, 17, 127, 128, 129)
#: Few tokens, as the reports have them, and as many as every kernel takes.
SIZES = (10, 256)


def check_mask(kernel: Kernel, call: Call, mask: torch.Tensor) -> list[torch.Tensor]:
    """Outputs with REF's numbers where the facts claim the mask, else a refusal."""
    mask = mask.to(kernel.device)
    outputs = kernel.served(*call, AttentionMetadata(attn_mask=mask))
    for output in outputs:
        kernel.close(output, reference_attention(*call, attn_mask=mask)[0])
    return outputs


def b17_what_is_chosen_runs(kernel: Kernel) -> None:
    """By name, and by default for the same needs: the logged choice is the one that runs."""
    call = kernel.tensors(1, 256, 256)
    expected = reference_attention(*call)[0]
    layer = kernel.layer(4, HEAD_SIZE, dtype="bfloat16")
    assert layer.selection is not None
    assert (layer.selection.backend, layer.selection.source) == (kernel.name, "default")
    assert kernel.variant in (None, layer.selection.variant)
    kernel.close(layer(*call), expected)
    with use_attention_config(AttentionConfig(), platform=kernel.platform):
        default = Attention(4, HEAD_SIZE, role="self", dtype="bfloat16")
    assert default.selection is not None and default.selection.source == "platform default"
    assert default.selection.backend_cls.facts.numerics == "exact"
    ON_CPU.close(default(*call), expected)


def b23_masks(kernel: Kernel) -> None:
    generator = torch.Generator().manual_seed(2)
    for tokens in SIZES:
        call = kernel.tensors(1, tokens, tokens, heads=8)
        check_mask(kernel, call, torch.rand(1, tokens, generator=generator) > 0.4)
        for shape in ((1, 1, tokens, tokens), (1, 8, tokens, tokens)):
            check_mask(kernel, call, torch.rand(shape, generator=generator) > 0.4)
            check_mask(kernel, call, torch.randn(shape, generator=generator).bfloat16())


def b23_a_mask_that_hides_nothing_equals_none(kernel: Kernel) -> None:
    call = kernel.tensors(1, 256, 256, heads=8)
    (plain,) = kernel.served(*call)
    for shape in ((1, 256), (1, 1, 256, 256)):
        all_true = torch.ones(shape, dtype=torch.bool)
        hiding = torch.zeros(shape, dtype=torch.bool, device=kernel.device)
        for fields in ({"attn_mask": all_true}, {"attn_mask": hiding, "mask_mode": "none"}):
            assert torch.equal(kernel.run_layer(*call, AttentionMetadata(**fields)), plain)


def b23_scale(kernel: Kernel) -> None:
    for tokens in SIZES:
        call = kernel.tensors(1, tokens, tokens)
        for output in kernel.served(*call, softmax_scale=0.3):
            kernel.close(output, reference_attention(*call, softmax_scale=0.3)[0])


def b25_text_masks(kernel: Kernel) -> None:
    for queries, keys in ((12, 5), (3, 5), (384, 256), (128, 256)):
        call, key = kernel.tensors(2, queries, keys, heads=2), torch.arange(keys)
        full, none = key >= 0, key < 0
        prefix, suffix, holes = key < keys * 0.4, key >= keys * 0.4, key % 2 == 0
        for rows in ((full, prefix), (suffix, full), (holes, prefix), (full, none)):
            mask = torch.stack(rows)
            for output in check_mask(kernel, call, mask):
                dead = ~output.abs().sum(-1).bool().any(-1)  # [B, Sq]: rows of zeros
                assert torch.equal(dead.cpu(), ~mask.any(-1, keepdim=True).expand(2, queries))


def b26_dead_rows(kernel: Kernel) -> None:
    for tokens in (6, 256):
        call = kernel.tensors(2, tokens, tokens)
        keep = torch.ones(2, 1, tokens, tokens, dtype=torch.bool)
        keep[0, :, 2], keep[1, :, 4, 1:3] = False, False
        for lowest in (None, float("-inf"), torch.finfo(torch.bfloat16).min):
            zeros = torch.zeros(keep.shape, dtype=torch.bfloat16)
            mask = keep if lowest is None else zeros.masked_fill(~keep, lowest)
            for output in check_mask(kernel, call, mask):
                if lowest is None or lowest == float("-inf"):
                    assert not output[0, 2].any()
                else:
                    kernel.close(output[0, 2], call[2][0].double().mean(dim=0))
        mask = torch.ones(2, tokens, dtype=torch.bool)
        mask[0, 3], mask[1] = False, False
        for output in check_mask(kernel, call, mask):
            assert not output[1].any()


def b29_padding_is_not_attended_to(kernel: Kernel) -> None:
    for real, padded in ((6, 8), (6, 16), (6, 64), (128, 192), (128, 256)):
        query, key, value = kernel.tensors(1, padded, padded)
        expected = reference_attention(query, key[:, :real], value[:, :real])[0]
        mask = (torch.arange(padded) < real)[None].to(kernel.device)
        for fields in ({}, {"kv_lengths": (real,)}):
            for output in kernel.served(query, key, value, AttentionMetadata(attn_mask=mask, **fields)):
                kernel.close(output, expected)
        for tensor in (query, key, value):
            tensor[:, real:] = float("nan")
        for fields in (
            {"packed_padding": PackedPadding(real, real)},
            {"cu_seqlens_q": (0, real)},
            {"cu_seqlens_q": torch.tensor([0, real], dtype=torch.int32, device=kernel.device)},
        ):
            for output in kernel.served(query, key, value, AttentionMetadata(**fields)):
                kernel.close(output[:, :real], expected[:, :real])
                assert not output[:, real:].any()


def b29_two_prompts_in_one_batch(kernel: Kernel) -> None:
    for queries, lengths in ((12, (3, 8)), (256, (128, 256))):
        query, key, value = kernel.tensors(2, queries, lengths[1])
        mask = (torch.arange(lengths[1])[None] < torch.tensor(lengths)[:, None]).to(kernel.device)
        items = ((x[i : i + 1] for x in (query, key[:, :n], value[:, :n])) for i, n in enumerate(lengths))
        alone = torch.cat([reference_attention(*item)[0] for item in items])
        for fields in ({}, {"kv_lengths": lengths}):
            for output in kernel.served(query, key, value, AttentionMetadata(attn_mask=mask, **fields)):
                kernel.close(output, alone)


def b31_what_the_dtype_of_a_mask_means(kernel: Kernel) -> None:
    for tokens in (6, 256):
        call, kept = kernel.tensors(1, tokens, tokens), (torch.arange(tokens) % 3 != 1)[None]
        check_mask(kernel, call, kept)
        for dtype in (torch.float32, torch.bfloat16):
            check_mask(kernel, call, kept.to(dtype))  # zeros and ones are numbers to add
            check_mask(kernel, call, kept.to(dtype).log())
        for dtype in (torch.uint8, torch.int64):
            record = AttentionMetadata(attn_mask=kept.to(kernel.device, dtype))
            text = refusal_of(partial(kernel.run_layer, *call, record))
            told = "attn_mask" in text and str(dtype) in text
            assert kernel.name in text and (told or kernel.limits(*call, record).told_by(text))


def b32_layout_and_strides(kernel: Kernel) -> None:
    for tokens, heads in ((4, 4), (5, 3), (256, 4), (128, 128)):
        call = kernel.tensors(1, tokens, tokens, heads=heads)
        expected = reference_attention(*call)[0]
        fused = torch.stack(call, dim=2)
        before = fused.clone()
        orders = ([x.transpose(1, n).contiguous().transpose(1, n) for x in call] for n in (2, 3))
        doubled = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in call]
        for given in (call, list(fused.unbind(2)), *orders, doubled):
            for output in kernel.served(*given):
                kernel.close(output, expected)
                assert output.shape == (1, tokens, heads, HEAD_SIZE) and output.is_contiguous()
        assert torch.equal(fused, before)


def b34_causal_is_aligned_at_the_bottom_right(kernel: Kernel) -> None:
    for queries, keys in ((3, 5), (5, 3), (4, 4), (128, 256), (256, 128), (200, 200), (256, 256)):
        call = kernel.tensors(2, queries, keys)
        for geometry in ({"causal": True}, {"window": (2, 1)}, {"causal": True, "window": (64, 0)}):
            for output in kernel.served(*call, **geometry):
                kernel.close(output, reference_attention(*call, **geometry)[0])
        mask = (torch.arange(keys)[None] < torch.tensor([[keys], [keys // 2 + 1]])).to(kernel.device)
        for output in kernel.served(*call, AttentionMetadata(attn_mask=mask), causal=True):
            kernel.close(output, reference_attention(*call, attn_mask=mask, causal=True)[0])


def b35_heads_repeat_interleaved(kernel: Kernel) -> None:
    for kv_heads in (8, 4, 2, 1):
        for queries, keys in ((5, 7), (128, 256)):
            call = kernel.tensors(2, queries, keys, heads=8, kv_heads=kv_heads)
            for output in kernel.served(*call):
                kernel.close(output, reference_attention(*call)[0])
            check_mask(kernel, call, torch.arange(keys)[None].expand(2, keys) % 3 != 1)
    with pytest.raises(ValueError, match=r"8.*3"):
        kernel.layer(8, HEAD_SIZE, num_kv_heads=3)
    layer = kernel.layer(8, HEAD_SIZE)
    text = refusal_of(lambda: layer(*kernel.tensors(1, 256, 256, heads=8, kv_heads=4)))
    assert "8 heads" in text and f"(1, 256, 4, {HEAD_SIZE})" in text


def b37_lengths_around_a_block(kernel: Kernel) -> None:
    for queries in SHORT:
        for keys in SHORT:
            call = kernel.tensors(1, queries, keys, heads=2)
            for output in kernel.served(*call):
                kernel.close(output, reference_attention(*call)[0])
    for queries, keys in ((5, 0), (0, 5), (256, 0)):
        (output,) = kernel.served(*kernel.tensors(2, queries, keys))
        assert output.shape == (2, queries, 4, HEAD_SIZE) and not output.any()


def b52_far_offsets(kernel: Kernel, tokens: int = 128 * 1094, row: int = 15360) -> None:
    """One head of a fused projection: the last token lies more than 2**31 elements behind the first."""
    if kernel.name == "BLOCK_SUMMARY_ATTN":
        pytest.skip("blocks of one token would need a score for each two of them; see test_block_summary_gpu")
    fused = torch.empty(1, tokens, row, device=kernel.device, dtype=kernel.dtype)
    call = [part[..., :HEAD_SIZE].unflatten(-1, (1, HEAD_SIZE)) for part in fused.chunk(3, dim=-1)]
    generator = torch.Generator().manual_seed(0)
    for tensor in call:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for output in kernel.served(*call):
        (expected,) = kernel.served(*(x.contiguous() for x in call))
        difference = (output.float() - expected.float()).abs().max().item()
        assert difference <= 2e-2, f"strided and contiguous inputs differ by {difference:.1e}"
        rows = slice(tokens - 64, tokens)  # what overflows is the end
        kernel.close(output[:, rows], reference_attention(call[0][:, rows], *call[1:])[0])


RECIPES = {name: value for name, value in globals().items() if name.startswith("b") and callable(value)}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))


@every_recipe
def test_the_recipe_holds_on_the_cpu(recipe: Recipe) -> None:
    with torch.no_grad():
        (partial(b52_far_offsets, tokens=256, row=768) if recipe is b52_far_offsets else recipe)(ON_CPU)


class TestOnGPU:
    pytestmark = on_gpu

    @every_kernel
    @every_recipe
    def test_recipe(self, kernel: Kernel, recipe: Recipe) -> None:
        with torch.no_grad():
            recipe(kernel)

    @pytest.mark.parametrize("kernel", KERNELS, ids=str)
    def test_b17_what_cannot_run_here_is_refused_by_name(self, kernel: Kernel) -> None:
        if not (reasons := kernel.why_not()):
            pytest.skip(f"{kernel} runs on this machine")
        text = refusal_of(lambda: kernel.layer(4, HEAD_SIZE, dtype="bfloat16"))
        assert kernel.name in text and all(reason in text for reason in reasons)
