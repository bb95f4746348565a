"""What writers of backends allow themselves: constructors, names and places of their own, and all of it runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from omni_attn import Attention, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from omni_attn.backends.torch_sdpa import TorchSDPAImpl
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.ops.reference import reference_attention
from omni_attn.selector import select
from omni_attn.testing import fake_device
from tests.selection.stubs import HERE, DenseBuilder, DenseMetadata, PlainBackend, ReferenceImpl, ask, choose
from tests.selection.stubs import registered as registered_as

CPU = fake_device("cpu")


class SevenKeywords(AttentionImpl):
    """The documented constructor, to the letter, and nothing of the base class."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool,
        spec: Any,
        variant: str | None,
    ) -> None:
        self.given = (num_heads, num_kv_heads, head_size, causal, spec, variant)
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: DenseMetadata
    ) -> torch.Tensor:
        return reference_attention(query, key, value, softmax_scale=self.scale)[0].to(query.dtype)


class OwnState(DenseBuilder):
    """A constructor without arguments."""

    def __init__(self) -> None:
        self.built = 0

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> DenseMetadata:
        self.built += 1
        return DenseMetadata()


class PartOfTheGeometry(DenseBuilder):
    def __init__(self, head_size: int, causal: bool = True) -> None:
        self.got = (head_size, causal)


def make(
    name: str,
    impl: type[AttentionImpl] = ReferenceImpl,
    builder: type[AttentionMetadataBuilder] = DenseBuilder,
    **members: Any,
) -> type[AttentionBackend]:
    """A backend made at run time: all of them have this one qualified name."""
    members["get_name"] = staticmethod(lambda: name)
    members["get_impl_cls"] = staticmethod(lambda: impl)
    members["get_builder_cls"] = staticmethod(lambda: builder)
    return type("Made", (PlainBackend,), members)


def build(name: str, **needs: Any) -> Attention:
    with use_attention_config(name, platform=CPU):
        return Attention(2, 8, role="self", **needs)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 5, 2, 8, generator=generator) for _ in range(3)]


def runs(layer: Attention) -> None:
    for _ in range(2):
        expected = reference_attention(*tensors(), softmax_scale=layer.request.softmax_scale)[0]
        torch.testing.assert_close(layer(*tensors()).double(), expected, atol=1e-5, rtol=0)


# --- constructors


def test_an_impl_with_the_seven_documented_keywords_and_no_base() -> None:
    with registered_as(("SEVEN_TEST", make("SEVEN_TEST", SevenKeywords))):
        layer = build("SEVEN_TEST", softmax_scale=0.7)
        runs(layer)
        assert layer.selection is not None
        assert layer.impl.given == (2, 2, 8, False, layer.selection.spec, None)  # type: ignore[union-attr]


@pytest.mark.parametrize("needs", [{"window": (2, 0)}, {"value_head_size": 4}], ids=str)
def test_what_it_would_not_hear_of_is_refused_before(needs: dict[str, Any]) -> None:
    with (
        registered_as(("SEVEN_TEST", make("SEVEN_TEST", SevenKeywords))),
        pytest.raises(BackendRejectedError, match=r"SEVEN_TEST.*needs.*found"),
    ):
        build("SEVEN_TEST", **needs)


def test_a_builder_with_a_constructor_of_its_own() -> None:
    with registered_as(("OWN_TEST", make("OWN_TEST", builder=OwnState))):
        layers = nn.ModuleList(build("OWN_TEST") for _ in range(2))
        prepare_attention(layers, {"self": AttentionMetadata()}, {"self": (5, 5)})
        assert [layer._routes[0].builder.built for layer in layers] == [1, 0]
        runs(layers[0])
    with registered_as(("PART_TEST", make("PART_TEST", builder=PartOfTheGeometry))):
        layer = build("PART_TEST")
        assert layer._routes[0].builder.got == (8, False)
        runs(layer)


# --- reads


