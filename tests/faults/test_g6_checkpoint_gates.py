"""B40: learned gates of a checkpoint load under both of their names, whole or not at all, and do what they are for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from omni_attn.errors import ConfigError
from omni_attn.models.wan.model import WanModel
from omni_attn.selector import use_attention_config
from tests.models.wan.gated import NAME, gated_backend
from tests.models.wan.tiny_models import BASE, build_inputs, build_reference

BLOCK = "blocks.{}.to_gate_compress.{}"
ATTENTION = "blocks.{}.attn1.to_gate_compress.{}"
DIM = BASE["num_attention_heads"] * BASE["attention_head_dim"]
SHAPES = {"weight": (DIM, DIM), "bias": (DIM,)}
GRID, TILE = (3, 2, 3), (2, 2, 2)  # of build_inputs: four tiles of 8, 4, 4 and 2 tokens


def gates(spelling: str, value: float = 0.25, blocks: int = 2) -> dict[str, Tensor]:
    """Every number of block i's gate is value * (i + 1); a bias is the negative of that."""
    return {
        spelling.format(block, kind): torch.full(shape, value * (block + 1) * (-1 if kind == "bias" else 1))
        for block in range(blocks)
        for kind, shape in SHAPES.items()
    }


@pytest.fixture
def save(tmp_path: Path) -> Callable[[dict[str, Tensor]], Path]:
    """A checkpoint folder of a two-block model with these weights beside its own."""
    reference = build_reference("t2v")
    reference.save_pretrained(tmp_path)

    def write(more: dict[str, Tensor]) -> Path:
        save_file(reference.state_dict() | more, tmp_path / "diffusion_pytorch_model.safetensors")
        return tmp_path

    return write


def load(folder: Path, backend: str = "TORCH_SDPA") -> WanModel:
    with use_attention_config({"per_role": {"self": backend}}, device="cpu"):
        return WanModel.from_pretrained(folder)


def output(model: WanModel) -> Tensor:
    with torch.no_grad():
        return model(*build_inputs("t2v"))


@pytest.mark.parametrize("spelling", [BLOCK, ATTENTION])
def test_both_names_load(save: Callable[[dict[str, Tensor]], Path], spelling: str) -> None:
    model = load(save(gates(spelling)))
    state = model.state_dict()
    for name, expected in gates(ATTENTION).items():
        assert torch.equal(state[name], expected)
    assert model.config.gate_compress and len(state) == len(build_reference("t2v").state_dict()) + 4


def test_both_names_for_one_gate_are_refused(save: Callable[[dict[str, Tensor]], Path]) -> None:
    with pytest.raises(ConfigError, match=r"two keys of the checkpoint give blocks\.0\.attn1\.to_gate"):
        load(save(gates(BLOCK) | gates(ATTENTION)))


@pytest.mark.parametrize("spelling", [BLOCK, ATTENTION])
@pytest.mark.parametrize("missing", [(1, "weight"), (0, "bias"), (1, None)])
def test_partial_gates_are_refused_by_name(
    save: Callable[[dict[str, Tensor]], Path], spelling: str, missing: tuple[int, str | None]
) -> None:
    block, kind = missing
    gone = {spelling.format(block, part) for part in ([kind] if kind else SHAPES)}
    with pytest.raises(ConfigError, match=f"of 4 weights {len(gone)} are missing") as error:
        load(save({name: tensor for name, tensor in gates(spelling).items() if name not in gone}))
    for part in [kind] if kind else SHAPES:
        assert f"blocks.{block}.attn1.to_gate_compress.{part}" in str(error.value)
    assert f"blocks.{1 - block}." not in str(error.value)


@pytest.mark.parametrize(
    ("name", "shape"), [(BLOCK.format(1, "weight"), (DIM, DIM + 2)), (ATTENTION.format(0, "bias"), (1,))]
)
def test_a_gate_of_another_shape_is_refused(
    save: Callable[[dict[str, Tensor]], Path], name: str, shape: tuple[int, ...]
) -> None:
    whole = gates(ATTENTION if ".attn1." in name else BLOCK)
    with pytest.raises(ConfigError, match=r"1 weights of another shape") as error:
        load(save(whole | {name: torch.ones(shape)}))
    for part in (
        name.partition("to_gate")[2],
        f"is {list(shape)}, needs {list(SHAPES[name.rpartition('.')[2]])}",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "name", ["blocks.2.to_gate_compress.weight", "blocks.0.attn2.to_gate_compress.weight", "blocks.0.to_gate"]
)
def test_an_extra_key_is_refused(save: Callable[[dict[str, Tensor]], Path], name: str) -> None:
    with pytest.raises(ConfigError, match="1 unexpected weights"):
        load(save(gates(BLOCK) | {name: torch.ones(DIM, DIM)}))


