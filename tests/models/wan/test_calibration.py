"""target_sparsity on Wan: curves from the checkpoint's folders, per expert; and what is said where there is none."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_attn import Attention, use_attention_config
from omni_attn.calibration import SkipSoftmaxCurve, read_calibration
from omni_attn.config import PipelineConfig
from omni_attn.errors import ConfigError
from omni_attn.models import calibration as module
from omni_attn.models.calibration import read_calibrations
from omni_attn.models.wan.family import build_meta_model, run
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.pipeline import Wan22Pipeline
from omni_attn.testing import fake_device, fake_kernels
from omni_attn.testing.standins.log import CallLog
from tests.models.wan.tiny_checkpoints import LATENT, TRANSFORMERS, Z, build_pipeline, build_scheduler
from tests.models.wan.tiny_models import BASE

B200 = fake_device("sm_100", packages={"flashinfer-python": "0.6.18"}, cudnn=91900)
SPARSE = {"backend": "TRTLLM_ATTN", "skip_softmax": {"target_sparsity": 0.5}}
GATED = {"backend": "TRTLLM_ATTN", "skip_softmax": {"target_sparsity": 0.5, "disabled_until_timestep": 0.8}}


def section(a: float, **group: Any) -> dict[str, Any]:
    scale = {"formula": "a * exp(b * target_sparsity)", "coefficients": {"a": a, "b": 2.0}}
    whole = {"algorithm": "skip_softmax", "threshold_scale_factor": scale, **group}
    return {"sparse_attention_config": {"config_groups": {"group_0": whole}}}


def write_section(folder: Path, component: str, **values: Any) -> None:
    path = folder / component / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline of two experts with heads of 128 channels."""
    wide = {"num_attention_heads": 1, "attention_head_dim": 128, "num_layers": 2}
    monkeypatch.setattr("tests.models.wan.tiny_checkpoints.BASE", BASE | wide)
    assert "t2v" in TRANSFORMERS
    build_pipeline("two_experts").save_pretrained(tmp_path / "checkpoint")
    monkeypatch.setattr(module, "_logged", set())
    return tmp_path / "checkpoint"


def configure(model: Path | str, self_spec: Any = SPARSE) -> PipelineConfig:
    size = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 4}
    attention = {"per_role": {"self": self_spec, "cross": "TRTLLM_ATTN"}}
    return PipelineConfig.model_validate(
        {"pipeline": "wan", "model": str(model), "attention": attention, "generation": size}
    )


@contextmanager
def kernels(self_spec: Any = SPARSE) -> Iterator[CallLog]:
    scope = use_attention_config(
        {"per_role": {"self": self_spec, "cross": "TRTLLM_ATTN"}}, platform=B200, dtype="bfloat16"
    )
    with fake_kernels("TRTLLM_ATTN", "ragged") as log, scope:
        yield log


def calibrations(model: torch.nn.Module) -> dict[str, object]:
    return {
        name: layer._routes[0].builder.calibration
        for name, layer in model.named_modules()
        if isinstance(layer, Attention) and layer.role == "self"
    }


def test_each_expert_gets_its_own_curve_and_ignored_layers_none(folder: Path) -> None:
    write_section(folder, "transformer", **section(100.0, ignore=["blocks.0.attn1"]))
    write_section(folder, "transformer_2", **section(200.0))
    with kernels():
        found = calibrations(build_meta_model(configure(folder)))
    assert found == {
        "transformer.blocks.0.attn1.attention": "dense",
        "transformer.blocks.1.attn1.attention": SkipSoftmaxCurve(100.0, 2.0),
        "transformer_2.blocks.0.attn1.attention": SkipSoftmaxCurve(200.0, 2.0),
        "transformer_2.blocks.1.attn1.attention": SkipSoftmaxCurve(200.0, 2.0),
    }


def test_a_transformer_loaded_alone_is_calibrated_too(folder: Path) -> None:
    write_section(folder, "transformer", **section(100.0, ignore=["blocks.1"]))
    with kernels():
        found = calibrations(WanModel.from_pretrained(folder / "transformer", dtype="bfloat16"))
    assert list(found.values()) == [SkipSoftmaxCurve(100.0, 2.0), "dense"]


