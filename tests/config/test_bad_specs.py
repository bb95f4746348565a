"""Every bad value of a spec fails at parse, at the path that was written, with the words that explain it.

Removing any one validator of the package makes a row of these tables fail.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from omni_attn.config import AttentionConfig, AttentionSpec

NAN, INF = float("nan"), float("inf")


def trtllm(**options: Any) -> dict[str, Any]:
    return {"backend": "TRTLLM_ATTN", **options}


def vsa(**options: Any) -> dict[str, Any]:
    return {"backend": "FASTVIDEO_VSA", **options}


def rain(**options: Any) -> dict[str, Any]:
    return {"backend": "RAINFUSION_ATTN", "block_sparse": options}


def skip(**options: Any) -> dict[str, Any]:
    return trtllm(skip_softmax=options)


def quant(**options: Any) -> dict[str, Any]:
    return trtllm(quant=options)


BAD = [
    # the name
    ({"variant": "fa3"}, "backend", "Field required"),
    ({"backend": 3}, "backend", "named by text"),
    ({"backend": None}, "backend", "named by text"),
    ({"backend": ""}, "backend", "one word"),
    ({"backend": "FLASH ATTN"}, "backend", "one word"),
    ({"backend": "Auto", "variant": "fa3"}, "backend", "takes no options"),
    ({"backend": "FLASH_ATTN", "variant": 3}, "variant", "valid string"),
    ({"backend": "FLASH_ATTN", "variant": ""}, "variant", "one word"),
    ({"backend": "FLASH_ATTN", "variant": "fa 3"}, "variant", "one word"),
    ({"backend": "FLASH_ATTN", "varient": "fa3"}, "varient", "Did you mean 'variant'?"),
    ({"backend": "FLASH_ATTN", "zzz": 1}, "zzz", "Valid keys: backend, variant"),
    # ownership
    ({"backend": "FLASH_ATTN", "skip_softmax": {"threshold": 0.1}}, "skip_softmax", "supported by the TRTLLM"),
    ({"backend": "TORCH_SDPA", "quant": {}}, "quant", "TRTLLM_ATTN and FLASHINFER_ATTN"),
    ({"backend": "PLUGIN", "quant": {}}, "quant", "not by PLUGIN"),
    (vsa(block_sparse={}), "block_sparse", "RAINFUSION_ATTN and BLOCK_SUMMARY_ATTN"),
    (trtllm(fastvideo_vsa_topk=4), "fastvideo_vsa_topk", "FASTVIDEO_VSA backend, not by TRTLLM_ATTN"),
    (trtllm(fastvideo_vsa={}), "fastvideo_vsa", "supported by the FASTVIDEO_VSA"),
    (trtllm(aiter_quant={}), "aiter_quant", "supported by the AITER_QUANT_ATTN"),
    (trtllm(options={}), "options", "TRTLLM_ATTN is built in"),
    # quant
    (quant(dtype_qk="int4"), "quant.dtype_qk", "fp8_e4m3"),
    (quant(dtype_vo="fp8"), "quant.dtype_vo", "fp8_e4m3"),
    (quant(q_block_size=0), "quant.q_block_size", "1, 4 or 16"),
    (quant(q_block_size=True), "quant.q_block_size", "whole number"),
    (quant(k_block_size=8), "quant.k_block_size", "1, 4 or 16"),
    (quant(k_block_size=4.0), "quant.k_block_size", "whole number"),
    (quant(k_block_size="4"), "quant.k_block_size", "whole number"),
    (quant(block_size=4), "quant.block_size", "Did you mean 'q_block_size'?"),
    (quant(flashinfer_backend=2), "quant.flashinfer_backend", "valid string"),
    (trtllm(variant="fa3", quant={"flashinfer_backend": "fa2"}), "quant", "differs from variant 'fa3'"),
    # skip_softmax
    (skip(threshold=0.1, target_sparsity=0.5), "skip_softmax", "either threshold or target_sparsity"),
    (skip(), "skip_softmax", "either threshold or target_sparsity"),
    (skip(disabled_until_timestep=0.5), "skip_softmax", "either threshold or target_sparsity"),
    (skip(threshold=-0.1), "skip_softmax.threshold", "finite and in"),
    (skip(threshold=INF), "skip_softmax.threshold", "finite and in"),
    (skip(threshold=True), "skip_softmax.threshold", "valid number"),
    (skip(target_sparsity=-0.1), "skip_softmax.target_sparsity", "finite and in [0, 1]"),
    (skip(target_sparsity=1.5), "skip_softmax.target_sparsity", "finite and in [0, 1]"),
    (skip(target_sparsity=NAN), "skip_softmax.target_sparsity", "finite and in [0, 1]"),
    (skip(target_sparsity="0.5"), "skip_softmax.target_sparsity", "valid number"),
    (skip(threshold=0.1, disabled_until_timestep=1.1), "skip_softmax.disabled_until_timestep", "finite and in"),
    # block_sparse
    (rain(sparsity=-0.1), "block_sparse.sparsity", "finite and in [0, 1]"),
    (rain(sparsity=1.5), "block_sparse.sparsity", "finite and in [0, 1]"),
    (rain(sparsity=NAN), "block_sparse.sparsity", "finite and in [0, 1]"),
    (rain(start_step=-1), "block_sparse.start_step", "greater than or equal to 0"),
    (rain(end_step=-1), "block_sparse.end_step", "greater than or equal to 0"),
    (rain(end_step=1.0), "block_sparse.end_step", "valid integer"),
    (rain(precision="bogus"), "block_sparse.precision", "'bf16', 'fp8' or 'mix'"),
    (rain(skip_layers="3-1"), "block_sparse.skip_layers", "reversed range"),
    (rain(skip_layers="-1"), "block_sparse.skip_layers", "numbers and ranges"),
    (rain(skip_layers="a"), "block_sparse.skip_layers", "numbers and ranges"),
    (rain(skip_layers="1-2-3"), "block_sparse.skip_layers", "numbers and ranges"),
    (rain(skip_layers=[1, -1]), "block_sparse.skip_layers", "from 0 on"),
    (rain(skip_layers=[True]), "block_sparse.skip_layers", "from 0 on"),
    (rain(skip_layers=[1.0]), "block_sparse.skip_layers", "from 0 on"),
    (rain(skip_layers=["1"]), "block_sparse.skip_layers", "from 0 on"),
    (rain(skip_layers={"1": 2}), "block_sparse.skip_layers", "from 0 on"),
    # fastvideo_vsa
    *[
        (vsa(fastvideo_vsa_topk=topk), "fastvideo_vsa_topk", "")
        for topk in (0, -1, 1.5, 64.0, "64", True, NAN, [64])
    ],
    *[(vsa(fastvideo_vsa={"topk": topk}), "fastvideo_vsa.topk", "") for topk in (0, -1, 1.5, "64", True)],
    (vsa(fastvideo_vsa={"sparsity": 1.5}), "fastvideo_vsa.sparsity", "finite and in [0, 1]"),
    (vsa(fastvideo_vsa={"topk": 4, "sparsity": 0.5}), "fastvideo_vsa", "either topk or sparsity"),
    (vsa(fastvideo_vsa_topk=4, fastvideo_vsa={"sparsity": 0.5}), "fastvideo_vsa", "or sparsity 0.5"),
    (vsa(fastvideo_vsa_topk=4, fastvideo_vsa={"topk": 5}), "fastvideo_vsa", "topk 5 differs"),
    (vsa(fastvideo_vsa={"tile_size": [4, 4]}), "fastvideo_vsa.tile_size.2", "required"),
    (vsa(fastvideo_vsa={"tile_size": [4, 0, 4]}), "fastvideo_vsa.tile_size.1", "greater than or equal to 1"),
    (vsa(fastvideo_vsa={"tile_size": {4, 5, 6}}), "fastvideo_vsa.tile_size", "must be a list"),
    (vsa(fastvideo_vsa={"tile_size": 4}), "fastvideo_vsa.tile_size", "must be a list"),
    (vsa(fastvideo_vsa={"coarse_weight": "two"}), "fastvideo_vsa.coarse_weight", "'gate' or 'one'"),
    (vsa(variant="fa4", fastvideo_vsa={"provider": "flex"}), "fastvideo_vsa", "differs from variant 'fa4'"),
    # aiter_quant
    ({"backend": "AITER_QUANT_ATTN", "aiter_quant": {"format": "int4"}}, "aiter_quant.format", "'fp8'"),
    # fallback
    (trtllm(fallback="TORCH_SDPA"), "fallback", "must be a list"),
    (trtllm(fallback=["auto"]), "fallback.0.backend", "not set here"),
    (trtllm(fallback=["SDPA", 3]), "fallback.1", "valid dictionary"),
    (trtllm(fallback=["SDPA", {"backend": "trtllm"}]), "fallback.1", "TRTLLM_ATTN itself"),
    (trtllm(fallback=[{"backend": "FLASH_ATTN", "fallback": ["SDPA"]}]), "fallback.0.fallback", "one flat list"),
    (
        {"backend": "FLASHINFER", "quant": {"flashinfer_backend": "fa2"}, "fallback": [
            {"backend": "FLASHINFER_ATTN", "variant": "fa2"}
        ]},
        "fallback.0",
        "FLASHINFER_ATTN itself",
    ),
    # options of a plugin
    ({"backend": "PLUGIN", "options": {"a": NAN}}, "options", "finite"),
    ({"backend": "PLUGIN", "options": {"a": [{"b": {1, 2}}]}}, "options", "values are text"),
    ({"backend": "PLUGIN", "options": {"a": {1: 2}}}, "options", "keys must be text"),
    ({"backend": "PLUGIN", "options": [1]}, "options", "valid dictionary"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "path", "words"), BAD, ids=lambda value: str(value)[:60])
def test_bad_value(spec: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ValidationError) as alone:
        AttentionSpec.model_validate(spec)
    assert words in str(alone.value)
    for config, place in (
        ({"default": spec}, "default"),
        ({"per_role": {"self": spec}}, "per_role.self"),
        ({"per_role": {"ltx2": {"video.self": spec}}}, "per_role.ltx2.video.self"),
    ):
        with pytest.raises(ValidationError) as error:
            AttentionConfig.model_validate(config)
        (line,) = error.value.errors()
        assert ".".join(map(str, line["loc"])) == f"{place}.{path}"
        assert words in line["msg"]


@pytest.mark.parametrize("spec", [{"backend": name} for name in ("TORCH_SDPA", "SPARSE_BLOCK", "anything")])
def test_any_one_word_is_a_legal_name(spec: dict[str, Any]) -> None:
    assert AttentionSpec.model_validate(spec).backend == spec["backend"].upper()


def test_all_problems_of_a_config_come_together() -> None:
    with pytest.raises(ValidationError) as error:
        AttentionConfig.model_validate(
            {
                "defualt": "SDPA",
                "default": trtllm(
                    quant={"dtype_qk": "int4", "q_block_size": 2}, skip_softmax={"treshold": 1}
                ),
                "per_role": {"self": {"backend": "SDPA", "quant": {}}, "a": {"b": {"c": {"backend": 3}}}},
            }
        )
    assert {".".join(map(str, line["loc"])) for line in error.value.errors()} == {
        "defualt",
        "default.quant.dtype_qk",
        "default.quant.q_block_size",
        "default.skip_softmax.treshold",
        "per_role.self.quant",
        "per_role.a.b.c.backend",
    }
