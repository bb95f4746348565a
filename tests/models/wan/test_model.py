"""WanModel computes what diffusers' WanTransformer3DModel does, and calls attention under the right roles."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.rope import RopeCache, apply_rope, build_rope_table, rope_axis_dims
from omni_attn.models.wan.transformer import unpatchify
from tests.models.wan.tiny_models import (
    KINDS,
    LATENT,
    TOKENS,
    build_inputs,
    build_model,
    build_reference,
    cast_weights,
    config_of,
)

CPU = torch.device("cpu")


def pair(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Our output and diffusers', of the same weights and inputs."""
    reference, model = build_reference(kind), WanModel(config_of(kind)).eval()
    model.load_state_dict(reference.state_dict())
    cast_weights(reference, dtype)
    cast_weights(model, dtype)
    inputs = build_inputs(kind, dtype)
    with torch.no_grad():
        return model(*inputs), reference(*inputs, return_dict=False)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_diffusers_in_float32(kind: str) -> None:
    ours, theirs = pair(kind)
    assert ours.dtype == torch.float32
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_diffusers_in_bfloat16(kind: str) -> None:
    """Where the two round differently, a few units in the last place (2 ** -8) of large values remain."""
    ours, theirs = pair(kind, torch.bfloat16)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, atol=0.02 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", ["t2v", "ti2v", "flf2v"])
def test_gradients_agree_with_diffusers(kind: str) -> None:
    """With autograd the model takes forms without `out=`; both directions must be the same function."""
    reference, model = build_reference(kind), WanModel(config_of(kind)).eval()
    model.load_state_dict(reference.state_dict())
    inputs = build_inputs(kind)
    model(*inputs).square().mean().backward()
    reference(*inputs, return_dict=False)[0].square().mean().backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_one_time_per_token_equals_one_time_when_all_are_equal() -> None:
    model = build_model("t2v")
    latent, timestep, text, _ = build_inputs("t2v")
    with torch.no_grad():
        once = model(latent, timestep, text)
        per_token = model(latent, timestep[:, None].expand(-1, TOKENS), text)
    torch.testing.assert_close(per_token, once, atol=1e-5, rtol=1e-5)


def test_a_token_s_time_acts_on_its_own_patch() -> None:
    """With cut attention a changed timestep changes the patch of that token and no other."""
    model = build_model("ti2v")
    for block in model.blocks:
        for attention in (block.attn1, block.attn2):
            torch.nn.init.zeros_(attention.to_out[0].weight)
    latent, timestep, text, _ = build_inputs("ti2v")
    later = timestep.clone()
    later[0, 7] += 300  # grid (3, 2, 3): token 7 is frame 1, row 0, column 1
    with torch.no_grad():
        changed = (model(latent, later, text) != model(latent, timestep, text)).any(dim=1)
    expected = torch.zeros(2, *LATENT, dtype=torch.bool)
    expected[0, 1, 0:2, 2:4] = True
    assert torch.equal(changed, expected)


def test_image_branch_that_gives_nothing_leaves_text_to_video() -> None:
    model, plain = build_model("i2v"), WanModel(config_of("i2v_2.2")).eval()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn2.add_v_proj.weight)
        torch.nn.init.zeros_(block.attn2.add_v_proj.bias)
    names = plain.state_dict()
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in names})
    inputs = build_inputs("i2v")
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs), plain(*inputs[:3]), atol=1e-6, rtol=1e-6)


def test_two_pictures_may_come_joined() -> None:
    model = build_model("flf2v")
    latent, timestep, text, image = build_inputs("flf2v")
    assert image is not None
    with torch.no_grad():
        assert torch.equal(
            model(latent, timestep, text, image), model(latent, timestep, text, image.view(2, 10, 6))
        )


def test_unpatchify_puts_each_feature_where_it_belongs() -> None:
    grid, patch, channels = (2, 3, 2), (1, 2, 2), 3
    for token, (t, h, w) in enumerate(torch.cartesian_prod(*(torch.arange(n) for n in grid)).tolist()):
        for feature in range(12):
            one_hot = torch.zeros(1, 12, 12)
            one_hot[0, token, feature] = 1
            row, column, channel = feature // 6, feature // channels % 2, feature % channels
            video = unpatchify(one_hot, grid, patch)
            assert video.shape == (1, 3, 2, 6, 4)
            assert video.nonzero().tolist() == [[0, channel, t, 2 * h + row, 2 * w + column]]


def test_one_hot_head_names_its_channel() -> None:
    model = build_model("t2v")
    torch.nn.init.zeros_(model.proj_out.weight)
    torch.nn.init.zeros_(model.proj_out.bias)
    model.proj_out.bias.data[4 * 1 + 3] = 1  # patch row 0, column 1, channel 3
    with torch.no_grad():
        video = model(*build_inputs("t2v"))
    expected = torch.zeros_like(video)
    expected[:, 3, :, 0::2, 1::2] = 1
    assert torch.equal(video, expected)


def test_rope_axes_and_frequencies_of_the_published_models() -> None:
    assert rope_axis_dims(128) == (44, 42, 42)
    assert rope_axis_dims(12) == (4, 4, 4)
    cos, minus_sin = (part[0, :, 0] for part in build_rope_table(128, (2, 2, 2), CPU))
    at_frame_1, at_row_1 = 4, 2  # raster index of (1, 0, 0) and (0, 1, 0)
    temporal = torch.atan2(cos[at_frame_1, :3, 1], cos[at_frame_1, :3, 0])
    vertical = torch.atan2(-minus_sin[at_row_1, 22:25, 0], cos[at_row_1, 22:25, 0])
    torch.testing.assert_close(temporal, torch.tensor([1.0, 0.657933, 0.432876]), atol=1e-6, rtol=0)
    torch.testing.assert_close(vertical, torch.tensor([1.0, 0.644947, 0.415956]), atol=1e-6, rtol=0)


def test_rope_keeps_its_input_and_turns_scores_by_distance_only() -> None:
    table = build_rope_table(12, (5, 1, 1), CPU)
    query, key = torch.randn(2, 1, 1, 1, 12, generator=torch.Generator().manual_seed(0)).expand(
        2, 1, 5, 1, 12
    )
    kept = query.clone()
    scores = torch.einsum("bshd,bthd->st", apply_rope(query, table), apply_rope(key, table))
    assert torch.equal(query, kept)
    torch.testing.assert_close(scores[:-1, :-1], scores[1:, 1:], atol=1e-5, rtol=1e-5)


def test_rope_tables_are_made_once_per_grid() -> None:
    cache = RopeCache(12)
    first = cache.get((1, 2, 3), CPU)
    assert cache.get((1, 2, 3), CPU) is first
    assert cache.get((3, 2, 1), CPU) is not first
    with torch.inference_mode():
        inside = cache.get((2, 2, 2), CPU)
    assert not inside.first.is_inference()
    for size in range(4, 12):
        cache.get((size, 1, 1), CPU)
    assert len(cache._tables) == 4


def test_latents_in_float32_enter_a_bfloat16_model() -> None:
    model = build_model("i2v")
    cast_weights(model, torch.bfloat16)
    wide = build_inputs("i2v")
    narrow = tuple(t if i == 1 or t is None else t.bfloat16() for i, t in enumerate(wide))
    with torch.no_grad():
        assert torch.equal(model(*wide), model(*narrow))
