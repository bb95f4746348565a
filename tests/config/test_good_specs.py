"""What a valid spec becomes: defaults, accepted spellings, frozen and hashable values."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from pydantic import ValidationError

from omni_attn.config import (
    AiterQuantSpec,
    AttentionSpec,
    BlockSparseSpec,
    FastVideoVSASpec,
    QuantSpec,
    SkipSoftmaxSpec,
)


def spec(backend: str, **options: Any) -> AttentionSpec:
    return AttentionSpec.model_validate({"backend": backend, **options})


class Precision(enum.Enum):
    MIX = "mix"


class TextPrecision(enum.StrEnum):
    MIX = "mix"


class Backend(enum.Enum):
    FLASH_ATTN = "somewhere.flash:Backend"


def test_a_name_alone_is_a_spec() -> None:
    assert AttentionSpec.model_validate("sdpa") == spec("TORCH_SDPA")
    assert spec("TORCH_SDPA").skip_softmax is None


def test_an_enum_member_is_its_public_name() -> None:
    assert AttentionSpec(backend=Backend.FLASH_ATTN).backend == "FLASH_ATTN"  # type: ignore[arg-type]


@pytest.mark.parametrize("member", [Precision.MIX, TextPrecision.MIX])
def test_an_enum_member_becomes_plain_text(member: enum.Enum) -> None:
    block = spec("RAINFUSION_ATTN", block_sparse={"precision": member}).block_sparse
    assert block is not None
    assert type(block.precision) is str
    assert block.precision == "mix"


@pytest.mark.parametrize(
    ("backend", "block", "default"),
    [
        ("RAINFUSION_ATTN", "block_sparse", BlockSparseSpec(sparsity=0.8)),
        ("BLOCK_SUMMARY_ATTN", "block_sparse", BlockSparseSpec(sparsity=0.8)),
        ("AITER_QUANT_ATTN", "aiter_quant", AiterQuantSpec(format="fp8")),
        ("FASTVIDEO_VSA", "fastvideo_vsa", FastVideoVSASpec(topk=64)),
        ("TRTLLM_ATTN", "quant", None),
        ("TRTLLM_ATTN", "skip_softmax", None),
        ("TORCH_SDPA", "block_sparse", None),
        ("TORCH_SDPA", "fastvideo_vsa_topk", None),
    ],
)
def test_choosing_the_backend_opts_in_to_its_block(backend: str, block: str, default: Any) -> None:
    assert getattr(spec(backend), block) == default
    assert getattr(spec(backend, **{block: None}), block) == default


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (spec("flash_attn", variant="FA3"), spec("FLASH_ATTN", variant="fa3")),
        (spec("FLASH_ATTN", variant="Auto"), spec("FLASH_ATTN")),
        (spec("VSA", fastvideo_vsa_topk=96), spec("VSA", fastvideo_vsa={"topk": 96})),
        (spec("VSA", fastvideo_vsa_topk=96, fastvideo_vsa={"topk": 96}), spec("VSA", fastvideo_vsa_topk=96)),
        (spec("VSA", fastvideo_vsa_topk=64), spec("VSA")),
        (spec("VSA", fastvideo_vsa_topk=9, fastvideo_vsa=FastVideoVSASpec()), spec("VSA", fastvideo_vsa_topk=9)),
        (spec("VSA", fastvideo_vsa={"topk": None, "sparsity": None}), spec("VSA")),
        (spec("VSA", fastvideo_vsa={"provider": "FA4"}), spec("VSA", variant="fa4")),
        (spec("VSA", fastvideo_vsa={"provider": "fa4"}, variant="fa4"), spec("VSA", variant="fa4")),
        (spec("VSA", fastvideo_vsa={"provider": "auto"}), spec("VSA")),
        (spec("VSA", fastvideo_vsa={"provider": "auto"}, variant="flex"), spec("VSA", variant="flex")),
        (spec("FLASHINFER", quant={"flashinfer_backend": "fa2"}), spec("FLASHINFER", variant="fa2")),
        (spec("FLASHINFER", quant={"flashinfer_backend": "auto"}), spec("FLASHINFER")),
        (
            spec("FLASHINFER", quant={"flashinfer_backend": "fa2", "dtype_vo": "fp8_e4m3"}),
            spec("FLASHINFER", variant="fa2", quant={"dtype_vo": "fp8_e4m3"}),
        ),
        (
            spec("AITER_QUANT_ATTN", aiter_quant={"format": "MXFP4"}),
            spec("AITER_QUANT_ATTN", aiter_quant=AiterQuantSpec(format="mxfp4")),
        ),
        (spec("VSA", fastvideo_vsa={"tile_size": [4, 8, 8]}), spec("VSA", fastvideo_vsa={"tile_size": (4, 8, 8)})),
        (spec("VSA", fastvideo_vsa={"sparsity": 1}), spec("VSA", fastvideo_vsa={"sparsity": 1.0})),
        (spec("X", fallback=["sdpa"]), spec("X", fallback=(spec("TORCH_SDPA"),))),
        (spec("X", options={"a": [1, {"b": 2}]}), spec("X", options={"a": (1, {"b": 2})})),
    ],
)  # fmt: skip
def test_two_spellings_are_one_spec(one: AttentionSpec, other: AttentionSpec) -> None:
    assert one == other
    assert hash(one) == hash(other)
    assert one.model_dump() == other.model_dump()
    assert "fastvideo_vsa_topk" not in one.model_dump()
    for exclude_unset in (False, True):
        assert AttentionSpec.model_validate(one.model_dump(exclude_unset=exclude_unset)) == one
        assert AttentionSpec.model_validate_json(one.model_dump_json(exclude_unset=exclude_unset)) == one


def test_the_short_topk_reads_as_the_number_in_force() -> None:
    assert spec("VSA").fastvideo_vsa_topk == 64
    assert spec("VSA", fastvideo_vsa={"topk": 7}).fastvideo_vsa_topk == 7
    assert spec("VSA", fastvideo_vsa={"sparsity": 0.9}).fastvideo_vsa_topk is None


def test_moved_keys_are_gone_from_their_block() -> None:
    vsa = spec("VSA", fastvideo_vsa={"provider": "fa4"})
    assert vsa.fastvideo_vsa == FastVideoVSASpec(topk=64)
    assert "provider" not in vsa.model_dump()["fastvideo_vsa"]
    assert spec("FLASHINFER", quant={"flashinfer_backend": "fa2"}).quant is None
    quantised = spec("FLASHINFER", quant={"flashinfer_backend": "fa2", "k_block_size": 4}).quant
    assert quantised == QuantSpec(k_block_size=4)


def test_quant_and_skip_softmax_live_together() -> None:
    both = spec("trtllm", quant={"dtype_qk": "int8"}, skip_softmax={"target_sparsity": 0.5})
    assert both.quant == QuantSpec(dtype_qk="int8", q_block_size=1, k_block_size=16)
    assert both.skip_softmax == SkipSoftmaxSpec(target_sparsity=0.5, disabled_until_timestep=0.0)


@pytest.mark.parametrize("sparsity", [0, 1, 0.5])
def test_ends_of_a_range_belong_to_it(sparsity: float) -> None:
    block = spec("VSA", fastvideo_vsa={"sparsity": sparsity}).fastvideo_vsa
    assert block is not None
    assert (block.sparsity, block.topk) == (sparsity, None)
    assert SkipSoftmaxSpec(threshold=0).threshold == 0


@pytest.mark.parametrize(
    ("written", "layers"),
    [
        ("0-2,38", (0, 1, 2, 38)),
        (" 5 , 3 - 4,,5 ", (3, 4, 5)),
        ("", ()),
        (None, ()),
        (7, (7,)),
        ([2, 0, 2], (0, 2)),
        ((3,), (3,)),
        ({9, 1}, (1, 9)),
        (frozenset({4}), (4,)),
    ],
)
def test_skip_layers(written: Any, layers: tuple[int, ...]) -> None:
    assert BlockSparseSpec(skip_layers=written).skip_layers == layers


def test_the_same_backend_in_another_variant_is_a_fallback() -> None:
    chain = spec("FLASH_ATTN", variant="fa3", fallback=[{"backend": "flash_attn", "variant": "fa2"}, "sdpa"])
    assert [(step.backend, step.variant) for step in chain.fallback] == [
        ("FLASH_ATTN", "fa2"),
        ("TORCH_SDPA", None),
    ]


def test_specs_and_their_options_are_frozen() -> None:
    options = {"a": [1]}
    plugin = spec("PLUGIN", options=options)
    options["a"].append(2)
    assert plugin.options == {"a": (1,)}
    assert plugin in {plugin}
    with pytest.raises(ValidationError, match="frozen"):
        plugin.variant = "x"
    with pytest.raises(TypeError):
        plugin.options["a"] = 2  # type: ignore[index]


def test_an_instance_passes_unchanged() -> None:
    made = spec("VSA", fastvideo_vsa_topk=5, fallback=["sdpa"])
    before = (hash(made), set(made.model_fields_set), made.model_dump())
    assert AttentionSpec.model_validate(made) is made
    assert (hash(made), made.model_fields_set, made.model_dump()) == before
