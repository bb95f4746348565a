"""What is special about SAGE_ATTN and SAGE_ATTN_3: habits of the kernels that a caller must not notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, PackedPadding, use_attention_config
from omni_attn.backends import sage_attn_3, sage_kernels
from omni_attn.errors import BackendImportError, BackendRejectedError, MetadataError
from omni_attn.ops import layout
from omni_attn.ops.reference import reference_attention
from omni_attn.testing import fake_device, fake_kernels, fake_package
from omni_attn.testing.standins.log import CallLog
from omni_attn.testing.standins.sage import Sage1StandIn, Sage2StandIn

MACHINES = {
    "sage1": fake_device("sm_90", packages={"sageattention": "1.0.6"}, cudnn=91900),
    "sage2": fake_device("sm_90", packages={"sageattention": "2.2.0"}, cudnn=91900),
    "sage3": fake_device("sm_120", packages={"sageattn3": "1.0.0"}, cudnn=91900),
}
BLOCK = (1, 14, 15, 16, 17, 127, 128, 129)
every_kernel = pytest.mark.parametrize("kernel", MACHINES)


@contextmanager
def layer_of(
    kernel: str, *, heads: int = 2, size: int = 64, **needs: Any
) -> Iterator[tuple[Attention, CallLog]]:
    """A layer that chose the kernel, with its stand-in in place, and the stand-in's log."""
    name = "SAGE_ATTN_3" if kernel == "sage3" else "SAGE_ATTN"
    config = {"default": {"backend": name, "variant": None if kernel == "sage3" else kernel}}
    with fake_kernels(name, kernel) as log, use_attention_config(config, platform=MACHINES[kernel]):
        yield Attention(heads, size, role="self", **needs), log


def call(queries: int, keys: int, *, heads: int = 2, size: int = 64, batch: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    lengths = (queries, keys, keys)
    return [torch.randn(batch, n, heads, size, generator=generator).bfloat16() for n in lengths]


def assert_right(output: torch.Tensor, tensors: list[torch.Tensor], **geometry: Any) -> None:
    expected = reference_attention(*tensors, **geometry)[0]
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)


# --- keys stay as they are, although both packages centre them in place


@every_kernel
def test_the_callers_keys_are_not_centred(kernel: str) -> None:
    tensors = call(128, 128)
    before = [x.clone() for x in tensors]
    with layer_of(kernel) as (layer, _):
        assert_right(layer(*tensors), tensors)
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


# --- B37 lengths around a block: right numbers, or a refusal that tells the length to have


def takes(kernel: str, queries: int, keys: int) -> bool:
    if kernel == "sage3":
        return True
    return keys % 64 == 0 and (kernel == "sage1" or (queries >= 128 and keys >= 128))


@every_kernel
@pytest.mark.parametrize("queries", BLOCK)
def test_b37_lengths_around_a_block(kernel: str, queries: int) -> None:
    for keys in BLOCK:
        tensors = call(queries, keys)
        with layer_of(kernel) as (layer, log):
            if takes(kernel, queries, keys):
                assert_right(layer(*tensors), tensors)
                continue
            with pytest.raises(MetadataError) as raised:
                layer(*tensors)
            assert not log.calls
        least = "128" if kernel == "sage2" and min(queries, keys) < 128 else "64"
        assert "SAGE_ATTN" in str(raised.value) and least in str(raised.value)
        assert "TORCH_SDPA" in str(raised.value)
        with pytest.raises(BackendRejectedError, match="SAGE_ATTN"):
            layer_of(kernel, max_seqlen_q=queries, max_seqlen_k=keys).__enter__()


@every_kernel
def test_b37_no_key_at_all_gives_zeros(kernel: str) -> None:
    with layer_of(kernel) as (layer, log):
        output = layer(*call(5, 0))
    assert output.shape == (1, 5, 2, 64) and not output.any() and not log.calls


