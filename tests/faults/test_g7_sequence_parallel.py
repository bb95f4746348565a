"""Public faults, group G7: heads that ranks do not share evenly, joint keys in causal attention, odd lengths.

B44, B46, B47. Ranks are threads that exchange in memory. Recipes run on every strategy with exact numbers of one
process beside them, and on every registered backend with its stand-in kernels: what its facts do not claim it has to
refuse, on every rank.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from omni_attn import Attention, AttentionMetadata, use_attention_config
from omni_attn.errors import BackendRejectedError, ConfigError, MetadataError
from omni_attn.ops.reference import reference_attention
from omni_attn.parallel import Parallel, ParallelConfig, use_parallel
from omni_attn.parallel.dispatch import STRATEGIES
from omni_attn.testing import fake_ranks
from omni_attn.testing.ranks import ThreadCollectives
from tests.layer.limits import Limits, length_limits
from tests.layer.stands import HEAD_SIZE, STANDS, Stand, assert_close, every_stand, tensors

Config = dict[str, int]
Order = Literal["front", "rear"]

#: One configuration of each strategy, for so many ranks.
BY_RANKS: dict[str, dict[int, Config]] = {
    "ulysses": {n: {"ulysses_degree": n} for n in (2, 4, 8, 16)},
    "ring": {n: {"ring_degree": n} for n in (2, 4, 8)},
    "ulysses_ring": {n: {"ulysses_degree": 2, "ring_degree": n // 2} for n in (4, 8)},
    "allgather_kv": {n: {"allgather_degree": n} for n in (2, 4, 8)},
}
PAIRS = [(mode, ranks) for mode, by_ranks in BY_RANKS.items() for ranks in by_ranks]


def test_every_strategy_meets_the_recipes() -> None:
    assert BY_RANKS.keys() == STRATEGIES.keys()


def run(
    config: Config, call: list[Tensor], record: AttentionMetadata, build: Any, **streams: Tensor
) -> Tensor:
    """Output of all ranks in order: split, prepared, attended to and put together."""
    joint = record.joint_tokens
    lengths = (call[0].shape[1] + joint[0], call[1].shape[1] + joint[1])

    def work(parallel: Parallel) -> Tensor:
        layer: Attention = build()
        # A record of its own for each rank, as processes have.
        own = AttentionMetadata(**{name: getattr(record, name) for name in record.stated})
        layer.prepare(own, lengths)
        return layer(*map(parallel.split, call), own.with_layer_inputs(**streams) if streams else own)

    return torch.cat(fake_ranks(config, work), dim=1)


def builder(heads: int, kv_heads: int, size: int, **needs: Any) -> Any:
    def build() -> Attention:
        with use_attention_config("TORCH_SDPA", device="cpu"):
            return Attention(heads, size, role="self", num_kv_heads=kv_heads, **needs)

    return build


# -- B44: heads that ranks do not share evenly

HEADS = [((28, 7), 2), ((30, 30), 4), ((56, 56), 16), ((8, 2), 4), ((5, 1), 2)]


@pytest.mark.parametrize(("heads", "ranks"), HEADS)
def test_b44_uneven_heads_are_spread(heads: tuple[int, int], ranks: int) -> None:
    call = list(tensors(1, 6, 6, heads=heads[0], kv_heads=heads[1], size=8))
    output = run({"ulysses_degree": ranks}, call, AttentionMetadata(), builder(*heads, 8))
    assert output.shape == (1, 6, heads[0], 8)  # no head that was not asked for
    assert_close(output, reference_attention(*call)[0])


@pytest.mark.parametrize(("heads", "ranks"), HEADS)
def test_b44_uneven_heads_around_a_ring(heads: tuple[int, int], ranks: int) -> None:
    call = list(tensors(1, 6, 6, heads=heads[0], kv_heads=heads[1], size=8))
    config = {"ulysses_degree": ranks, "ring_degree": 2}
    output = run(config, call, AttentionMetadata(), builder(*heads, 8))
    assert output.shape == (1, 6, heads[0], 8)
    assert_close(output, reference_attention(*call)[0])


@pytest.mark.parametrize("ring_degree", [1, 2])
@pytest.mark.parametrize(("heads", "ranks"), HEADS)
def test_b44_uneven_heads_are_refused_when_strict(
    heads: tuple[int, int], ranks: int, ring_degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the layer is built: nothing was exchanged, on any rank."""
    for name in ("start_all_to_all", "start_all_gather", "share_counts"):
        monkeypatch.setattr(ThreadCollectives, name, None)
    config = ParallelConfig(ulysses_degree=ranks, ring_degree=ring_degree, uneven_heads="refuse")
    texts: list[str] = []

    def work(parallel: Parallel) -> None:
        with pytest.raises(ConfigError) as raised:
            builder(*heads, 8)()
        texts.append(str(raised.value))

    fake_ranks(config, work)
    assert len(texts) == config.size and len(set(texts)) == 1
    for words in ('role "self"', f"{heads[0]} query heads", f"{heads[1]} key-value heads", f"{ranks} ranks"):
        assert words in texts[0]