def test_an_expert_without_calibration_stays_dense_with_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_section(folder, "transformer", **section(100.0))
    with kernels(), caplog.at_level(logging.WARNING, "omni_attn"):
        found = [calibrations(build_meta_model(configure(folder))) for _ in range(2)][-1]
    assert [v for name, v in found.items() if name.startswith("transformer_2.")] == ["dense", "dense"]
    assert sum("transformer_2" in record.getMessage() for record in caplog.records) == 1


def test_a_secondary_file_that_cannot_be_read_counts_as_none(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_section(folder, "transformer", **section(100.0))
    (folder / "transformer_2" / "config.json").write_text("{ not json")
    with caplog.at_level(logging.WARNING, "omni_attn"):
        found = read_calibrations(folder, ("transformer", "transformer_2"))
    assert found["transformer"] is not None and found["transformer_2"] is None
    assert sum("transformer_2" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(ConfigError, match="not JSON"):
        read_calibrations(folder, ("transformer_2", "transformer"))


@pytest.mark.parametrize("component", ["transformer", "transformer_2"])
def test_another_formula_is_a_start_up_error(folder: Path, component: str) -> None:
    write_section(folder, "transformer", **section(100.0))
    other = section(1.0, threshold_scale_factor={"formula": "a + b", "coefficients": {"a": 1, "b": 1}})
    write_section(folder, component, **other)
    with kernels(), pytest.raises(ConfigError, match=rf"{component}.config\.json.*a \+ b"):
        build_meta_model(configure(folder))


@pytest.mark.parametrize("model", ["folder", "wan2.1-t2v-1.3b"])
def test_no_calibration_at_all_is_an_error_before_any_weight(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_attn.models.wan.family._load_weights", lambda *_: pytest.fail("too late"))
    config = configure(folder if model == "folder" else model)
    monkeypatch.setattr("omni_attn.models.wan.family.resolve_device", lambda _: torch.device("cpu"))
    real = use_attention_config
    monkeypatch.setattr(
        "omni_attn.models.wan.family.use_attention_config",
        lambda config, *, lengths, **_: real(config, platform=B200, dtype="bfloat16", lengths=lengths),
    )
    with fake_kernels("TRTLLM_ATTN", "ragged"), pytest.raises(ConfigError) as caught:
        run(config)
    for word in ('"self"', "target_sparsity", "0.5", "sparse_attention_config", "threshold"):
        assert word in str(caught.value)


def test_a_threshold_needs_no_calibration(folder: Path) -> None:
    spec = {"backend": "TRTLLM_ATTN", "skip_softmax": {"threshold": 0.05}}
    with kernels(spec):
        assert set(calibrations(build_meta_model(configure(folder, spec))).values()) == {None}


def test_the_loop_opens_the_gate_step_by_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noisy steps are dense; from sigma 0.8 on each expert runs with its own factor."""
    write_section(folder, "transformer", **section(100.0))
    write_section(folder, "transformer_2", **section(200.0))
    seen: list[tuple[float, str]] = []
    from omni_attn.models.wan import pipeline as loop

    real = loop.prepare_attention

    def prepare(model: Any, records: Any, lengths: Any) -> None:
        real(model, records, lengths=lengths)
        seen.append((records["self"].sigma, model.blocks[0].attn1.attention.route))

    monkeypatch.setattr(loop, "prepare_attention", prepare)
    from tests.models.wan.test_pipeline import noise, prompts

    with kernels(GATED):
        experts = [
            WanModel.from_pretrained(folder / name, dtype="bfloat16")
            for name in ("transformer", "transformer_2")
        ]
        pipeline = Wan22Pipeline(experts[0], build_scheduler(1.0), experts[1], boundary_ratio=0.5)
        pipeline(prompts(), noise(1, Z, *LATENT), num_inference_steps=8)
    factors = {sigma: route.partition(": ")[2] for sigma, route in seen}
    assert {r for s, r in factors.items() if s > 0.8} == {"dense: timestep gate"}
    assert {r for s, r in factors.items() if 0.55 < s <= 0.8} == {"skip-softmax factor 271.828"}
    assert {r for s, r in factors.items() if s < 0.45} == {"skip-softmax factor 543.656"}


def test_the_file_of_a_calibrated_checkpoint_is_a_wan_config(folder: Path) -> None:
    write_section(folder, "transformer", **section(100.0))
    values = json.loads((folder / "transformer" / "config.json").read_text())
    assert read_calibration(values) is not None
    with kernels("TRTLLM_ATTN"):
        WanModel.from_pretrained(folder / "transformer", dtype="bfloat16")