def test_b37_the_stand_ins_do_go_wrong_where_we_refuse() -> None:
    """Otherwise the recipe above would prove nothing."""
    newer, older = Sage2StandIn(CallLog()).sageattn, Sage1StandIn(CallLog()).sageattn
    for queries, keys in ((14, 128), (127, 128), (128, 63)):
        assert newer(*call(queries, keys), tensor_layout="NHD").isnan().all()
    tensors = call(16, 77)
    wrong = older(*(x.clone() for x in tensors), tensor_layout="NHD")
    assert (wrong.double() - reference_attention(*tensors)[0]).abs().max() > 0.1
    tensors = call(129, 129)
    assert older(*(x.clone() for x in tensors), tensor_layout="NHD", is_causal=True)[:, 128:].isnan().all()


@pytest.mark.parametrize("kernel", ["sage1", "sage2"])
def test_many_keys_may_be_ragged(kernel: str) -> None:
    """At 4097 keys the 63 missing ones take at most 1.5 % of the output away, and the layer says nothing."""
    tensors = call(128, 4097, heads=1)
    with layer_of(kernel, heads=1) as (layer, _):
        output = layer(*tensors).double()
    expected = reference_attention(*tensors)[0]
    error = ((output - expected).norm() / expected.norm()).item()
    assert error < 63 / 4097 + 4e-3  # 4e-3: the rounding of the output to bfloat16


# --- B34 causal


@pytest.mark.parametrize("length", [*BLOCK, 63, 64, 65, 191, 192, 193, 256])
def test_causal_of_any_equal_length(length: int) -> None:
    """Also where the kernel by itself reads a scale that is not there: 1 to 64 tokens behind a whole tile."""
    tensors = call(length, length, batch=2)
    with layer_of("sage1", causal=True) as (layer, log):
        output = layer(*tensors)
    assert_right(output, tensors, causal=True)
    assert output.is_contiguous() and log.calls == ["sageattn"]


@pytest.mark.parametrize("kernel", ["sage1", "sage2"])
@pytest.mark.parametrize("lengths", [(128, 256), (256, 128)])
def test_b34_causal_of_unequal_lengths_names_both(kernel: str, lengths: tuple[int, int]) -> None:
    with layer_of(kernel, causal=True) as (layer, log), pytest.raises(MetadataError) as raised:
        layer(*call(*lengths))
    assert not log.calls
    assert all(part in str(raised.value) for part in ("SAGE_ATTN", "causal", "128", "256", "TORCH_SDPA"))


# --- masks and packing


@every_kernel
def test_masks_are_refused_with_the_backends_that_take_them(kernel: str) -> None:
    keep = torch.arange(128)[None] < 100
    for mask in (keep, keep[:, None, None].expand(1, 1, 128, 128), torch.zeros(1, 1, 128, 128) - 1):
        with layer_of(kernel) as (layer, log), pytest.raises(MetadataError) as raised:
            layer(*call(128, 128), AttentionMetadata(attn_mask=mask))
        assert not log.calls
        assert all(
            part in str(raised.value) for part in ("attn_mask", "SAGE_ATTN", "CUDNN_ATTN", "TORCH_SDPA")
        )


@every_kernel
def test_sequences_run_one_after_the_other(kernel: str) -> None:
    tensors = call(384, 384)
    record = AttentionMetadata(cu_seqlens_q=(0, 128, 320))
    with layer_of(kernel) as (layer, log):
        output = layer(*tensors, record)
    assert len(log) == 2 and not output[:, 320:].any()
    for part in (slice(0, 128), slice(128, 320)):
        assert_right(output[:, part], [x[:, part] for x in tensors])


@pytest.mark.parametrize(
    "record",
    [AttentionMetadata(cu_seqlens_q=(0, 128, 205)), AttentionMetadata(packed_padding=PackedPadding(128, 77))],
    ids=["second sequence", "packed padding"],
)
def test_each_sequence_has_to_be_long_enough(record: AttentionMetadata) -> None:
    with layer_of("sage1") as (layer, log), pytest.raises(MetadataError, match="found 77"):
        layer(*call(256, 256), record)
    assert not log.calls


# --- offsets in 32 bits


