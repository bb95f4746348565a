"""Every strategy is one rank: lengths, heads, masks, packing, joint streams, with and without preparation."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from omni_attn.backends.metadata import PackedPadding
from omni_attn.errors import MetadataError
from omni_attn.testing import fake_ranks
from tests.parallel.scene import CONFIGS, Call, every_config, every_mode, randn

Order = Literal["front", "rear"]
Config = dict[str, Any]
both_orders = pytest.mark.parametrize("order", ["front", "rear"])


@every_config
@pytest.mark.parametrize("length", [1, 2, 7, 12])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(config: Config, length: int, causal: bool) -> None:
    Call(length, needs={"causal": causal}).check(config)


@every_config
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (7, 1), (28, 7)])
def test_heads(config: Config, heads: tuple[int, int]) -> None:
    Call(5, heads=heads[0], kv_heads=heads[1], value_size=12, needs={"softmax_scale": 0.3}).check(config)


@every_config
@pytest.mark.parametrize("lengths", [(7, 4), (4, 9), (5, 1), (1, 5)])
def test_keys_of_another_length(config: Config, lengths: tuple[int, int]) -> None:
    Call(lengths[0], lengths[1]).check(config)


@every_config
@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_key_padding(config: Config, prepared: bool, causal: bool) -> None:
    keep = torch.arange(7) < torch.tensor([[5], [2]])
    stated = {"attn_mask": keep, "kv_lengths": (5, 2), "mask_mode": "padding"}
    for fields in (stated, {"attn_mask": keep}):
        Call(7, needs={"causal": causal}, fields=fields).check(config, prepared=prepared)


@every_config
def test_key_padding_with_holes(config: Config) -> None:
    keep = torch.tensor([[True, False, True, True, False, False, True], [False] * 6 + [True]])
    Call(7, fields={"attn_mask": keep}).check(config)


@every_config
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_queries_and_keys(
    config: Config, shape: tuple[int, int], is_float: bool, causal: bool
) -> None:
    scores = randn(*shape, 7, 7, seed=5)
    Call(7, needs={"causal": causal}, fields={"attn_mask": scores if is_float else scores > 0}).check(config)


@every_config
def test_a_mask_that_hides_all_keys_of_a_row(config: Config) -> None:
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    mask[0, 0, 4] = False
    call = Call(6, fields={"attn_mask": mask})
    call.check(config)
    assert not call.on_ranks(config)[:, 4].any()


@every_config
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(config: Config, on_host: bool, causal: bool) -> None:
    """The last one ends before the tokens do; what lies behind it sees nothing."""
    bounds = (0, 2, 2, 9, 11)
    cu = bounds if on_host else torch.tensor(bounds, dtype=torch.int32)
    document = torch.bucketize(torch.arange(13), torch.tensor(bounds[1:]), right=True)
    mask = (document[:, None] == document) & (document < 4) & (document[:, None] < 4)
    needs = {"packed": True, "causal": causal}
    Call(13, batch=1, needs=needs, fields={"cu_seqlens_q": cu}).check(config, mask[None, None])


@every_config
def test_packed_keys_with_boundaries_of_their_own(config: Config) -> None:
    first, second = (0, 3, 8), (0, 4, 5)
    mask = torch.zeros(8, 5, dtype=torch.bool)
    mask[:3, :4] = mask[3:, 4:] = True
    fields = {"cu_seqlens_q": first, "cu_seqlens_k": second, "max_seqlen_q": 5, "max_seqlen_k": 4}
    Call(8, 5, batch=1, needs={"packed": True}, fields=fields).check(config, mask[None, None])


@every_config
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("used", [0, 1, 4, 9, 10])
def test_structural_padding(config: Config, causal: bool, used: int) -> None:
    mask = torch.zeros(10, 10, dtype=torch.bool)
    mask[:used, :used] = True
    fields = {"packed_padding": PackedPadding(used, used)}
    Call(10, batch=1, needs={"causal": causal}, fields=fields).check(config, mask[None, None])


@pytest.mark.parametrize("used", [(6, 9), (9, 6)])
@pytest.mark.parametrize("name", ["ring 2", "ulysses 2 ring 2"])
def test_causal_padding_of_unequal_sides_is_refused_by_a_ring(name: str, used: tuple[int, int]) -> None:
    """Its rounds align each shard's end, and the used tokens of both sides end in different shards."""
    call = Call(10, batch=1, needs={"causal": True}, fields={"packed_padding": PackedPadding(*used)})
    with pytest.raises(MetadataError, match=rf"{used[0]}.*{used[1]}.*ulysses_degree"):
        call.on_ranks(CONFIGS[name])


