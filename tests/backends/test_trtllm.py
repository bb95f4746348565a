"""TRTLLM_ATTN beyond conformance: FlashInfer's signatures, masks and packing, defaults, gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, PackedPadding, use_attention_config
from omni_attn.backends.trtllm_attn import TrtllmAttentionBackend
from omni_attn.errors import BackendImportError, MetadataError
from omni_attn.facts import AttentionRequest
from omni_attn.ops.reference import reference_attention
from omni_attn.platforms.cuda import CudaPlatform
from omni_attn.testing import fake_kernels, fake_package
from omni_attn.testing.standins.log import CallLog
from omni_attn.testing.standins.trtllm import APIS, trtllm_stand_in
from tests.backends.trtllm_layers import DEVICES, HEADS, SIZE, build_layer, relative_error, tensors

both = pytest.mark.parametrize("variant", ["ragged", "fmha_v2"])
every_api = pytest.mark.parametrize("api", APIS)
RAGGED, FMHA_V2 = "trtllm_ragged_attention_deepseek", "trtllm_fmha_v2_prefill"


# -- signatures


@every_api
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cu_seqlens_q": (0, 4, 9, 12)},
        {"cu_seqlens_q": (0, 4, 9, 10)},
        {"packed_padding": PackedPadding(7, 7)},
    ],
    ids=["dense", "documents", "documents and padding", "padding"],
)
def test_each_way_to_say_that_no_sequence_is_empty(api: str, fields: dict[str, Any]) -> None:
    call, log = tensors(1, 12, 12), CallLog()
    with trtllm_stand_in(log, "ragged", api):
        output = build_layer()(*call, AttentionMetadata(**fields))
    end = 7 if "packed_padding" in fields else fields.get("cu_seqlens_q", (12,))[-1]
    bounds = fields.get("cu_seqlens_q", (0, end))
    for start, stop in pairwise(bounds):
        rows = slice(start, stop)
        assert relative_error(output[:, rows], reference_attention(*(x[:, rows] for x in call))[0]) < 3e-3
    assert not output[:, end:].any()
    assert log.calls == [RAGGED]  # neighbours run together


def test_boundaries_that_only_the_device_knows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer would ask the device in each call whether a sequence is empty."""
    monkeypatch.setattr("omni_attn.backends.stated._on_host", lambda boundaries: None)
    record = AttentionMetadata(cu_seqlens_q=torch.tensor([0, 4, 9], dtype=torch.int32))
    with fake_kernels("TRTLLM_ATTN", "ragged"), pytest.raises(MetadataError, match=r"tuples of ints"):
        build_layer()(*tensors(1, 9, 9), record)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("...", name="flashinfer.prefill"), ["without module flashinfer.prefill"]),
        (ModuleNotFoundError("No module named 'tvm_ffi'", name="tvm_ffi"), ["broken", "tvm_ffi"]),
        (OSError("libcudart.so.13"), ["broken", "OSError", "libcudart"]),
    ],
)
def test_a_missing_and_a_broken_package_read_differently(error: Exception, words: list[str]) -> None:
    with fake_package("flashinfer.prefill", raises=error), pytest.raises(BackendImportError) as caught:
        build_layer()
    for word in [
        "TRTLLM_ATTN (ragged)",
        "flashinfer.prefill",
        'pip install "flashinfer-python>=0.6.18"',
        *words,
    ]:
        assert word in str(caught.value)
    assert "not installed" not in str(caught.value)


def test_no_package_at_all_reads_differently() -> None:
    with pytest.raises(BackendImportError, match=r"flashinfer.prefill is not installed.*0\.6\.18"):
        build_layer()


def test_a_launcher_that_fails_is_not_tried_by_each_layer() -> None:
    tried = []

    def loader() -> None:
        tried.append(1)
        raise RuntimeError("no network")

    functions = {RAGGED: print, FMHA_V2: print, "get_trtllm_gen_fmha_module": loader}
    with fake_package("flashinfer.prefill", **functions):
        for _ in range(3):
            with pytest.raises(BackendImportError, match=r"no network.*flashinfer-cubin"):
                build_layer()
    assert len(tried) == 1


def test_a_missing_quantiser_is_named() -> None:
    functions = {RAGGED: print, FMHA_V2: print}
    with fake_package("flashinfer.prefill", **functions):
        with pytest.raises(BackendImportError, match=r"trtllm_sage_attention_quantize.*0\.6\.18"):
            build_layer(quant={"dtype_qk": "int8"})
        build_layer()


def test_kernels_that_cannot_be_loaded_are_told_at_construction() -> None:
    """trtllm-gen's are fetched: without a network the launcher already fails."""

    def no_network() -> None:
        raise RuntimeError("Failed to get cubin")

    package = {RAGGED: print, "get_trtllm_gen_fmha_module": no_network}
    with fake_package("flashinfer.prefill", **package):
        with pytest.raises(BackendImportError, match="Failed to get cubin") as caught:
            build_layer()
        assert "flashinfer-cubin" in str(caught.value)


# -- masks and packing


def test_stated_prefixes_of_a_batch_are_cut_item_by_item() -> None:
    call, mask = tensors(3, 6, 8), torch.ones(3, 8, dtype=torch.bool)
    mask[0, 5:], mask[1] = False, False
    for tensor in call[1:]:
        tensor[0, 5:], tensor[1] = float("nan"), float("nan")
    layer_call = AttentionMetadata(attn_mask=mask, kv_lengths=(5, 0, 8))
    with fake_kernels("TRTLLM_ATTN", "ragged") as log:
        output = build_layer()(*call, layer_call)
    assert len(log) == 2 and not output[1].any()
    for item, keys in ((0, 5), (2, 8)):
        rows = slice(item, item + 1)
        expected = reference_attention(call[0][rows], call[1][rows, :keys], call[2][rows, :keys])[0]
        assert relative_error(output[rows], expected) < 3e-3