def test_b44_heads_that_divide_pass_when_strict() -> None:
    call = list(tensors(1, 6, 6, heads=8, kv_heads=2, size=8))
    config: Any = {"ulysses_degree": 2, "uneven_heads": "refuse"}
    assert_close(run(config, call, AttentionMetadata(), builder(8, 2, 8)), reference_attention(*call)[0])


@every_stand
@pytest.mark.parametrize("heads", [(6, 3), (5, 5), (4, 1)])
def test_b44_every_backend(stand: Stand, heads: tuple[int, int]) -> None:
    tokens = stand.tokens(6)
    call = [x.to(stand.dtype) for x in tensors(1, tokens, tokens, heads=heads[0], kv_heads=heads[1])]
    needs = {"num_heads": heads[0], "num_kv_heads": heads[1]}
    outcome = stand_outcome(stand, {"ulysses_degree": 2}, call, needs)
    if outcome is not None:
        assert_close(outcome, reference_attention(*call)[0])


def stand_outcome(stand: Stand, config: Config, call: list[Tensor], needs: dict[str, Any]) -> Tensor | None:
    """What ranks give with this backend; None where its facts refuse the layer, or what a rank would attend with."""
    made = ParallelConfig.model_validate(config)
    dtype = str(stand.dtype).removeprefix("torch.")
    geometry = {name: value for name, value in needs.items() if name != "num_heads"}
    lengths = (call[0].shape[1], call[1].shape[1])

    def build() -> Attention:
        return stand.layer(needs["num_heads"], HEAD_SIZE, dtype=dtype, **geometry)

    def work(parallel: Parallel) -> Tensor | str:
        layer, record = build(), AttentionMetadata()
        try:
            layer.prepare(record, lengths)
        except MetadataError as error:
            return str(error)  # with the others waiting for this rank, unless they are refused too
        return layer(*map(parallel.split, call), record)

    with stand.kernels():
        if stand.accepts(**needs, sequence_parallel=made.mode, dtype=dtype):
            outcomes = fake_ranks(made, work)
            if all(isinstance(outcome, Tensor) for outcome in outcomes):
                return torch.cat(outcomes, dim=1)
            assert (
                made.mode == "allgather_kv"
            )  # whose ranks attend from fewer tokens than the facts were asked about
            limits = list(length_limits(stand.facts, (lengths[0] // made.size, lengths[1])))
            assert all(stand.name in text and Limits(tuple(limits)).told_by(text) for text in outcomes)
            return None
        with use_parallel(made), pytest.raises(BackendRejectedError) as raised:
            build()
    assert stand.name in str(raised.value)
    return None


# -- B46: joint keys in causal attention


def joint_reference(query: Tensor, keys: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]) -> Tensor:
    """Joint keys seen by all, a triangle over the others; the order of keys is nothing that attention sees."""
    key, value = (torch.cat(pair, dim=1) for pair in zip(keys, own, strict=True))
    length, joint = query.shape[1], keys[0].shape[1]
    keep = torch.ones(length, joint + length, dtype=torch.bool).tril(joint)
    return reference_attention(query, key, value, attn_mask=keep[None, None])[0]


def test_b46_the_naive_triangle_is_far_off() -> None:
    """Over [local, joint], as one stream of positions, it hides the joint keys from every query but the last ones."""
    query, key, value = tensors(1, 4, 4, size=8)
    _, joint_key, joint_value = tensors(1, 2, 2, size=8, seed=1)
    right = joint_reference(query, (joint_key, joint_value), (key, value))
    naive = reference_attention(
        query, torch.cat((key, joint_key), dim=1), torch.cat((value, joint_value), dim=1), causal=True
    )[0]
    assert (right - naive).abs().max() > 0.5


@pytest.mark.parametrize("order", ["front", "rear"])
@pytest.mark.parametrize(("mode", "ranks"), [("ring", 1), *((m, r) for m, r in PAIRS if r <= 4)])
@pytest.mark.parametrize("length", [4, 7])
def test_b46_joint_keys_are_seen_by_all(mode: str, ranks: int, order: Order, length: int) -> None:
    query, key, value = tensors(2, length, length, size=8)
    _, joint_key, joint_value = tensors(2, 2, 2, size=8, seed=1)
    record = AttentionMetadata(joint_tokens=(0, 2), joint_order=order)
    streams = {"joint_key": joint_key, "joint_value": joint_value}
    config = BY_RANKS[mode].get(ranks, {"ring_degree": 1})
    output = run(config, [query, key, value], record, builder(4, 4, 8, causal=True), **streams)
    assert_close(output, joint_reference(query, (joint_key, joint_value), (key, value)))


@pytest.mark.parametrize("order", ["front", "rear"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_b46_joint_queries_are_refused_by_name(ranks: int, order: Order) -> None:
    """They have no position in the triangle."""
    record = AttentionMetadata(joint_tokens=(2, 2), joint_order=order)
    call = list(tensors(1, 4, 4, size=8))
    with pytest.raises(MetadataError, match=rf"causal.*joint_order='{order}'"):
        run({"ring_degree": ranks}, call, record, builder(4, 4, 8, causal=True))


# -- B47: odd lengths


def tagged(length: int, batch: int = 2) -> list[Tensor]:
    """Values that carry their position, as rotary embeddings do, so that a token in a wrong place shows."""
    query, key, value = tensors(batch, length, length, size=8)
    place = torch.arange(length, dtype=torch.float32)[None, :, None, None]
    turn = torch.cat((torch.cos(place / 3), torch.sin(place / 3)), dim=-1).repeat(1, 1, 1, 4)
    return [query * turn, key * turn, value + place]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize(("mode", "ranks"), [(mode, ranks) for mode, ranks in PAIRS if ranks <= 8])
def test_b47_odd_lengths(mode: str, ranks: int, length: int, causal: bool) -> None:
    """Fewer tokens than ranks run as well: ranks without tokens take part in exchanges, and give back none."""
    call = tagged(length)
    output = run(BY_RANKS[mode][ranks], call, AttentionMetadata(), builder(4, 4, 8, causal=causal))
    assert output.shape == (2, length, 4, 8)
    expected = reference_attention(*call, causal=causal)[0]
    assert_close(output, expected, tolerance=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_b47_gathered_outputs_are_as_long_as_the_inputs(ranks: int, length: int) -> None:
    whole = torch.arange(2.0 * length).view(2, length)
    found = fake_ranks(
        {"ring_degree": ranks}, lambda parallel: parallel.gather(parallel.split(whole), length)
    )
    assert all(torch.equal(tensor, whole) for tensor in found)


@every_stand
@pytest.mark.parametrize("number", [1, 3, 7])
@pytest.mark.parametrize(
    ("mode", "ranks"), [(m, r) for m, r in PAIRS if r == (4 if m == "ulysses_ring" else 2)]
)
def test_b47_every_backend(stand: Stand, mode: str, ranks: int, number: int) -> None:
    tokens = stand.tokens(number)
    call = [x.to(stand.dtype) for x in tensors(1, tokens, tokens)]
    outcome = stand_outcome(stand, BY_RANKS[mode][ranks], call, {"num_heads": 4})
    if outcome is not None:
        assert_close(outcome, reference_attention(*call)[0])


def test_b47_backends_of_every_mode_were_met() -> None:
    served = {mode for stand in STANDS for mode in stand.facts.sequence_parallel}
    assert served == set(STRATEGIES)
