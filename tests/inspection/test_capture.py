"""The call that is caught is the one that was asked for; what cannot be looked at is refused, early where it can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from omni_attn.backends.abstract import AttentionImpl
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.registry import load_backend, registered_names
from omni_attn.config import AttentionConfig, PipelineConfig
from omni_attn.errors import ConfigError
from omni_attn.inspection.capture import capture
from omni_attn.inspection.inspection import inspect_pipeline
from omni_attn.inspection.target import Target, check_target, layers_of
from omni_attn.layer import Attention
from omni_attn.models import get_family
from omni_attn.models.wan import family
from omni_attn.platforms import current_omni_platform
from omni_attn.selector import use_attention_config
from tests.inspection.stubs import TILED
from tests.selection.stubs import registered


def config_of(
    tmp_path: Path, backend: str = "TILED_TEST", *, fallback: Sequence[str] = (), **options: Any
) -> PipelineConfig:
    spec = {"backend": backend, "fallback": fallback, **({"options": options} if options else {})}
    return PipelineConfig.model_validate(
        {
            "pipeline": "wan",
            "model": "wan-tiny",
            "attention": {"per_role": {"self": spec}},
            "generation": {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 3},
            "device": "cpu",
            "output": str(tmp_path / "out"),
        }
    )


@pytest.fixture(autouse=True)
def _tiled() -> Iterator[None]:
    with registered(TILED):
        yield


def test_the_call_is_that_of_a_whole_run(tmp_path: Path) -> None:
    config, target = config_of(tmp_path), Target(step=1, layer=2)
    seen: list[tuple[Any, ...]] = []
    ready = get_family("wan").prepare(config)
    (layer,) = layers_of(ready.model, target).values()
    layer.register_forward_hook(
        lambda _, given, output: (
            seen.append((given[3].step, *given[:3], output)) if given[3].step == 1 else None
        )
    )
    ready.denoise()
    assert len(seen) == 2  # with the prompt, and with the negative one

    call, notes = capture(config, target)
    assert (call.record.step, call.record.num_steps) == (1, 3)
    assert call.name.startswith("transformer.blocks.2.")
    for found, expected in zip((call.query, call.key, call.value, call.output), seen[0][1:], strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(call.query, seen[1][1])
    assert any("seeded" in note for note in notes)
    assert not call.layer._forward_hooks
    with torch.inference_mode():
        assert torch.equal(call.layer(call.query, call.key, call.value, call.record), call.output)


def test_nothing_runs_behind_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    forward = Attention.forward

    def counted(layer: Attention, *arguments: Any, **named: Any) -> torch.Tensor:
        calls.append(layer.role)
        return forward(layer, *arguments, **named)

    monkeypatch.setattr(Attention, "forward", counted)
    capture(config_of(tmp_path), Target(step=0, layer=1))
    assert calls == ["self", "cross", "self"]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (Target(3, 0), r"--step 3: wan-tiny is denoised in 3 steps here, numbered from 0 to 2"),
        (Target(0, 4), r"--layer 4: this model has 4 attention layers of role 'self', numbered from 0 to 3"),
        (
            Target(0, 0, "slef"),
            r"--role 'slef': no attention layer .* Did you mean 'self'\? Roles: cross, self",
        ),
        (
            Target(0, 0, "cross"),
            r'role "cross": TORCH_SDPA \(platform default\) selects no blocks: .* can run this',
        ),
    ],
)
def test_mistakes_come_before_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target, text: str
) -> None:
    monkeypatch.setattr(family, "_load_weights", None)
    with pytest.raises(ConfigError, match=text):
        inspect_pipeline(config_of(tmp_path), target)
    assert not (tmp_path / "out").exists()


def test_a_dense_choice_names_the_sparse_ones(tmp_path: Path) -> None:
    text = r"TORCH_SDPA \(per_role\['self'\]\) selects no blocks: .* Choose one that does: .*TILED_TEST"
    with pytest.raises(ConfigError, match=text):
        check_target(config_of(tmp_path, "TORCH_SDPA"), Target(0, 0))


def test_a_dense_step_tells_its_route(tmp_path: Path) -> None:
    config = config_of(tmp_path, dense_from=1)
    assert inspect_pipeline(config, Target(0, 0), rounds=1).total.tiles < 1
    with pytest.raises(ConfigError, match=r"--step 1 --layer 0: this call is dense, .* TILED_TEST: DENSE"):
        inspect_pipeline(config, Target(1, 0), rounds=1)


def test_a_fallback_that_was_taken_is_told(tmp_path: Path) -> None:
    config = config_of(tmp_path, fallback=["TORCH_SDPA"], refused_from=1)
    with pytest.raises(
        ConfigError, match=r"--step 2 --layer 0: ran TORCH_SDPA, a fallback.*no step from 1 on"
    ):
        inspect_pipeline(config, Target(2, 0), rounds=1)


def test_an_all_block_step_is_said_to_be_dense(tmp_path: Path) -> None:
    found = inspect_pipeline(config_of(tmp_path, topk=1000), Target(0, 1), rounds=1)
    assert found.total.mass_kept == pytest.approx(1) and found.total.error < 1e-5
    assert any("every tile is selected, so this call is dense: its route" in note for note in found.notes)
    gated = inspect_pipeline(config_of(tmp_path, topk=1000, coarse=True), Target(0, 1), rounds=1)
    assert gated.total.error > 1e-3 and any("dense, plus the coarse term" in note for note in gated.notes)


def test_facts_and_impls_agree() -> None:
    platform = current_omni_platform("cpu")
    for name in registered_names():
        backend = load_backend(platform.class_path(name), name)
        if backend.facts.stateless:
            own = backend.get_impl_cls().select_blocks is not AttentionImpl.select_blocks
            assert own == backend.facts.selects_blocks, name


def test_the_steps_of_a_distilled_model_are_its_own() -> None:
    stated = PipelineConfig.model_validate({"pipeline": "wan", "model": "fastwan-tiny"})
    with pytest.raises(ConfigError, match="--step 3: fastwan-tiny is denoised in 3 steps"):
        check_target(stated, Target(3, 0))


def test_a_role_outside_of_the_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A text refiner that runs once before the loop has no step to look at."""
    with use_attention_config(AttentionConfig(), platform=current_omni_platform("cpu")):
        layer = Attention(2, 8, role="text.refiner")
    tensors = [torch.ones(1, 3, 2, 8)] * 3
    ready = SimpleNamespace(
        model=nn.ModuleDict({"transformer": nn.Sequential(layer)}),
        denoise=lambda progress: layer(*tensors, AttentionMetadata()),
        notes=(),
    )
    made = SimpleNamespace(prepare=lambda config, progress: ready)
    monkeypatch.setattr("omni_attn.inspection.capture.get_family", lambda _: made)
    with pytest.raises(
        ConfigError, match=r"--role text\.refiner: its layers ran outside of the denoising steps"
    ):
        capture(config_of(tmp_path), Target(0, 0, "text.refiner"))
    assert not layer._forward_hooks
