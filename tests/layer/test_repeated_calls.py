"""The second and third call of a layer do what the first did: no shorter way passes by what was put around a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_attn import Attention, AttentionConfig, AttentionMetadata, use_attention_config
from omni_attn.backends.torch_sdpa import TorchSDPAImpl
from omni_attn.errors import MetadataError
from tests.layer.stands import HEAD_SIZE, Stand, every_stand, tensors

RECORDS: dict[str, Callable[[], AttentionMetadata | None]] = {
    "no record": lambda: None,
    "empty record": AttentionMetadata,
    "masked": lambda: AttentionMetadata(attn_mask=torch.tensor([[True, False, True, True]])),
}
each_record = pytest.mark.parametrize("make_record", RECORDS.values(), ids=RECORDS)


class OwnForward(TorchSDPAImpl):
    def forward(self, query: torch.Tensor, *_: Any, **inputs: Any) -> torch.Tensor:
        return torch.full_like(query, 7.0)


class OwnAttend(TorchSDPAImpl):
    def attend(self, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.full_like(query, 7.0)


def build(cls: type[Attention] = Attention, **needs: Any) -> Attention:
    with use_attention_config(AttentionConfig(default="TORCH_SDPA"), device="cpu"):
        return cls(4, HEAD_SIZE, role="self", **needs)


def counted(calls: list[str], inner: Callable[..., Any]) -> Callable[..., Any]:
    def count(*arguments: Any, **named: Any) -> Any:
        calls.append("called")
        return inner(*arguments, **named)

    return count


@each_record
@pytest.mark.parametrize("override", [OwnForward, OwnAttend])
def test_an_override_runs_in_each_call(
    override: type[TorchSDPAImpl], make_record: Callable[[], AttentionMetadata | None]
) -> None:
    layer, record = build(impl_overrides={"TORCH_SDPA": override}), make_record()
    for _ in range(3):
        assert bool((layer(*tensors(1, 3, 4), record) == 7).all())


@each_record
@pytest.mark.parametrize("where", ["layer.forward", "layer.impl.forward", "layer.impl.attend"])
def test_a_method_replaced_on_the_object_is_called_each_time(
    where: str, make_record: Callable[[], AttentionMetadata | None]
) -> None:
    layer, record, calls = build(), make_record(), list[str]()
    expected = layer(*tensors(1, 3, 4), record)
    owner, name = (layer if where == "layer.forward" else layer.impl), where.rpartition(".")[2]
    setattr(owner, name, counted(calls, getattr(owner, name)))
    for count in (1, 2, 3):
        assert torch.equal(layer(*tensors(1, 3, 4), record), expected)
        assert len(calls) == count


def test_a_method_replaced_on_the_class_is_called_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, calls = build(), list[str]()
    layer(*tensors(1, 3, 4))
    monkeypatch.setattr(TorchSDPAImpl, "forward", counted(calls, TorchSDPAImpl.forward))
    for count in (1, 2, 3):
        layer(*tensors(1, 3, 4))
        assert len(calls) == count


def test_a_subclass_of_the_layer_sees_each_call() -> None:
    calls: list[str] = []

    class Own(Attention):
        def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
            calls.append("called")
            return super().forward(*arguments, **named) + 1

    own, plain = build(Own), build()
    for count in (1, 2, 3):
        torch.testing.assert_close(own(*tensors(1, 3, 4)), plain(*tensors(1, 3, 4)) + 1)
        assert len(calls) == count


def test_a_hook_may_change_input_and_output_of_each_call() -> None:
    layer, plain = build(), build()
    query, key, value = tensors(1, 3, 4)
    layer(query, key, value)
    layer.register_forward_pre_hook(lambda module, given: (given[0], given[1], given[2] * 2, *given[3:]))
    layer.register_forward_hook(lambda module, given, output: output + 1)
    for _ in range(3):
        torch.testing.assert_close(layer(query, key, value), plain(query, key, value * 2) + 1)


def test_a_hook_is_given_the_arguments_by_name_too() -> None:
    layer, record, seen = build(), AttentionMetadata(), list[Any]()
    query, key, value = tensors(1, 3, 4)
    layer.register_forward_pre_hook(
        lambda module, given, named: seen.append([*given, *named.values()]), with_kwargs=True
    )
    for _ in range(3):
        layer(query, key, value, metadata=record)
    assert len(seen) == 3 and all(any(part is record for part in given) for given in seen)


@pytest.mark.parametrize("calls_before", [0, 1, 2])
def test_a_compiled_layer_runs_its_graph_each_time(calls_before: int) -> None:
    ran: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        return counted(ran, graph.forward)

    layer, call = build(), tensors(1, 3, 4)
    for _ in range(calls_before):
        layer(*call)
    layer.compile(fullgraph=True, backend=backend)
    for count in (1, 2, 3):
        layer(*call)
        assert len(ran) == count


@every_stand
def test_each_call_reaches_the_kernel_and_gives_the_same(stand: Stand) -> None:
    call = stand.call(2, 3, 4)
    with stand.kernels() as log:
        layer = stand.layer(4, HEAD_SIZE)
        first, *others = (layer(*call) for _ in range(3))
        assert all(torch.equal(first, other) for other in others)
        assert not log.calls or len(log.calls) == 3  # plain torch keeps no log


@pytest.mark.parametrize(
    ("which", "wrong"),
    [
        ("key", torch.float64),
        ("value", torch.float64),
        ("query", torch.device("meta")),
        ("key", torch.device("meta")),
        ("value", torch.device("meta")),
    ],
    ids=str,
)
def test_what_the_first_call_would_refuse_the_next_one_refuses(which: str, wrong: Any) -> None:
    call = dict(zip(("query", "key", "value"), tensors(1, 3, 3), strict=True))
    fresh, used = build(), build()
    used(**call)
    texts = []
    for layer in (fresh, used):
        with pytest.raises(MetadataError, match=r'"self".*need one d') as raised:
            layer(**(call | {which: call[which].to(wrong)}))
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
