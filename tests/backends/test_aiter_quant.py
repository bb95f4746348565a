"""AITER_QUANT_ATTN: the formats, how each is asked for, and which version can be asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn.backends.aiter_quant_attn import FORMATS, AiterQuantBackend
from omni_attn.backends.aiter_quant_kernels import import_quant_kernel
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.config.blocks import AiterQuantSpec
from omni_attn.config.spec import AttentionSpec
from omni_attn.errors import BackendImportError, BackendRejectedError, ConfigError, MetadataError
from omni_attn.layer import Attention
from omni_attn.ops.reference import reference_attention
from omni_attn.selector import select, use_attention_config
from omni_attn.testing import fake_device, fake_kernels, fake_package
from omni_attn.testing.standins.aiter_quant import AttentionFormat
from tests.selection.stubs import ask, choose

AITER = {"amd-aiter": "0.1.7"}
EVERY_FORMAT = FORMATS["gfx950"]
CALLS = {
    "bf16": "mha_v4 BF16 BF16",
    "fp8": "mha_v4 FP8_E4M3 FP8_E4M3",
    "i8fp8": "mha_v4 INT8 FP8_E4M3",
    "mxfp8": "mha_v4_mxfp8",
    "mxfp6": "mha_v4 MXFP6 FP8_E4M3",
    "mxfp4": "mha_v4 MXFP4 MXFP4",
    "f6f4": "mha_v4 MXFP6 MXFP4",
    "f8f6": "mha_v4 FP8_E4M3 MXFP6",
}


def spec(format_name: str) -> dict[str, Any]:
    return {"backend": "AITER_QUANT_ATTN", "aiter_quant": {"format": format_name}}


def test_the_formats_are_those_of_the_configuration() -> None:
    assert set(CALLS) == set(EVERY_FORMAT)
    assert all(AiterQuantSpec(format=name).format == name for name in EVERY_FORMAT)
    assert set(FORMATS["gfx942"]) < set(EVERY_FORMAT)
    assert AiterQuantBackend.facts.architectures == FORMATS.keys()


@pytest.mark.parametrize("format_name", CALLS)
def test_each_format_asks_for_its_own_recipe(format_name: str) -> None:
    device = fake_device("gfx950", packages=AITER)
    query, key, value = (torch.randn(1, n, h, 128).bfloat16() for n, h in ((5, 4), (7, 2), (7, 2)))
    with (
        fake_kernels("AITER_QUANT_ATTN") as log,
        use_attention_config({"default": spec(format_name)}, platform=device, dtype="bfloat16"),
    ):
        layer = Attention(4, 128, num_kv_heads=2, role="self")
        output = layer(query, key, value)
    assert log.calls == [CALLS[format_name]]
    torch.testing.assert_close(output.double(), reference_attention(query, key, value)[0], atol=2e-2, rtol=0)


@pytest.mark.parametrize("device", ["gfx942", "gfx950"])
@pytest.mark.parametrize("format_name", CALLS)
def test_formats_are_judged_at_selection(device: str, format_name: str) -> None:
    machine = fake_device(device, packages=AITER)
    if format_name in FORMATS[device]:
        assert select(ask(), choose({"default": spec(format_name)}), machine).backend == "AITER_QUANT_ATTN"
        return
    with pytest.raises(BackendRejectedError) as caught:
        select(ask(), choose({"default": spec(format_name)}), machine)
    text = str(caught.value)
    assert all(part in text for part in ("aiter_quant.format", device, f"found {format_name}", "fp8, i8fp8"))


def test_no_block_means_fp8() -> None:
    assert AttentionSpec(backend="AITER_QUANT_ATTN").aiter_quant == AiterQuantSpec(format="fp8")
    with fake_kernels("AITER_QUANT_ATTN"):
        impl = AiterQuantBackend.get_impl_cls()(
            num_heads=1, num_kv_heads=1, head_size=128, softmax_scale=128**-0.5
        )
    assert impl.kernel.format == "fp8"


def test_an_unknown_format_is_a_mistake_in_the_configuration() -> None:
    with pytest.raises((ConfigError, ValueError), match="aiter_quant"):
        choose({"default": spec("int4")})


def test_it_is_never_a_default() -> None:
    for name in ("gfx942", "gfx950"):
        chosen = select(ask(), None, fake_device(name, packages=AITER))
        assert chosen.backend == "FLASH_ATTN"
        assert all(verdict.backend != "AITER_QUANT_ATTN" for verdict in chosen.verdicts)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"attn_mask": torch.tensor([[True, False, True]])}, "attn_mask"),
        ({"cu_seqlens_q": (0, 1, 3)}, "cu_seqlens_q"),
    ],
)
def test_masks_and_packing_are_refused_with_a_way_out(fields: dict[str, Any], name: str) -> None:
    builder = AiterQuantBackend.get_builder_cls()(
        num_heads=1, num_kv_heads=1, head_size=128, softmax_scale=128**-0.5
    )
    with pytest.raises(MetadataError, match=f"AITER_QUANT_ATTN cannot honour {name}.*TORCH_SDPA"):
        builder.build(AttentionMetadata(**fields), (3, 3))


# --- versions of aiter


def no_kernel(*_: Any, **__: Any) -> None:
    raise AssertionError("never called")


def symbols(**more: Any) -> dict[str, Any]:
    native = AttentionFormat.FP8_E4M3_FNUZ
    usual = {"mha_v4": no_kernel, "AttentionFormat": AttentionFormat, "native_fp8_format": lambda: native}
    return {**usual, **more}


def test_fp8_is_the_encoding_of_the_gpu() -> None:
    with fake_package("aiter.ops.mha_v4", **symbols()):
        assert import_quant_kernel("fp8").operands == (AttentionFormat.FP8_E4M3_FNUZ,) * 3


def test_mxfp8_goes_by_scale_modes_where_there_is_no_function_for_it() -> None:
    calls = []

    def mha_v4(
        q: Any,
        k: Any,
        v: Any,
        q_format: Any,
        k_format: Any,
        v_format: Any,
        *,
        q_scale_mode: Any,
        k_scale_mode: Any,
        v_scale_mode: Any,
    ) -> torch.Tensor:
        calls.append((q_scale_mode, k_scale_mode, v_scale_mode))
        return torch.zeros(())

    class Modes:
        E8M0_PER_1X32 = "by 32"
        F32_PER_TENSOR = "by tensor"

    with fake_package("aiter.ops.mha_v4", **symbols(mha_v4=mha_v4, AttentionScaleMode=Modes)):
        kernel = import_quant_kernel("mxfp8")
    kernel(*(torch.zeros(1, 1, 1, 128) for _ in range(3)))
    assert calls == [("by 32", "by 32", "by tensor")]


def test_mxfp8_of_a_version_that_cannot_be_asked_is_an_import_error() -> None:
    class Modes:
        E8M0_PER_1X32 = F32_PER_TENSOR = 0

    def old(q: Any, k: Any, v: Any, q_format: Any, k_format: Any, v_format: Any) -> None:
        raise AssertionError("never called")

    with (
        fake_package("aiter.ops.mha_v4", **symbols(mha_v4=old, AttentionScaleMode=Modes)),
        pytest.raises(BackendImportError, match=r"takes no q_scale_mode.*amd-aiter"),
    ):
        import_quant_kernel("mxfp8")


def test_a_format_that_this_version_does_not_know_is_an_import_error() -> None:
    class Formats:
        BF16 = 2

    with fake_package("aiter.ops.mha_v4", **symbols(AttentionFormat=Formats)):
        assert import_quant_kernel("bf16").operands == (2, 2, 2)
        with pytest.raises(BackendImportError, match=r"has no MXFP4, which format mxfp4 needs.*amd-aiter"):
            import_quant_kernel("mxfp4")


def test_an_aiter_without_mha_v4_is_told_apart_from_none() -> None:
    with (
        fake_package("aiter"),
        pytest.raises(BackendImportError, match=r"installed without module aiter\.ops"),
    ):
        import_quant_kernel("fp8")
    with pytest.raises(BackendImportError, match="is not installed"):
        import_quant_kernel("fp8")
