"""The inference contract of a distilled checkpoint: read, held to itself and to the schedulers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from omni_attn.errors import ConfigError
from omni_attn.models.minimax_h3.contract import (
    CONTRACT_FILE,
    FASTH3_PREVIEW,
    InferenceContract,
    read_contract,
)

VALUES: dict[str, Any] = {
    "schema_version": "fasth3-inference-contract-v1",
    "model_id": "FastVideo/FastVideo-FastH3-8-Step-V2",
    "task": "t2av",
    "dmd_denoising_steps": [999, 874, 749, 624, 500, 375, 250, 125],
    "num_inference_steps": 9,
    "transformer_forwards": 8,
    "video_scheduler_shift": 10.0,
    "audio_scheduler_shift": 3.0,
    "guidance_scale": 1.0,
    "vsa_sparsity": 0.8,
    "vsa_tile_size": 64,
}

CONTRACT = InferenceContract(
    dmd_denoising_steps=(999, 874, 749, 624, 500, 375, 250, 125),
    video_scheduler_shift=10.0,
    audio_scheduler_shift=3.0,
    vsa_sparsity=0.8,
    vsa_tile_size=64,
    task="t2av",
)


def test_the_published_contract(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / CONTRACT_FILE).write_text(json.dumps(VALUES))
    contract = read_contract(tmp_path)
    assert contract == CONTRACT
    assert contract.base_grid == (0.999, 0.874, 0.749, 0.624, 0.5, 0.375, 0.25, 0.125, 0.0)
    assert (contract.num_inference_steps, contract.transformer_forwards) == (9, 8)
    assert not caplog.records


def test_the_preview_shifted_as_published() -> None:
    """sigma = s u / (1 + (s - 1) u), of video."""
    sigmas = [12 * u / (1 + 11 * u) for u in FASTH3_PREVIEW.base_grid]
    assert sigmas == pytest.approx([0.99992, 0.97283, 0.92308, 0.8, 0], abs=1e-5)
    assert FASTH3_PREVIEW.transformer_forwards == 4


def test_a_folder_without_the_file_is_not_distilled(tmp_path: Path) -> None:
    assert read_contract(tmp_path) is None


def test_only_the_ladder_is_needed() -> None:
    contract = InferenceContract.from_dict(
        {"schema_version": VALUES["schema_version"], "dmd_denoising_steps": [999, 500]}
    )
    assert contract == InferenceContract(dmd_denoising_steps=(999, 500))
    contract.check_shifts(12, 3, source="here")


def test_unknown_keys_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        InferenceContract.from_dict(VALUES | {"eta": 0.5}, source="there")
    assert [record.getMessage() for record in caplog.records] == ["there: keys that are not read here: eta"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"schema_version": "v2"}, "schema_version is 'v2', and 'fasth3-inference-contract-v1'"),
        ({"pdd_steps": 32}, "pdd_steps is 32: a student with that many output heads"),
        ({"dmd_denoising_steps": None}, "dmd_denoising_steps is None, and must be a list"),
        ({"dmd_denoising_steps": []}, r"dmd_denoising_steps is \(\), and must be descending integers"),
        ({"dmd_denoising_steps": [500, 999]}, "descending integers from 1000 to 1"),
        ({"dmd_denoising_steps": [500, 500]}, "descending"),
        ({"dmd_denoising_steps": [1001, 500]}, "descending"),
        ({"dmd_denoising_steps": [500, 0]}, "descending"),
        ({"dmd_denoising_steps": [999.0, True]}, "descending"),
        ({"num_inference_steps": 8}, "num_inference_steps is 8, and 8 rungs without guidance need 9"),
        ({"transformer_forwards": 9}, "transformer_forwards is 9, and 8 rungs without guidance need 8"),
        ({"guidance_scale": 5.0}, "guidance_scale is 5.0, and 8 rungs without guidance need 1"),
        ({"video_scheduler_shift": 0}, "video_scheduler_shift is 0, and must be a positive number"),
        ({"audio_scheduler_shift": float("inf")}, "audio_scheduler_shift is inf"),
        ({"vsa_sparsity": 1.0}, "vsa_sparsity is 1.0, and must be at least 0 and below 1"),
        ({"vsa_tile_size": "64"}, "vsa_tile_size is '64', and must be a positive integer"),
        ({"attention_backend": 3}, "attention_backend is 3, and must be a name"),
    ],
)
def test_what_contradicts_itself_is_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"there: (.* must be )?{text}"):
        InferenceContract.from_dict(VALUES | more, source="there")


def test_all_problems_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        InferenceContract.from_dict(VALUES | {"vsa_sparsity": -1, "vsa_tile_size": 0})
    assert len(caught.value.problems) == 2


def test_schedulers_of_another_shift_are_refused() -> None:
    CONTRACT.check_shifts(10.0, 3.0, source="here")
    with pytest.raises(
        ConfigError, match=r"here: .* wants a video shift of 10, and the video scheduler has 12"
    ) as caught:
        CONTRACT.check_shifts(12.0, 3.5, source="here")
    assert len(caught.value.problems) == 2