@every_kernel
def test_batches_behind_32_bits_run_item_by_item(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small limit in place of 2**31 - 1: contiguous parts of the batch, each within it."""
    item = 128 * 2 * 64
    fits = layout.fits_int32
    for module in (sage_kernels, sage_attn_3):
        monkeypatch.setattr(module, "fits_int32", lambda *tensors: fits(*tensors, limit=item))
    tensors = call(128, 128, batch=3)
    with layer_of(kernel) as (layer, log):
        output = layer(*tensors)
    assert len(log) == 3 and output.is_contiguous()
    assert_right(output, tensors)


@every_kernel
def test_a_sequence_behind_32_bits_is_refused(kernel: str) -> None:
    tokens = 2**31 // (40 * 128) + 64
    with layer_of(kernel, heads=40, size=128) as (layer, _), pytest.raises(MetadataError) as raised:
        layer.prepare(AttentionMetadata(), (tokens // 64 * 64, tokens // 64 * 64))
    assert all(part in str(raised.value) for part in ("SAGE_ATTN", "2147483647", "40", "128"))


def test_offsets_count_the_holes_between_strides() -> None:
    fused = torch.empty(4, 8, 3, 16)
    part = fused[:, :, 0]
    assert layout.fits_int32(part, limit=fused.numel())
    assert not layout.fits_int32(part, limit=part.numel())
    assert layout.fits_int32(fused[:1, :, 0].contiguous(), limit=8 * 16 * 4)


# --- head sizes that the package pads


@pytest.mark.parametrize("size", [32, 40, 72, 80, 96, 112])
def test_padded_heads_come_back_contiguous_at_their_own_size(size: int) -> None:
    tensors = call(128, 128, size=size)
    with layer_of("sage2", size=size) as (layer, _):
        output = layer(*tensors)
    assert_right(output, tensors)
    assert output.is_contiguous()


# --- G3: four wrong packages, four texts


def refusal(kernel: str, **stand_in: Any) -> str:
    module = "sageattn3" if kernel == "sage3" else "sageattention"
    name = "SAGE_ATTN_3" if kernel == "sage3" else "SAGE_ATTN"
    with (
        fake_package(module, **stand_in),
        use_attention_config(name, platform=MACHINES[kernel]),
        pytest.raises(BackendImportError) as raised,
    ):
        Attention(2, 64, role="self")
    assert raised.value.__cause__ is not None
    assert all(part in str(raised.value) for part in (name, module, "pip install"))
    return str(raised.value)


@every_kernel
def test_g3_a_broken_package_is_quoted(kernel: str) -> None:
    text = refusal(kernel, raises=ImportError("libcudart.so.11: undefined symbol: x"))
    assert "installed but broken" in text and "undefined symbol: x" in text and "not installed" not in text


@every_kernel
def test_g3_a_missing_module_is_told_apart(kernel: str) -> None:
    module = "sageattn3" if kernel == "sage3" else "sageattention"
    text = refusal(kernel, raises=ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert "is not installed" in text and "broken" not in text


@every_kernel
def test_g3_a_missing_dependency_of_the_package_is_no_missing_package(kernel: str) -> None:
    text = refusal(kernel, raises=ModuleNotFoundError("No module named 'triton'", name="triton"))
    assert "installed but broken" in text and "triton" in text


@every_kernel
def test_g3_a_missing_function_is_named(kernel: str) -> None:
    text = refusal(kernel)
    assert ("sageattn3_blackwell" if kernel == "sage3" else "sageattn") in text
    assert "not installed" not in text and "broken" not in text


def test_g3_the_first_generation_under_the_second_ones_version() -> None:
    """Its keys would be centred in place; that its other functions are missing gives it away."""
    text = refusal("sage2", sageattn=Sage1StandIn(CallLog()).sageattn)
    assert "sageattn_qk_int8_pv_fp16_triton" in text


def test_g3_a_function_with_other_arguments_is_refused() -> None:
    def sageattn(q: object, k: object, v: object, is_causal: bool = False, smooth_k: bool = True) -> None:
        """An old signature."""

    text = refusal("sage1", sageattn=sageattn)
    assert "tensor_layout" in text and "sm_scale" in text


# --- never a default


def test_quantised_kernels_are_never_defaults() -> None:
    packages = {"sageattention": "1.0.6", "sageattn3": "1.0.0"}
    for device, cudnn in product(("sm_80", "sm_90", "sm_120"), (None, 91900)):
        machine = fake_device(device, packages=packages, cudnn=cudnn)
        with use_attention_config({}, platform=machine):
            layer = Attention(2, 128, role="self", dtype="bfloat16", mask_usage="never")
        assert layer.selection is not None and "SAGE" not in layer.selection.backend
