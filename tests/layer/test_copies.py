"""Layers are copied and saved with the modules they are part of."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from omni_attn import Attention, attention_report
from tests.layer.stands import HEAD_SIZE, Stand, every_stand


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


COPIES: list[Callable[[nn.Module], nn.Module]] = [
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
    saved_and_loaded,
]


@every_stand
@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_copy_runs_alike(
    stand: Stand, make_copy: Callable[[nn.Module], nn.Module], calls_before: int
) -> None:
    call = stand.call(1, 3, 4)
    with stand.kernels():
        layer = stand.layer(4, HEAD_SIZE, prefix="blocks.0.attn")
        for _ in range(calls_before):
            layer(*call)
        [twin] = make_copy(nn.ModuleList([layer]))
        assert isinstance(twin, Attention) and twin is not layer and twin.impl is not layer.impl
        assert (twin.selection, twin.group_id) == (layer.selection, layer.group_id)
        for _ in range(2):
            assert torch.equal(twin(*call), layer(*call))
        assert twin.route == layer.route
    assert attention_report(twin).to_dict() == attention_report(layer).to_dict()