def test_without_gates_nothing_is_allocated(save: Callable[[dict[str, Tensor]], Path]) -> None:
    reference = build_reference("t2v")
    with gated_backend(topk=4):  # all four tiles: dense
        model = load(save({}), NAME)
        found = output(model)
    assert not model.config.gate_compress
    assert not [name for name, _ in model.named_modules() if "gate" in name]
    assert model.state_dict().keys() == reference.state_dict().keys()
    with torch.no_grad():
        latent, timestep, text, _ = build_inputs("t2v")
        expected = reference(latent, timestep, text, return_dict=False)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_gate_of_zero_is_no_gate(save: Callable[[dict[str, Tensor]], Path]) -> None:
    with gated_backend() as seen:
        without = output(load(save({}), NAME))
        with_zero = output(load(save(gates(BLOCK, 0.0)), NAME))
        with_gate = output(load(save(gates(BLOCK)), NAME))
    assert [gate is None for gate in seen.gates] == [True] * 2 + [False] * 4
    torch.testing.assert_close(with_zero, without)
    assert (with_gate - without).abs().max() > 1e-2


def tile_of_each_token() -> Tensor:
    """[18]: tiles in the order of frames, rows and columns, the columns fastest."""
    tiles = [-(-length // extent) for length, extent in zip(GRID, TILE, strict=True)]
    return torch.tensor(
        [
            (t // TILE[0] * tiles[1] + h // TILE[1]) * tiles[2] + w // TILE[2]
            for t in range(GRID[0])
            for h in range(GRID[1])
            for w in range(GRID[2])
        ]
    )


def test_a_gate_weighs_the_pooled_branch(save: Callable[[dict[str, Tensor]], Path]) -> None:
    """attn1 of one block, without its last projection, against the formula in float64."""
    topk, constant = 2, 1.5
    with gated_backend(topk=topk) as seen:
        model = load(save(gates(BLOCK)), NAME)
        attention = model.blocks[0].attn1
        attention.to_gate_compress.weight.data.zero_()
        attention.to_gate_compress.bias.data = torch.linspace(-constant, constant, DIM)
        attention.to_out[0].weight.data = torch.eye(DIM)
        attention.to_out[0].bias.data.zero_()
        calls: list[tuple[Tensor, ...]] = []
        attention.attention.register_forward_pre_hook(lambda _, given: calls.append(given[:3]))
        outputs: list[Tensor] = []
        attention.register_forward_hook(lambda _, __, result: outputs.append(result))
        output(model)
    query, key, value = (tensor.double().transpose(1, 2) for tensor in calls[0])  # [B, H, S, D]
    gate = seen.gates[0]
    assert gate is not None
    heads = (BASE["num_attention_heads"], BASE["attention_head_dim"])
    assert torch.equal(gate[1, 7], torch.linspace(-constant, constant, DIM).unflatten(0, heads))

    tile = tile_of_each_token()
    belongs = (tile == torch.arange(4)[:, None]).double()  # [tiles, S]
    means = [belongs @ tensor / belongs.sum(1, keepdim=True) for tensor in (query, key, value)]
    coarse_scores = means[0] @ means[1].mT * heads[1] ** -0.5
    pooled = (coarse_scores.softmax(-1) @ means[2])[:, :, tile]
    chosen = torch.zeros_like(coarse_scores).scatter(-1, coarse_scores.topk(topk).indices, 1.0).bool()
    scores = (query @ key.mT * heads[1] ** -0.5).masked_fill(~chosen[:, :, tile][..., tile], -torch.inf)
    expected = scores.softmax(-1) @ value + gate.double().transpose(1, 2) * pooled
    torch.testing.assert_close(outputs[0], expected.transpose(1, 2).flatten(2).float(), atol=1e-5, rtol=1e-5)
