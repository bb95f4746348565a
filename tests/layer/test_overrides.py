"""impl_overrides and custom_attention: a model's own kernel, behind the selection or in place of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from omni_attn import (
    Attention,
    AttentionConfig,
    AttentionMetadata,
    attention_report,
    prepare_attention,
    use_attention_config,
)
from omni_attn.backends.masked import MaskedMetadata, MaskedMetadataBuilder
from omni_attn.backends.registry import DiffusionAttentionBackendEnum
from omni_attn.backends.torch_sdpa import TorchSDPABackend, TorchSDPAImpl
from omni_attn.errors import MetadataError
from tests.layer.counting import counting_backend
from tests.layer.stands import HEAD_SIZE, Stand, every_stand, tensors


class Doubled(TorchSDPAImpl):
    """An override whose numbers differ."""

    def forward(self, *arguments: Any, **inputs: Any) -> torch.Tensor:
        return super().forward(*arguments, **inputs) * 2


class Stranger:
    """No subclass of anything."""


def build(overrides: dict[str, Any], backend: str = "TORCH_SDPA", **needs: Any) -> Attention:
    config = AttentionConfig(default=backend)
    with use_attention_config(config, device="cpu"):
        return Attention(4, HEAD_SIZE, role="self", impl_overrides=overrides, **needs)


@pytest.mark.parametrize(
    "name", ["TORCH_SDPA", "torch_sdpa", "SDPA", DiffusionAttentionBackendEnum.TORCH_SDPA], ids=str
)
def test_the_selected_backend_runs_the_override(name: str) -> None:
    query, key, value = tensors(1, 3, 4)
    layer, plain = build({name: Doubled}), build({})
    assert torch.equal(layer(query, key, value), plain(query, key, value) * 2)
    assert type(layer.impl) is Doubled and layer.group_id != plain.group_id
    # facts, constructor options and selection stay
    assert layer.selection is not None and plain.selection is not None
    assert layer.selection.backend_cls is TorchSDPABackend and layer.selection == plain.selection
    assert vars(layer.impl).keys() >= {"num_heads", "softmax_scale", "causal", "spec", "variant", "window"}
    assert attention_report(layer).rows[0].impl == "Doubled"


@every_stand
def test_an_override_must_subclass_the_selected_impl(stand: Stand) -> None:
    with stand.kernels(), pytest.raises(TypeError) as raised:
        stand.layer(4, HEAD_SIZE, impl_overrides={stand.name: Stranger})
    assert "Stranger" in str(raised.value)
    assert stand.backend.get_impl_cls().__name__ in str(raised.value)


def test_an_object_in_place_of_a_class_is_refused() -> None:
    with pytest.raises(TypeError, match="TorchSDPAImpl"):
        build({"TORCH_SDPA": Doubled.forward})


def test_entries_of_unselected_backends_are_inert() -> None:
    with counting_backend("COUNTING") as tally:
        layer = build({"TORCH_SDPA": Doubled, "FASTVIDEO_VSA": Stranger}, backend="COUNTING")
        plain = build({}, backend="COUNTING")
        layer(*tensors(1, 3, 3))
        assert len(tally.products) == 1 and layer.group_id == plain.group_id


def test_an_override_may_bring_its_builder() -> None:
    made = []

    class Builder(MaskedMetadataBuilder):
        def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> MaskedMetadata:
            made.append(lengths)
            return super().build(record, lengths)

    class WithBuilder(TorchSDPAImpl):
        builder_cls = Builder

    layer = build({"TORCH_SDPA": WithBuilder})
    prepare_attention(layer, {"self": AttentionMetadata()}, {"self": (3, 4)})
    assert made == [(3, 4)]


def test_overrides_that_one_function_makes_do_not_share_what_they_prepare() -> None:
    def make(lengths_of: list[tuple[int, int]]) -> type[TorchSDPAImpl]:
        class Builder(MaskedMetadataBuilder):
            def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> MaskedMetadata:
                lengths_of.append(lengths)
                return super().build(record, lengths)

        class Local(TorchSDPAImpl):
            builder_cls = Builder

        return Local

    first: list[tuple[int, int]] = []
    second: list[tuple[int, int]] = []
    model = nn.ModuleList([build({"TORCH_SDPA": make(lengths)}) for lengths in (first, second)])
    prepare_attention(model, {"self": AttentionMetadata()}, {"self": (3, 4)})
    assert first == second == [(3, 4)]


class Own(nn.Module):
    """A module of the model's own; remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.seen: list[AttentionMetadata | None] = []

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata | None
    ) -> torch.Tensor:
        self.seen.append(metadata)
        return query * self.scale


def test_custom_attention_runs_in_place_of_any_backend() -> None:
    own, record = Own(), AttentionMetadata()
    query, key, value = tensors(1, 3, 4)
    # even a choice that cannot run here is not asked for: nothing is selected
    layer = build({}, backend="CUDNN_ATTN", custom_attention=own, skip_sequence_parallel=True)
    assert layer.selection is None and layer.impl is None and not layer.reads("gate_compress")
    prepare_attention(layer, {"self": record}, {"self": (3, 4)})
    assert torch.equal(layer(query, key, value, record), query * 3)
    assert own.seen == [record]
    assert [name for name, _ in layer.named_parameters()] == ["custom_attention.scale"]


def test_custom_attention_requires_to_skip_sequence_parallelism() -> None:
    with pytest.raises(ValueError, match=r"custom_attention.*skip_sequence_parallel=True"):
        build({}, custom_attention=Own())


def test_skipping_sequence_parallelism_takes_it_out_of_the_request() -> None:
    assert build({}, sequence_parallel="ring", skip_sequence_parallel=True).request.sequence_parallel is None
    assert build({}, sequence_parallel="ring").request.sequence_parallel == "ring"


def test_a_split_sequence_does_not_run_without_communication() -> None:
    with use_attention_config(AttentionConfig(), device="cpu"):
        layer = Attention(4, HEAD_SIZE, role="self", sequence_parallel="ulysses")
        skipping = Attention(
            4, HEAD_SIZE, role="cross", sequence_parallel="ulysses", skip_sequence_parallel=True
        )
    query, key, value = tensors(1, 3, 4)
    with pytest.raises(MetadataError, match="ulysses"):
        layer(query, key, value)
    assert skipping(query, key, value).shape == (1, 3, 4, HEAD_SIZE)
