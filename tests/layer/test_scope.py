"""use_attention_config and collect_attention_requests: read by constructors alone, gone with their block."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from omni_attn import (
    Attention,
    AttentionConfig,
    AttentionMetadata,
    collect_attention_requests,
    prepare_attention,
    use_attention_config,
)
from omni_attn.errors import BackendRejectedError, ConfigError, MetadataError
from omni_attn.selector import current_scope
from omni_attn.testing import fake_device
from tests.layer.counting import counting_backend
from tests.layer.stands import HEAD_SIZE, assert_close, tensors

CPU = fake_device("cpu")


def chosen(**needs: object) -> tuple[str, str]:
    """Backend and source that a layer built here gets."""
    selection = Attention(4, 64, role="self", **needs).selection
    assert selection is not None
    return selection.backend, selection.source


@pytest.fixture(autouse=True)
def _two_backends(monkeypatch: pytest.MonkeyPatch):
    for variable in ("OMNI_ATTN_BACKEND", "DIFFUSION_ATTENTION_BACKEND"):
        monkeypatch.delenv(variable, raising=False)
    with counting_backend("OUTER"), counting_backend("INNER"), use_attention_config(None, platform=CPU):
        yield


def test_blocks_nest_and_end() -> None:
    assert chosen() == ("TORCH_SDPA", "platform default")
    with use_attention_config("OUTER", platform=CPU):
        assert chosen() == ("OUTER", "default")
        with use_attention_config({"per_role": {"self": "INNER"}}, platform=CPU):
            assert chosen() == ("INNER", "per_role['self']")
        assert chosen() == ("OUTER", "default")
        with use_attention_config(None, platform=CPU):  # an inner block replaces, it does not merge
            assert chosen() == ("TORCH_SDPA", "platform default")
    assert chosen() == ("TORCH_SDPA", "platform default")


def test_an_explicit_config_of_the_layer_wins() -> None:
    with use_attention_config("OUTER", platform=CPU):
        assert chosen(config=AttentionConfig(default="INNER")) == ("INNER", "default")
        assert chosen(config=AttentionConfig()) == ("TORCH_SDPA", "platform default")


def test_an_exception_leaves_no_trace() -> None:
    before = current_scope()
    with pytest.raises(KeyError), use_attention_config("OUTER", platform=CPU):
        raise KeyError
    with pytest.raises(BackendRejectedError), use_attention_config("CUDNN_ATTN", platform=CPU):
        Attention(4, 64, role="self")
    with pytest.raises(ConfigError), use_attention_config({"defalt": "OUTER"}, platform=CPU):
        pass
    assert current_scope() is before and chosen() == ("TORCH_SDPA", "platform default")


def in_thread(work: Callable[[], object]) -> object:
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join(timeout=30)
    return answers[0]


def test_threads_do_not_see_one_another() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> object:
        with use_attention_config("INNER", platform=CPU):
            inside.set()
            assert leave.wait(timeout=30)
            return chosen()

    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(other()))
    with use_attention_config("OUTER", platform=CPU):
        assert in_thread(lambda: chosen(config=None)[0]) not in ("OUTER", "INNER")
        thread.start()
        assert inside.wait(timeout=30)
        assert chosen() == ("OUTER", "default")
        leave.set()
        thread.join(timeout=30)
        assert answers == [("INNER", "default")] and chosen() == ("OUTER", "default")


def test_nothing_reads_it_in_forward() -> None:
    query, key, value = tensors(1, 3, 3)
    layer = Attention(4, HEAD_SIZE, role="self")
    expected, label = layer(query, key, value), layer.route
    with use_attention_config("OUTER", platform=CPU):
        record = AttentionMetadata()
        prepare_attention(layer, {"self": record}, {"self": (3, 3)})
        assert torch.equal(layer(query, key, value, record), expected)
        assert_close(layer(query[:, :1], key, value), expected[:, :1])
    assert layer.route == label == "TORCH_SDPA"


def test_hints_reach_the_request_and_own_ones_win() -> None:
    lengths = {"self": (32760, 32760), "cross": (32760, 512)}
    with use_attention_config(None, platform=CPU, dtype=torch.bfloat16, lengths=lengths):
        cross = Attention(4, 64, role="cross").request
        own = Attention(4, 64, role="cross", max_seqlen_k=7, dtype="float16").request
        unknown = Attention(4, 64, role="joint").request
    assert (cross.dtype, cross.max_seqlen_q, cross.max_seqlen_k) == ("bfloat16", 32760, 512)
    assert (own.dtype, own.max_seqlen_q, own.max_seqlen_k) == ("float16", 32760, 7)
    assert (unknown.dtype, unknown.max_seqlen_q, unknown.max_seqlen_k) == ("bfloat16", None, None)


def test_the_machine_is_named_once() -> None:
    with (
        pytest.raises(TypeError, match=r"platform.*device"),
        use_attention_config(None, platform=CPU, device="cpu"),
    ):
        pass


class Model(nn.Module):
    """One layer that cannot run where it is asked for, and one that nobody configured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.attn = Attention(4, 64, role="self", mask_usage="never", prefix="blocks.0.attn")
        self.text = Attention(2, 80, role="cross.text", role_category="cross", prefix="text.attn")


def test_collecting_states_requests_and_refuses_nothing() -> None:
    refused = use_attention_config("CUDNN_ATTN", platform=CPU, dtype="bfloat16", lengths={"self": (8, 8)})
    with refused, torch.device("meta"), collect_attention_requests() as found:
        model = Model()
    assert model.linear.weight.is_meta
    assert [(f.prefix, f.request.role, f.request.head_size) for f in found] == [
        ("blocks.0.attn", "self", 64),
        ("text.attn", "cross.text", 80),
    ]
    assert found[1].request.role_category == "cross"
    first = found[0].request
    assert (first.dtype, first.max_seqlen_q, first.mask_usage) == ("bfloat16", 8, "never")
    assert model.attn.selection is None and model.attn.impl is None


def test_a_layer_with_a_module_of_its_own_asks_for_no_backend() -> None:
    with collect_attention_requests() as found:
        layer = Attention(4, 64, role="self", custom_attention=nn.Identity(), skip_sequence_parallel=True)
        Attention(4, 64, role="cross")
    assert [collected.request.role for collected in found] == ["cross"]
    assert layer.group_id == "custom_attention"


def test_a_collected_layer_does_not_run() -> None:
    with collect_attention_requests():
        model = Model()
    with pytest.raises(MetadataError, match='"self"'):
        model.attn(*tensors(1, 3, 3))
    with pytest.raises(MetadataError, match='"self"'):
        prepare_attention(model, {"self": AttentionMetadata()}, {"self": (3, 3)})


def test_collecting_ends_with_its_block() -> None:
    with pytest.raises(KeyError), collect_attention_requests() as found:
        raise KeyError
    assert chosen() == ("TORCH_SDPA", "platform default") and found == []