@both
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_mask": torch.ones(2, 8, dtype=torch.bool).tril(6)}, ["kv_lengths", "packed_padding"]),
        ({"attn_mask": torch.ones(1, 1, 6, 8, dtype=torch.bool).tril()}, ["(1, 1, 6, 8)"]),
        ({"attn_mask": torch.zeros(1, 1, 6, 8).tril() - 1}, ["float32"]),
        (
            {"attn_mask": torch.tensor([[True, False, True] + [False] * 5] * 2), "kv_lengths": (2, 2)},
            ["hole"],
        ),
        ({"attn_mask": torch.tensor([[True] * 4 + [False] * 4] * 2), "kv_lengths": (4, 5)}, ["4", "5"]),
    ],
    ids=["no lengths", "square", "float", "hole", "disagreement"],
)
def test_other_masks_are_refused_with_what_takes_them(
    variant: str, fields: dict[str, Any], words: list[str]
) -> None:
    with fake_kernels("TRTLLM_ATTN", variant) as log, pytest.raises(MetadataError) as caught:
        build_layer(variant)(*tensors(2, 6, 8), AttentionMetadata(**fields))
    named = ["TRTLLM_ATTN"] if "kv_lengths" in fields else ["TRTLLM_ATTN", "TORCH_SDPA", "CUDNN_ATTN"]
    for word in [*named, *words]:
        assert word in str(caught.value)
    assert not log.calls


def test_documents_apart_run_apart() -> None:
    """The keys of a document without queries lie between two others."""
    call = tensors(1, 9, 12)
    record = AttentionMetadata(cu_seqlens_q=(0, 4, 4, 9), cu_seqlens_k=(0, 3, 6, 12))
    call[1][:, 3:6], call[2][:, 3:6] = float("nan"), float("nan")
    with fake_kernels("TRTLLM_ATTN", "ragged") as log:
        output = build_layer()(*call, record)
    assert len(log) == 2
    for (a, b), (c, d) in (((0, 4), (0, 3)), ((4, 9), (6, 12))):
        expected = reference_attention(call[0][:, a:b], call[1][:, c:d], call[2][:, c:d])[0]
        assert relative_error(output[:, a:b], expected) < 3e-3


# -- defaults


def test_fmha_v2_is_never_a_default() -> None:
    request = AttentionRequest(
        role="self",
        num_heads=2,
        head_size=128,
        dtype="bfloat16",
        mask_usage="never",
        max_seqlen_q=64,
        max_seqlen_k=64,
    )
    [reason] = [
        r
        for r in TrtllmAttentionBackend.validate_configuration(request, DEVICES["fmha_v2"], None)
        if "fmha_v2" in r
    ]
    assert "chosen by name" in reason and "platform default" in reason
    assert not TrtllmAttentionBackend.validate_configuration(request, DEVICES["ragged"], None)
    assert TrtllmAttentionBackend.select_variant(request, DEVICES["ragged"], None) == "ragged"


class TrtllmFirst(CudaPlatform):
    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        return ("TRTLLM_ATTN", "CUDNN_ATTN", "TORCH_SDPA")


@pytest.mark.parametrize(
    "fields",
    [
        {"cu_seqlens_q": (0, 58, 64)},
        {"packed_padding": PackedPadding(58, 58)},
        {"attn_mask": torch.ones(1, 64, dtype=torch.bool)},
    ],
)
def test_b28_as_a_default_it_serves_what_a_maskless_model_passes(
    fields: dict[str, Any],
) -> None:
    platform = TrtllmFirst(DEVICES["ragged"])
    call = tensors(1, 64, 64)
    with (
        fake_kernels("TRTLLM_ATTN", "ragged"),
        fake_kernels("CUDNN_ATTN"),
        use_attention_config(None, platform=platform, dtype="bfloat16"),
    ):
        maskless = Attention(HEADS, SIZE, role="self", mask_usage="never")
        packed = Attention(HEADS, SIZE, role="self", mask_usage="never", packed=True)
        masked = Attention(HEADS, SIZE, role="self", mask_usage="padding")
        unstated = Attention(HEADS, SIZE, role="self")
        record = AttentionMetadata(**fields)
        layer = masked if "attn_mask" in fields else maskless
        output = layer(*call, record)
    layers = (maskless, packed, masked, unstated)
    chosen = [layer.selection.backend for layer in layers if layer.selection]
    # Boundaries of a packed layer may lie on the device, which TRTLLM_ATTN would have to ask in each call.
    assert chosen == ["TRTLLM_ATTN", "CUDNN_ATTN", "CUDNN_ATTN", "CUDNN_ATTN"]
    real = 64 if "attn_mask" in fields else 58
    assert relative_error(output[:, :real], reference_attention(*(x[:, :real] for x in call))[0]) < 3e-3


# -- gradients


@both
def test_gradients_are_refused_in_words(variant: str) -> None:
    query, key, value = tensors(1, 5, 5)
    with fake_kernels("TRTLLM_ATTN", variant):
        output = build_layer(variant)(query.requires_grad_(), key, value)
        with pytest.raises(
            (RuntimeError, NotImplementedError), match=r"omni_attn.trtllm.*no autograd formula"
        ):
            output.sum().backward()
