"""Gates of the Wan model: computed where a backend reads them, compiled, and told of where nobody reads them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from safetensors.torch import save_file
from torch import Tensor

from omni_attn import prepare_attention
from omni_attn.config import PipelineConfig
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.family import build_meta_model, run
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.source import load_source
from omni_attn.selector import use_attention_config
from tests.models.wan.gated import NAME, gated_backend
from tests.models.wan.tiny_checkpoints import build_pipeline
from tests.models.wan.tiny_models import (
    BASE,
    TOKENS,
    build_inputs,
    build_model,
    build_reference,
    config_of,
    seed_weights,
)

TILES = 4  # of the grid of build_inputs, with GATED_TILES' own tile


def gated_model(backend: str, kind: str = "t2v", blocks: int = 2, is_dmd: bool = False) -> WanModel:
    config = dataclasses.replace(config_of(kind), gate_compress=True, num_layers=blocks)
    with use_attention_config({"per_role": {"self": backend}}, device="cpu"):
        model = WanModel(config, is_dmd=is_dmd).eval()
    seed_weights(model)
    return model


def gate_calls(model: WanModel) -> list[str]:
    """Names of the gates that run, written while the model runs."""
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith("to_gate_compress"):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


@pytest.mark.parametrize("backend", [NAME, "FASTVIDEO_VSA"])  # whose own 64 tiles are all tiles here
@pytest.mark.parametrize("kind", ["t2v", "ti2v", "i2v"])
def test_all_tiles_and_a_zero_gate_equal_the_dense_model(kind: str, backend: str) -> None:
    with gated_backend(topk=TILES) as seen:
        model = gated_model(backend, kind, is_dmd=True)
        for block in model.blocks:
            for parameter in block.attn1.to_gate_compress.parameters():
                parameter.data.zero_()
        dense = build_model(kind)
        dense.load_state_dict({name: model.state_dict()[name] for name in dense.state_dict()})
        with torch.no_grad():
            found, expected = (m(*build_inputs(kind)) for m in (model, dense))
    assert all(gate is not None for gate in seen.gates)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_dense_backend_costs_nothing() -> None:
    model, reference = gated_model("TORCH_SDPA"), build_reference("t2v")
    reference.load_state_dict({name: model.state_dict()[name] for name in reference.state_dict()})
    calls = gate_calls(model)
    with torch.no_grad():
        latent, timestep, text, _ = build_inputs("t2v")
        found = model(latent, timestep, text)
        expected = reference(latent, timestep, text, return_dict=False)[0]
    assert calls == []
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_gate_reads_what_query_key_and_value_read() -> None:
    with gated_backend() as seen:
        model = gated_model(NAME)
        inputs: dict[str, Tensor] = {}
        for name in ("to_q", "to_gate_compress"):
            module = getattr(model.blocks[1].attn1, name)
            module.register_forward_hook(lambda _, given, __, name=name: inputs.update({name: given[0]}))
        calls = gate_calls(model)
        with torch.no_grad():
            model(*build_inputs("t2v"))
    assert torch.equal(inputs["to_q"], inputs["to_gate_compress"])
    assert calls == [f"blocks.{block}.attn1.to_gate_compress" for block in range(2)]
    gate = model.blocks[1].attn1.to_gate_compress(inputs["to_q"])
    assert torch.equal(seen.gates[1], gate.unflatten(2, (2, 12)))


@pytest.mark.parametrize("is_dmd", [False, True])
def test_the_kind_of_checkpoint_reaches_self_attention_alone(is_dmd: bool) -> None:
    records = gated_model("TORCH_SDPA", "i2v", is_dmd=is_dmd).attention_records((3, 2, 3))
    assert {role: record.preserve_vsa_all_blocks for role, record in records.items()} == {
        "self": is_dmd,
        "cross": False,
        "cross.image": False,
    }


def test_all_tiles_are_dense_in_native_models_and_gated_in_distilled_ones() -> None:
    with gated_backend(topk=TILES) as seen, torch.no_grad():
        outputs = [gated_model(NAME, is_dmd=is_dmd)(*build_inputs("t2v")) for is_dmd in (False, True)]
    assert [record.preserve_vsa_all_blocks for record in seen.records] == [False, True]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2


@pytest.mark.parametrize("backend", [NAME, "FASTVIDEO_VSA"])
def test_equal_gated_blocks_compile_into_one_frame_for_all_steps(backend: str) -> None:
    """The record that carries the gate is made in the trace, and must not make it depend on the step."""
    with gated_backend(traceable=True):
        model, inputs = gated_model(backend, blocks=4, is_dmd=True), build_inputs("t2v")
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        torch._dynamo.reset()
        with torch.no_grad():
            expected = model(*inputs)
            for block in model.blocks:
                block.compile(fullgraph=True, backend=counter)
            records = model.attention_records((3, 2, 3))
            lengths = model.config.attention_lengths((3, 2, 3))
            for step in range(4):
                records = {
                    role: record.at_step(step, num_steps=4, sigma=1 - 0.2 * step)
                    for role, record in records.items()
                }
                prepare_attention(model, records, lengths=lengths)
                found = model(*inputs, attention_records=records)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1


def test_gradients_reach_the_gates() -> None:
    with gated_backend():
        model = gated_model(NAME)
        model(*build_inputs("t2v")).square().mean().backward()
    for block in model.blocks:
        assert block.attn1.to_gate_compress.weight.grad.abs().max() > 0


def configure(model: str, output: Path, backend: str, **generation: object) -> PipelineConfig:
    values = {
        "pipeline": "wan",
        "model": model,
        "attention": {"per_role": {"self": backend}},
        "generation": {"height": 64, "width": 96, "num_frames": 9} | generation,
        "device": "cpu",
        "output": str(output),
    }
    return PipelineConfig.model_validate(values)


def test_a_run_says_that_gates_are_left_out(tmp_path: Path) -> None:
    note = run(configure("fastwan-tiny", tmp_path, "TORCH_SDPA")).notes[-1]
    assert note.startswith("gates: 4 of 4 layers leave out to_gate_compress, which TORCH_SDPA does not read")
    with gated_backend() as seen:
        notes = run(configure("fastwan-tiny", tmp_path, NAME)).notes
    assert not [note for note in notes if note.startswith("gates")]
    assert len(seen.gates) == 3 * 4 and all(gate is not None for gate in seen.gates)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_is_known_to_have_gates_before_its_weights_are_read(tmp_path: Path, sharded: bool) -> None:
    """So that the memory they need is counted, and explain shows the model that runs."""
    build_pipeline("t2v").save_pretrained(tmp_path)
    weights = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    assert not load_source(str(tmp_path)).transformer.gate_compress
    names = [f"blocks.{block}.to_gate_compress.{kind}" for block in range(2) for kind in ("weight", "bias")]
    if sharded:
        index = {"weight_map": dict.fromkeys(names, "none.safetensors")}
        weights.rename(tmp_path / "elsewhere.safetensors")
        Path(f"{weights}.index.json").write_text(json.dumps(index))
    else:
        save_file({name: torch.ones(2) for name in names}, weights)
    assert load_source(str(tmp_path)).transformer.gate_compress
    with use_attention_config(None, device="cpu"):
        model = build_meta_model(configure(str(tmp_path), tmp_path, "TORCH_SDPA"))
    assert sum("to_gate_compress" in name for name, _ in model.named_parameters()) == len(names)


def test_config_json_may_say_that_there_are_gates() -> None:
    assert WanConfig.from_dict(BASE | {"gate_compress": True}).gate_compress
    assert not WanConfig.from_dict(BASE).gate_compress
    assert "gate_compress" not in config_of("t2v").to_diffusers()
    assert config_of("t2v").attention_lengths((3, 2, 3))["self"] == (TOKENS, TOKENS)
