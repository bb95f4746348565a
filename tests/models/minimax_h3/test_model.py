"""MiniMaxH3Model computes what diffusers' MiniMaxH3Transformer3DModel does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from tests.models.minimax_h3.tiny_models import (
    KINDS,
    build_inputs,
    build_model,
    build_reference,
    cast_weights,
    config_of,
    shuffled,
)

Pair = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def pair(inputs: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Pair:
    """Our video and audio and diffusers', of the same weights and inputs."""
    reference, model = build_reference(), MiniMaxH3Model(config_of()).eval()
    model.load_state_dict(reference.state_dict())
    cast_weights(reference, dtype)
    cast_weights(model, dtype)
    with torch.no_grad():
        return model(**inputs), reference(**inputs, return_dict=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2])
def test_agrees_with_diffusers_in_float32(kind: str, batch: int) -> None:
    ours, theirs = pair(build_inputs(kind, batch=batch))
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.float32 and our.shape == their.shape
        torch.testing.assert_close(our, their, atol=1e-5, rtol=1e-5)
    assert theirs[0].abs().max() > 1 and ours[1].numel() == theirs[1].numel()


def test_rows_of_a_kind_need_not_lie_together() -> None:
    inputs = build_inputs("ref2va")
    ours, theirs = pair(shuffled(inputs))
    together, _ = pair(inputs)
    for our, their, same in zip(ours, theirs, together, strict=True):
        torch.testing.assert_close(our, their, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(our, same, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["t2va", "ref2va"])
def test_agrees_with_diffusers_in_bfloat16(kind: str) -> None:
    """Where the two round differently, a few units in the last place (2 ** -8) of large values remain."""
    ours, theirs = pair(build_inputs(kind), torch.bfloat16)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype == torch.float32  # the heads'
        torch.testing.assert_close(our, their, atol=0.03 * float(their.abs().max()), rtol=0)


def test_is_at_least_as_close_to_float32_as_diffusers_in_bfloat16() -> None:
    inputs = build_inputs("fl2va")
    exact, _ = pair(inputs)
    ours, theirs = pair(inputs, torch.bfloat16)
    for truth, our, their in zip(exact, ours, theirs, strict=True):
        assert (our - truth).square().mean() < 1.1 * (their - truth).square().mean()


def test_gradients_agree_with_diffusers() -> None:
    """With autograd the model takes forms without `out=`; both directions must be the same function."""
    reference, model = build_reference(), MiniMaxH3Model(config_of()).eval()
    model.load_state_dict(reference.state_dict())
    inputs = build_inputs("ref2va")
    sum(output.square().mean() for output in model(**inputs)).backward()
    sum(output.square().mean() for output in reference(**inputs, return_dict=False)).backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_text_refined_once_serves_every_step() -> None:
    model, inputs = build_model(), build_inputs()
    with torch.no_grad():
        refined = model.refine_text(inputs["encoder_hidden_states"])
        expected = model(**inputs)
        once = model(**inputs | {"encoder_hidden_states": None}, refined_text=refined)
    assert refined.shape == (2, 5, 48)
    assert all(map(torch.equal, once, expected))


def test_padding_is_no_part_of_the_sequence() -> None:
    """Native packing: rows of tag -1 behind those in use change nothing, whatever their positions and times."""
    model = build_model()
    plain, padded = build_inputs("fl2va", batch=1), build_inputs("fl2va", batch=1, padded_len=64)
    padded["position_ids"][: len(plain["position_ids"])] = plain["position_ids"]
    with torch.no_grad():
        expected, found = model(**plain), model(**padded)
        padded["position_ids"][-1] = 1e6
        padded["timestep_indices"][-1] = 3
        changed = model(**padded)
    for one, other, third in zip(expected, found, changed, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
        assert torch.equal(other, third)


def test_factorised_modulation_of_full_rank_is_the_plain_one() -> None:
    """W SiLU(t) = (W B^T) (B SiLU(t)) for an orthogonal basis B, and nothing is activated a second time."""
    plain, inputs = build_model(), build_inputs()
    factorised = MiniMaxH3Model(config_of(adaln_rank=32)).eval()
    basis = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(3)))[0]
    state = plain.state_dict()
    for name in state:
        if name.endswith(("adaln_proj.linear.weight", "norm_out.linear.weight")):
            state[name] = state[name] @ basis.T
    factorised.load_state_dict(state | {"adaln_basis.weight": basis})
    with torch.no_grad():
        for one, other in zip(plain(**inputs), factorised(**inputs), strict=True):
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)


def test_a_basis_of_another_dtype_serves_a_bfloat16_model() -> None:
    model = build_model(adaln_rank=4)
    cast_weights(model, torch.bfloat16)
    with torch.no_grad():
        expected = model(**build_inputs())
        for name, parameter in model.named_parameters():
            if "adaln" in name or name.startswith("norm_out.linear"):
                parameter.data = parameter.data.half()  # as the published ones are stored
        found = model(**build_inputs())
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, atol=0.03 * float(one.abs().max()), rtol=0)


def test_modulation_goes_by_time_and_modality_of_each_row() -> None:
    """With attention cut off, a row's output depends on its own time and tag, and on no other row's."""
    model, inputs = build_model(), build_inputs("t2va", batch=1)
    for block in model.transformer_blocks:
        torch.nn.init.zeros_(block.attn.to_out[0].weight)
    row = 5 + 6 + 7  # the eighth of the target video
    later, other = inputs["timestep_indices"].clone(), inputs["token_tags"].clone()
    later[row], other[row] = 2, 2
    with torch.no_grad():
        expected = model(**inputs)
        for changed in ({"timestep_indices": later}, {"token_tags": other}):
            video, audio = model(**inputs | changed)
            assert (video != expected[0]).any(2)[0].nonzero().flatten().tolist() == [7]
            assert torch.equal(audio, expected[1])


def test_inputs_are_not_modified_and_may_be_strided() -> None:
    model, inputs = build_model(), build_inputs()
    kept = {name: tensor.clone() for name, tensor in inputs.items()}
    strided = {name: torch.stack([tensor, tensor], dim=-1)[..., 0] for name, tensor in inputs.items()}
    with torch.no_grad():
        expected = model(**inputs)
        assert all(torch.equal(inputs[name], tensor) for name, tensor in kept.items())
        for one, other in zip(model(**strided), expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_integers_of_any_width_and_times_of_any_dtype() -> None:
    model, inputs = build_model(), build_inputs()
    narrow = {
        "timestep": inputs["timestep"].double(),
        "token_tags": inputs["token_tags"].to(torch.int8),
    } | {
        name: inputs[name].to(torch.int32)
        for name in ("timestep_indices", "video_indices", "audio_indices", "text_indices")
    }
    with torch.no_grad():
        assert all(map(torch.equal, model(**inputs | narrow), model(**inputs)))


def test_swiglu_takes_values_first() -> None:
    feed_forward = build_model().transformer_blocks[0].ff
    rows = torch.randn(3, 48, generator=torch.Generator().manual_seed(4))
    value, gate = feed_forward.net["0"]["proj"].weight.split(80)
    expected = (rows @ value.T * F.silu(rows @ gate.T)) @ feed_forward.net["2"].weight.T
    torch.testing.assert_close(feed_forward(rows), expected, atol=1e-5, rtol=1e-5)
