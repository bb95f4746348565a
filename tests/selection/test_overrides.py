"""Impl classes of a model's own behind a selected backend, and modules that replace attention altogether."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from omni_attn import Attention, prepare_attention
from omni_attn.backends.abstract import AttentionImpl
from omni_attn.backends.cudnn_attn import CuDNNAttentionImpl
from omni_attn.backends.masked import MaskedMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.torch_sdpa import TorchSDPABackend, TorchSDPAImpl
from omni_attn.errors import BackendRejectedError
from omni_attn.platforms import CpuPlatform
from omni_attn.report import attention_report
from omni_attn.selector import use_attention_config
from omni_attn.testing import fake_device
from tests.selection.stubs import OwnSDPAImpl, ReferenceImpl, registered

CPU = fake_device("cpu")
OWN_PATH = "tests.selection.stubs.OwnSDPABackend"


class CountingBuilder(MaskedMetadataBuilder):
    built: ClassVar[list[tuple[int, int]]] = []

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> Any:
        self.built.append(lengths)
        return super().build(record, lengths)


class DoublingImpl(TorchSDPAImpl):
    """What a model might bring: the selected kernel, and something after it."""

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.constructed_with = geometry

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(*args, **kwargs)


class OwnLayoutImpl(TorchSDPAImpl):
    builder_cls = CountingBuilder


class OwnPlatform(CpuPlatform):
    """A device family with a class of its own for a known name."""

    class_paths: ClassVar[Mapping[str, str]] = {"TORCH_SDPA": OWN_PATH}


def build(
    overrides: Mapping[str, type[AttentionImpl]] | None = None,
    *,
    config: object = None,
    platform: Any = CPU,
    **needs: Any,
) -> Attention:
    with use_attention_config(config, platform=platform):  # type: ignore[arg-type]
        return Attention(2, 8, **({"role": "self"} | needs), impl_overrides=overrides)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 5, 2, 8, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("config", [None, "TORCH_SDPA"])
def test_an_override_runs_and_changes_nothing_else(config: str | None) -> None:
    plain, own = build(config=config), build({"TORCH_SDPA": DoublingImpl}, config=config)
    assert type(plain.impl) is TorchSDPAImpl and type(own.impl) is DoublingImpl
    assert own.selection == plain.selection and own.request == plain.request
    torch.testing.assert_close(own(*tensors()), 2 * plain(*tensors()))
    assert plain.selection is not None
    given = own.impl.constructed_with  # type: ignore[union-attr]
    assert given["spec"] is plain.selection.spec
    assert {name: getattr(plain.impl, name) for name in given} == given
    [row] = attention_report(own).rows
    assert (row.backend, row.impl) == ("TORCH_SDPA", "DoublingImpl")


def test_it_must_subclass_the_selected_impl() -> None:
    with pytest.raises(TypeError) as caught:
        build({"TORCH_SDPA": ReferenceImpl})
    assert all(part in str(caught.value) for part in ("ReferenceImpl", "TorchSDPAImpl", "TORCH_SDPA"))
    with pytest.raises(TypeError, match="must subclass"):
        build({"TORCH_SDPA": DoublingImpl.forward})  # type: ignore[dict-item]


@pytest.mark.parametrize("unselected", [ReferenceImpl, DoublingImpl, CuDNNAttentionImpl])
def test_an_unselected_entry_is_inert(unselected: type[AttentionImpl]) -> None:
    plain = build()
    own = build({"CUDNN_ATTN": unselected, "NEVER_REGISTERED": unselected})
    assert type(own.impl) is TorchSDPAImpl
    assert (own.selection, own.group_id) == (plain.selection, plain.group_id)


def test_an_override_does_not_hide_a_refusal() -> None:
    with pytest.raises(BackendRejectedError, match="CUDNN_ATTN"):
        build({"CUDNN_ATTN": CuDNNAttentionImpl}, config="CUDNN_ATTN")


def test_it_follows_the_backend_that_a_fallback_selects() -> None:
    spec = {"backend": "CUDNN_ATTN", "fallback": ["TORCH_SDPA"]}
    layer = build({"CUDNN_ATTN": ReferenceImpl, "TORCH_SDPA": DoublingImpl}, config={"default": spec})
    assert type(layer.impl) is DoublingImpl


def test_a_platforms_own_subclass_is_respected() -> None:
    platform = OwnPlatform(CPU)
    plain = build(platform=platform)
    assert type(plain.impl) is OwnSDPAImpl
    assert plain.selection is not None and plain.selection.class_path == OWN_PATH

    class OverOwn(OwnSDPAImpl):
        pass

    own = build({"TORCH_SDPA": OverOwn}, platform=platform)
    assert type(own.impl) is OverOwn and own.selection == plain.selection
    with pytest.raises(TypeError, match=r"DoublingImpl.*OwnSDPAImpl"):
        build({"TORCH_SDPA": DoublingImpl}, platform=platform)


def test_a_registration_comes_before_the_platforms_table() -> None:
    with registered(("TORCH_SDPA", TorchSDPABackend)):
        assert type(build(platform=OwnPlatform(CPU)).impl) is TorchSDPAImpl
    assert type(build(platform=OwnPlatform(CPU)).impl) is OwnSDPAImpl


def test_its_builder_prepares_and_its_group_is_its_own() -> None:
    CountingBuilder.built.clear()
    overrides = {"TORCH_SDPA": OwnLayoutImpl}
    model = nn.ModuleList([build(), build(overrides), build(overrides)])
    plain, first, second = model
    assert first.group_id == second.group_id != plain.group_id
    record = AttentionMetadata()
    prepare_attention(model, {"self": record}, lengths={"self": (5, 5)})
    assert CountingBuilder.built == [(5, 5)]
    for layer in model:
        torch.testing.assert_close(layer(*tensors(), record), plain(*tensors()))
    assert CountingBuilder.built == [(5, 5)]


def test_two_overrides_do_not_share_a_group() -> None:
    groups = {build({"TORCH_SDPA": impl}).group_id for impl in (TorchSDPAImpl, DoublingImpl, OwnLayoutImpl)}
    assert len(groups) == 3 and build().group_id in groups
    assert all(isinstance(group, str) for group in groups)


def test_impls_of_one_factory_do_not_share_a_group() -> None:
    """Classes that a function makes have one name, and what one builder prepares is nothing for the other."""

    def make(builder: type[MaskedMetadataBuilder]) -> type[TorchSDPAImpl]:
        class Made(TorchSDPAImpl):
            builder_cls = builder

        return Made

    made = [build({"TORCH_SDPA": make(builder)}) for builder in (CountingBuilder, MaskedMetadataBuilder)]
    assert made[0].group_id != made[1].group_id


# --- custom_attention


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        self.seen.append(metadata)
        return value.mean(1, keepdim=True).expand_as(query)


def test_custom_attention_owns_its_communication() -> None:
    with (
        pytest.raises(ValueError, match="skip_sequence_parallel=True"),
        use_attention_config(None, platform=CPU),
    ):
        Attention(2, 8, role="self", custom_attention=Mean())


def test_custom_attention_is_called_and_nothing_is_selected() -> None:
    module, record = Mean(), AttentionMetadata()
    with use_attention_config("CUDNN_ATTN", platform=CPU):  # which could not run here
        layer = Attention(2, 8, role="self", custom_attention=module, skip_sequence_parallel=True)
    query, key, value = tensors()
    torch.testing.assert_close(layer(query, key, value, record), value.mean(1, keepdim=True).expand_as(query))
    layer(query, key, value)
    assert module.seen == [record, None]
    assert (layer.selection, layer.impl) == (None, None) and not layer.reads("gate_compress")
    [row] = attention_report(layer).rows
    assert (row.role, row.impl) == ("self", "Mean") and "custom" in row.backend
