"""Every strategy among processes is one rank: torch.distributed's own exchanges, on CPUs and on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel import scene, work
from tests.parallel.processes import Processes
from tests.parallel.scene import Call, every_mode, randn

Config = dict[str, Any]
CONFIGS: dict[str, Config] = {
    **scene.CONFIGS,
    "ulysses 4": {"ulysses_degree": 4},
    "ring 4": {"ring_degree": 4},
    "allgather 4": {"allgather_degree": 4},
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
KEEP = torch.arange(11) < torch.tensor([[8], [5]])

SHAPES = {
    "odd lengths": Call(11),
    "fewer tokens than ranks": Call(2),
    "one token": Call(1, batch=1),
    "odd heads": Call(9, heads=5),
    "grouped heads": Call(9, heads=28, kv_heads=7),
    "fewer heads than ranks": Call(9, heads=1),
    "keys of another length": Call(7, 10, heads=6, kv_heads=2, value_size=12),
    "causal": Call(13, needs={"causal": True}),
}
MASKS = {
    "key padding": Call(11, fields={"attn_mask": KEEP, "kv_lengths": (8, 5), "mask_mode": "padding"}),
    "key padding, causal": Call(11, needs={"causal": True}, fields={"attn_mask": KEEP}),
    "of each head": Call(11, fields={"attn_mask": randn(2, 4, 11, 11, seed=5) > 0}),
    "added": Call(11, fields={"attn_mask": randn(1, 1, 11, 11, seed=5)}),
    "packed": Call(13, batch=1, needs={"packed": True}, fields={"cu_seqlens_q": (0, 2, 9, 13)}),
    "packed, on the device": Call(
        13,
        batch=1,
        needs={"packed": True},
        fields={"cu_seqlens_q": torch.tensor([0, 2, 9, 13], dtype=torch.int32)},
    ),
}
JOINT = {
    "front": Call(9, joint=(3, 3), order="front"),
    "rear": Call(9, joint=(3, 3), order="rear"),
    "keys alone": Call(9, joint=(0, 4), order="rear"),
    "front, grouped": Call(7, heads=6, kv_heads=2, joint=(2, 5), order="front"),
    "causal": Call(9, joint=(0, 2), order="rear", needs={"causal": True}),
}


def check(call: Call, outputs: list[Tensor], name: str) -> None:
    torch.testing.assert_close(
        call.together(outputs), call.alone(), atol=1e-5, rtol=0, msg=lambda text: f"{name}: {text}"
    )


@every_config
@pytest.mark.parametrize("calls", [SHAPES, MASKS, JOINT], ids=["shapes", "masks", "joint streams"])
def test_one_rank(processes: Processes, config: Config, calls: dict[str, Call]) -> None:
    for (name, call), outputs in zip(
        calls.items(),
        zip(*processes.run(config, work.attend, list(calls.values())), strict=True),
        strict=True,
    ):
        check(call, list(outputs), name)


@every_mode
def test_one_rank_without_preparation(processes: Processes, config: Config) -> None:
    outputs = processes.run(config, work.attend, [SHAPES["odd lengths"]], False, False)
    check(SHAPES["odd lengths"], [each[0] for each in outputs], "unprepared")


@every_config
@pytest.mark.parametrize(
    "call",
    [Call(9, heads=6, kv_heads=3), Call(7, needs={"causal": True}), Call(2)],
    ids=["grouped heads", "causal", "fewer tokens than ranks"],
)
def test_gradients(processes: Processes, config: Config, call: Call) -> None:
    weights = randn(call.batch, call.length, call.heads, call.value_size, seed=7)
    found = processes.run(config, work.differentiate, call, weights)
    own = [tensor.clone().requires_grad_() for tensor in call.own]
    (call.layer()(*own) * weights).sum().backward()
    for alone, pieces in zip(own, zip(*found, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(pieces, dim=1), alone.grad, atol=1e-5, rtol=0)


@every_mode
def test_compiled(processes: Processes, config: Config) -> None:
    call = Call(9, heads=6, kv_heads=3)
    weights = randn(call.batch, call.length, call.heads, call.value_size, seed=7)
    check(call, [each[0] for each in processes.run(config, work.attend, [call], True)], "compiled")
    eager, compiled = (processes.run(config, work.differentiate, call, weights, way) for way in (False, True))
    torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "degrees", [{"ulysses_degree": 2}, {"ulysses_degree": 2, "head_pieces": 3}, {"ring_degree": 2}]
)
def test_compiled_where_memory_could_be_shared(gloo_processes: Processes, degrees: Config) -> None:
    call = Call(9, heads=6)
    weights = randn(call.batch, call.length, call.heads, call.value_size, seed=7)
    found = gloo_processes.run(degrees, work.compile_where_memory_could_be_shared, call, weights)
    check(call, [each[0] for each in found], "compiled")
    for each, eager in zip(
        found, gloo_processes.run(degrees, work.differentiate, call, weights), strict=True
    ):
        torch.testing.assert_close(each[1:], eager, atol=1e-5, rtol=0)


@every_mode
def test_copies(processes: Processes, config: Config) -> None:
    call = Call(9, heads=6, kv_heads=3)
    check(call, processes.run(config, work.attend_with_a_copy, call), "a copy")


def test_processes_that_were_used_before(processes: Processes) -> None:
    """Each piece of work has process groups of its own: another number of ranks, and the same again."""
    for config in ({"ulysses_degree": 2}, {"ring_degree": 2}, {"ulysses_degree": 2}):
        for gathered in processes.run(config, work.exchange, 5):
            assert gathered.tolist() == [[0, 0, 0, 1, 1]]


def test_memory_that_cannot_be_shared(processes: Processes) -> None:
    if processes.device == "cuda":
        pytest.skip("these GPUs can")
    outcomes = processes.outcomes({"ulysses_degree": 2, "symmetric_memory": True}, work.exchange)
    text = "ranks of ulysses_degree cannot read one another's memory: their tensors live on the cpu"
    for outcome in outcomes:
        assert outcome.error is not None and outcome.error[0] == "ConfigError" and text in outcome.error[1]