@pytest.mark.parametrize("form", [tuple, list, set, frozenset])
def test_reads_is_any_collection(form: type[Iterable[str]]) -> None:
    class Reads(DenseBuilder):
        reads: ClassVar[Any] = form(["attn_mask", "step"])  # type: ignore[call-arg]
        built: ClassVar[list[int | None]] = []

        def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> DenseMetadata:
            self.built.append(record.step)
            return DenseMetadata()

    masked = AttentionMetadata(attn_mask=torch.tensor([[True] * 4 + [False]]))
    with registered_as(("READS_TEST", make("READS_TEST", builder=Reads))):
        layer = build("READS_TEST")
        for step in (0, 1, 1):
            record = masked.at_step(step)
            prepare_attention(layer, {"self": record}, {"self": (5, 5)})
            layer(*tensors(), record)
        assert Reads.built == [0, 1, 1]
        with pytest.raises(MetadataError, match="cu_seqlens_q"):
            layer(*tensors(), AttentionMetadata(cu_seqlens_q=(0, 2, 5)))


# --- names and places


@pytest.mark.parametrize("spelling", ["my_attn", "My_Attn", "MY_ATTN"])
def test_get_name_in_lower_case(spelling: str) -> None:
    class Mine(ReferenceImpl):
        pass

    with registered_as(("my_attn", make("my_attn"))):
        layer = build(spelling)
        runs(layer)
        assert layer.selection is not None
        assert {verdict.backend for verdict in layer.selection.verdicts} == {"MY_ATTN"}
        assert type(build("my_attn", impl_overrides={spelling: Mine}).impl) is Mine


MODULE = f"""
from {HERE} import PlainBackend
class Outer:
    class Inner(PlainBackend):
        class Innermost(PlainBackend):
            pass
"""


@pytest.mark.parametrize("inside", ["Outer.Inner", "Outer.Inner.Innermost"])
def test_a_class_inside_a_class(inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_with_nested_classes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with registered_as(("PLAIN_TEST", f"plugin_with_nested_classes:{inside}")):
        selection = select(ask(), choose("PLAIN_TEST"), CPU)
        assert selection.backend_cls.__qualname__ == inside
        assert inside.rpartition(".")[2] in selection.class_path
        runs(build("PLAIN_TEST"))
    with (
        registered_as(("PLAIN_TEST", "plugin_with_nested_classes:Outer.Missing")),
        pytest.raises(ValueError, match=r"PLAIN_TEST.*Outer\.Missing"),
    ):
        select(ask(), choose("PLAIN_TEST"), CPU)


def test_two_dynamic_classes_with_one_qualified_name_share_nothing() -> None:
    built: list[str] = []

    def backend(name: str, answer: float) -> type[AttentionBackend]:
        def forward(self: Any, query: torch.Tensor, *_: Any) -> torch.Tensor:
            return torch.full_like(query, answer)

        def build(self: Any, *_: Any) -> DenseMetadata:
            built.append(name)
            return DenseMetadata()

        impl = type("MadeImpl", (ReferenceImpl,), {"forward": forward})
        return make(name, impl, type("MadeBuilder", (DenseBuilder,), {"build": build}))

    with registered_as(("ONE_TEST", backend("ONE_TEST", 1.0)), ("TWO_TEST", backend("TWO_TEST", 2.0))):
        model, record = nn.ModuleList([build("ONE_TEST"), build("TWO_TEST")]), AttentionMetadata()
        assert model[0].group_id != model[1].group_id
        prepare_attention(model, {"self": record}, {"self": (5, 5)})
        for _ in range(2):
            assert [layer(*tensors(), record).mean().item() for layer in model] == [1.0, 2.0]
        assert built == ["ONE_TEST", "TWO_TEST"]


def test_a_subclass_of_a_built_in_impl_under_a_name_of_its_own() -> None:
    class Negated(TorchSDPAImpl):
        def forward(self, *given: Any, **inputs: Any) -> torch.Tensor:
            return -super().forward(*given, **inputs)

    from omni_attn.backends.masked import MaskedMetadataBuilder

    with registered_as(("NEGATED_TEST", make("NEGATED_TEST", Negated, MaskedMetadataBuilder))):
        layer, plain = build("NEGATED_TEST"), build("TORCH_SDPA")
        for _ in range(3):
            assert torch.equal(layer(*tensors()), -plain(*tensors()))
