"""prepare_attention: each group's builder works once per step, and only as often as its fields change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from omni_attn import Attention, AttentionConfig, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.errors import MetadataError
from omni_attn.ops.reference import reference_attention
from tests.layer.counting import Tally, counting_backend
from tests.layer.stands import HEAD_SIZE, assert_close, tensors

LENGTHS = {"self": (6, 6), "cross": (6, 4)}
READS_NOTHING_OF_A_STEP = frozenset({"attn_mask", "vsa_dit_seq_shape"})


class Blocks(nn.Module):
    """Pairs of a self and a cross layer; `narrow` self layers of another geometry behind them."""

    def __init__(self, pairs: int, narrow: int = 0, backend: str = "COUNTING") -> None:
        super().__init__()
        with use_attention_config(AttentionConfig(default=backend), device="cpu"):
            roles = ["self", "cross"] * pairs
            self.layers = nn.ModuleList(Attention(4, HEAD_SIZE, role=role) for role in roles)
            self.layers.extend(Attention(2, 16, role="self") for _ in range(narrow))

    def forward(self, records: dict[str, AttentionMetadata]) -> None:
        for layer in self.layers:
            queries, keys = LENGTHS[layer.role]
            heads, size = layer.request.num_heads, layer.request.head_size
            layer(*tensors(1, queries, keys, heads=heads, size=size), records[layer.role])


def lengths_built(tally: Tally) -> list[tuple[int, int]]:
    return [lengths for _, lengths in tally.builds]


def test_once_per_step_per_group() -> None:
    with counting_backend("COUNTING") as tally:
        model = Blocks(pairs=3, narrow=2)
        assert len({layer.group_id for layer in model.layers}) == 2
        for step in range(1, 4):
            records = {"self": AttentionMetadata(), "cross": AttentionMetadata()}
            prepare_attention(model, records, LENGTHS)
            model(records)
            # self in two geometries, cross in one
            assert len(tally.builds) == 3 * step and len(tally.products) == 8 * step
        assert sorted(lengths_built(tally)[:3]) == [(6, 4), (6, 6), (6, 6)]
        # layers of one group and record get the very same object
        assert len({id(product) for product in tally.products[:3:2]}) == 1


def test_preparing_again_builds_nothing() -> None:
    with counting_backend("COUNTING") as tally:
        model = Blocks(pairs=2)
        records = {"self": AttentionMetadata(), "cross": AttentionMetadata()}
        for _ in range(3):
            prepare_attention(model, records, LENGTHS)
        assert len(tally.builds) == 2
        prepare_attention(model, records, {**LENGTHS, "self": (8, 8)})
        assert lengths_built(tally)[2:] == [(8, 8)]


@pytest.mark.parametrize(
    ("reads", "builds"),
    [
        (READS_NOTHING_OF_A_STEP, 1),
        (READS_NOTHING_OF_A_STEP | {"step"}, 5),
        (READS_NOTHING_OF_A_STEP | {"sigma"}, 5),
        (READS_NOTHING_OF_A_STEP | {"num_steps"}, 5),
    ],
)
def test_over_a_loop_a_builder_works_again_only_if_it_reads_the_step(
    reads: frozenset[str], builds: int
) -> None:
    with counting_backend("COUNTING", reads=reads) as tally:
        model = Blocks(pairs=3)
        first = AttentionMetadata(vsa_dit_seq_shape=(1, 2, 3))
        for step in range(5):
            record = first.at_step(step, num_steps=5, sigma=1 - step / 5)
            prepare_attention(model, {"self": record}, LENGTHS)
            first = record  # the model derives each step's record from the last one's
        assert len(tally.builds) == builds
        assert [record.step for record, _ in tally.builds] == list(range(builds))


def test_over_a_loop_from_one_base_record() -> None:
    """Also where each step derives from the same base, once something was prepared on it."""
    with counting_backend("COUNTING") as tally:
        model, base = Blocks(pairs=2), AttentionMetadata()
        prepare_attention(model, {"self": base}, LENGTHS)
        for step in range(4):
            prepare_attention(model, {"self": base.at_step(step=step)}, LENGTHS)
        assert len(tally.builds) == 1


def test_an_older_step_keeps_its_own_product() -> None:
    with counting_backend("COUNTING", reads=frozenset({"sigma"})) as tally:
        model = Blocks(pairs=1)
        early = AttentionMetadata().at_step(0, sigma=0.9)
        late = early.at_step(1, sigma=0.1)
        for record in (early, late):
            prepare_attention(model, {"self": record}, LENGTHS)
        for record in (late, early):
            model.layers[0](*tensors(1, 6, 6), record)
        assert [product.sigma for product in tally.products] == [0.1, 0.9]


def test_layer_inputs_share_what_was_prepared() -> None:
    with counting_backend("COUNTING", layer_inputs=frozenset({"gate"})) as tally:
        model, record = Blocks(pairs=3), AttentionMetadata()
        prepare_attention(model, {"self": record}, LENGTHS)
        for index, layer in enumerate(model.layers):
            if layer.role == "self":
                layer(*tensors(1, 6, 6), record.with_layer_inputs(gate=torch.full((), index)))
        assert len(tally.builds) == 1 and len(tally.products) == 3


def test_without_preparation_the_first_call_builds() -> None:
    with counting_backend("COUNTING") as tally:
        model = Blocks(pairs=3)
        model({"self": AttentionMetadata(), "cross": AttentionMetadata()})
        assert sorted(lengths_built(tally)) == [(6, 4), (6, 6)] and len(tally.products) == 6


def test_a_call_of_other_lengths_than_prepared() -> None:
    with counting_backend("COUNTING") as tally:
        model, record = Blocks(pairs=1), AttentionMetadata()
        prepare_attention(model, {"self": record}, LENGTHS)
        with pytest.raises(MetadataError) as raised:
            model.layers[0](*tensors(1, 6, 9), record)
        for part in ('"self"', "6", "9"):
            assert part in str(raised.value)
        assert not tally.products


def test_a_record_with_another_mask_is_prepared_anew() -> None:
    """dataclasses.replace is how anybody changes a frozen record; what was prepared belongs to the old fields."""
    query, key, value = tensors(1, 3, 4)
    first, second = (torch.tensor([row]).bool() for row in ([1, 1, 0, 0], [0, 1, 1, 1]))
    with use_attention_config(AttentionConfig(), device="cpu"):
        layer = Attention(4, HEAD_SIZE, role="self")
    record = AttentionMetadata(attn_mask=first)
    layer(query, key, value, record)
    output = layer(query, key, value, dataclasses.replace(record, attn_mask=second))
    assert_close(output, reference_attention(query, key, value, attn_mask=second)[0])


def test_one_record_for_calls_of_two_lengths() -> None:
    with counting_backend("COUNTING"):
        record = AttentionMetadata()
        with pytest.raises(MetadataError) as raised:
            prepare_attention(Blocks(pairs=1), {"self": record, "cross": record}, LENGTHS)
    for part in ("self", "cross", "(6, 6)", "(6, 4)"):
        assert part in str(raised.value)


def test_one_record_for_roles_of_one_length() -> None:
    with counting_backend("COUNTING") as tally:
        record = AttentionMetadata()
        prepare_attention(
            Blocks(pairs=2), {"self": record, "cross": record}, {"self": (6, 6), "cross": (6, 6)}
        )
        assert len(tally.builds) == 1


def test_an_unknown_role() -> None:
    with counting_backend("COUNTING"), pytest.raises(MetadataError, match=r"crss.*\['cross', 'self'\]"):
        prepare_attention(Blocks(pairs=1), {"crss": AttentionMetadata()}, {"crss": (6, 4)})


def test_a_role_without_lengths() -> None:
    with counting_backend("COUNTING"), pytest.raises(MetadataError, match=r'"cross".*lengths'):
        prepare_attention(Blocks(pairs=1), {"cross": AttentionMetadata()}, {"self": (6, 6)})


def test_a_record_that_the_builder_does_not_read_is_refused() -> None:
    """What binds the result may not be overlooked: masks and packing need a builder that reads them."""
    stated = {
        "attn_mask": AttentionMetadata(attn_mask=torch.tensor([[True] * 5 + [False]])),
        "cu_seqlens_q": AttentionMetadata(cu_seqlens_q=(0, 2, 6)),
    }
    for field, record in stated.items():
        with counting_backend("COUNTING") as tally, pytest.raises(MetadataError) as raised:
            prepare_attention(Blocks(pairs=1), {"self": record}, LENGTHS)
        assert not tally.builds and field in str(raised.value) and "COUNTING" in str(raised.value)
    with counting_backend("COUNTING", reads=READS_NOTHING_OF_A_STEP) as tally:
        prepare_attention(Blocks(pairs=1), {"self": stated["attn_mask"]}, LENGTHS)
        assert len(tally.builds) == 1