@every_config
@both_orders
@pytest.mark.parametrize("joint", [(3, 3), (1, 2), (0, 2)])
@pytest.mark.parametrize("length", [1, 5])
def test_joint_streams(config: Config, order: Order, joint: tuple[int, int], length: int) -> None:
    Call(length, joint=joint, order=order, kv_heads=2).check(config)


@every_config
@both_orders
@pytest.mark.parametrize("length", [1, 2, 6])
def test_joint_keys_in_causal_layers(config: Config, order: Order, length: int) -> None:
    Call(length, joint=(0, 3), order=order, needs={"causal": True}).check(config)


@every_config
@both_orders
def test_joint_streams_with_key_padding(config: Config, order: Order) -> None:
    keep = torch.arange(8) < torch.tensor([[7], [3]])
    fields = {"attn_mask": keep, "kv_lengths": (7, 3)}
    Call(5, joint=(3, 3), order=order, fields=fields).check(config)


@every_config
@both_orders
@pytest.mark.parametrize("causal", [False, True])
def test_joint_streams_with_a_mask_by_head(config: Config, order: Order, causal: bool) -> None:
    """Its last two dimensions count the joint tokens, on the side that the record states."""
    joint = (0, 3) if causal else (2, 3)
    mask = randn(2, 4, joint[0] + 6, 9, seed=5) > -0.5
    call = Call(6, joint=joint, order=order, needs={"causal": causal}, fields={"attn_mask": mask})
    call.check(config)


@every_config
@both_orders
def test_joint_keys_with_key_padding_in_causal_layers(config: Config, order: Order) -> None:
    keep = torch.arange(8) < torch.tensor([[7], [5]])
    needs, fields = {"causal": True}, {"attn_mask": keep, "kv_lengths": (7, 5)}
    Call(5, joint=(0, 3), order=order, needs=needs, fields=fields).check(config)


@every_mode
def test_any_split_runs_without_preparation(config: Config) -> None:
    """Ranks tell one another how many tokens they have."""
    call = Call(9, 6)
    ranks = 4 if "ring_degree" in config and "ulysses_degree" in config else 2
    cuts = ([5, 0, 3, 1], [0, 2, 3, 1]) if ranks == 4 else ([8, 1], [0, 6])

    def work(parallel: Any) -> torch.Tensor:
        query, key, value = (
            tensor.split(cuts[i > 0], dim=1)[parallel.rank] for i, tensor in enumerate(call.own)
        )
        return call.layer()(query, key, value)

    together = torch.cat(fake_ranks(config, work), dim=1)
    torch.testing.assert_close(together, call.expected().float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_one_rank(name: str) -> None:
    """Of ranks without tokens or heads too, and through joint streams, which every rank adds to."""
    call = Call(2, heads=2, joint=(2, 2), needs={"requires_grad": True})
    leaves = [*call.own, *call.streams.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    weights = randn(*call.alone().shape, seed=3)
    (call.alone() * weights).sum().backward()
    alone = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None

    def work(parallel: Any) -> torch.Tensor:
        layer, record = call.layer(), call.record()
        output = layer(*map(parallel.split, call.own), record.with_layer_inputs(**call.streams))
        # A joint query's output is on every rank; its loss counts once.
        counted = output * torch.cat(
            (weights[:, :2] * (parallel.rank == 0), parallel.split(weights[:, 2:])), dim=1
        )
        return counted.sum()

    torch.stack(fake_ranks(CONFIGS[name], work)).sum().backward()
    for leaf, wanted in zip(leaves, alone, strict=True):
        torch.testing.assert_close(leaf.grad, wanted, atol=1e-5, rtol=0)
