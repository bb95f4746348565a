"""What a ring does beside giving one rank's result: when it sends, what it prepares, how it rounds, what it refuses."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from omni_attn import Attention, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.backends import registry
from omni_attn.backends.abstract import AttentionImpl
from omni_attn.backends.masked import MaskedMetadataBuilder
from omni_attn.backends.metadata import PackedPadding
from omni_attn.backends.torch_sdpa_impl import TorchSDPAImpl
from omni_attn.config import AttentionConfig, AttentionSpec, ParallelConfig
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.facts.evaluate import RING_MODES
from omni_attn.parallel import Parallel, use_parallel
from omni_attn.parallel.collectives import Collectives, Pending
from omni_attn.parallel.outbox import Rows
from omni_attn.parallel.parts import Part, merge_part
from omni_attn.platforms import current_omni_platform
from omni_attn.testing import fake_device, fake_ranks
from tests.layer.stands import STANDS, Stand
from tests.parallel.counted import PassedOn
from tests.parallel.scene import CONFIGS, Call, every_config, randn

RINGS = [{"ring_degree": 3}, {"ulysses_degree": 2, "ring_degree": 2}]
every_ring = pytest.mark.parametrize("config", RINGS, ids=str)
FLASH = next(stand for stand in STANDS if stand.name == "FLASH_ATTN")


class LoggedCollectives(PassedOn):
    """Writes down when it is called, and with how many numbers."""

    def __init__(self, inner: Collectives, log: list[Any]) -> None:
        super().__init__(inner)
        self.log = log
        self.arrived: list[weakref.ref[Tensor]] = []

    def start_all_to_all(self, outbox: Rows) -> Pending:
        send = outbox.counts.send
        self.log.append(("send", sum(send)))
        assert send[(self.rank - 1) % self.size] == sum(send), "to the rank before, and to no other"
        return self.inner.start_all_to_all(outbox)

    def wait(self, pending: Pending) -> Tensor:
        self.log.append("wait")
        arrived = self.inner.wait(pending)
        self.arrived.append(weakref.ref(arrived))
        return arrived


def logs_of(call: Call, ranks: int) -> list[list[Any]]:
    """What each rank of a ring does in one call."""

    def work(parallel: Parallel) -> list[Any]:
        log: list[Any] = []

        class LoggedImpl(TorchSDPAImpl):
            def forward_with_lse(self, query: Tensor, key: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
                log.append(("kernel", key.shape[1]))
                return super().forward_with_lse(query, key, *rest)

        logged = replace(parallel, ring=LoggedCollectives(parallel.ring, log))  # type: ignore[arg-type]
        with use_parallel(logged), use_attention_config("TORCH_SDPA", device="cpu"):
            layer = Attention(
                call.heads, 8, role="self", impl_overrides={"TORCH_SDPA": LoggedImpl}, **call.needs
            )
        record = call.record()
        prepare_attention(layer, {"self": record}, {"self": call.whole_lengths})
        layer(*map(parallel.split, call.own), record.with_layer_inputs(**call.streams))
        return log

    return fake_ranks({"ring_degree": ranks}, work)


def test_the_next_shard_travels_while_the_kernel_runs() -> None:
    """One buffer in each round but the last, on its way before the kernel starts, awaited behind it."""
    per_token = 2 * 4 * (8 + 8)
    for rank, log in enumerate(logs_of(Call(8, joint=(0, 2)), 3)):
        sizes = [(3, 3, 2)[(rank + number) % 3] for number in range(3)]
        first, second, third = sizes
        assert log == [
            ("send", first * per_token),
            ("kernel", first + 2),  # the joint keys, once
            "wait",
            ("send", second * per_token),
            ("kernel", second),
            "wait",
            ("kernel", third),
        ]


@torch.no_grad()
def test_shards_that_have_passed_are_let_go() -> None:
    """A rank holds two at most, however many there are: the one it attends to, and the one that comes."""
    call = Call(8)

    def work(parallel: Parallel) -> int:
        ring, most = LoggedCollectives(parallel.ring, []), 0

        class CountingImpl(TorchSDPAImpl):
            def forward_with_lse(self, *arguments: Any) -> tuple[Tensor, Tensor]:
                nonlocal most
                most = max(most, sum(ref() is not None for ref in ring.arrived))
                return super().forward_with_lse(*arguments)

        overrides = {"TORCH_SDPA": CountingImpl}
        with (
            use_parallel(replace(parallel, ring=ring)),  # type: ignore[arg-type]
            use_attention_config("TORCH_SDPA", device="cpu"),
        ):
            layer = Attention(4, 8, role="self", impl_overrides=overrides)
        layer(*map(parallel.split, call.own))
        assert len(ring.arrived) == 4
        return most

    assert max(fake_ranks({"ring_degree": 5}, work)) <= 2  # the threads' exchange holds the last one it sent


def test_later_shards_of_a_causal_layer_are_skipped() -> None:
    for rank, log in enumerate(logs_of(Call(9, needs={"causal": True}), 3)):
        kernels = [event for event in log if event[0] == "kernel"]
        assert len(kernels) == rank + 1 and log.count("wait") == 2


@pytest.mark.parametrize(("length", "builds", "masked"), [(8, 1, 4), (7, 4, 6)])
def test_rounds_of_equal_lengths_share_what_is_prepared(length: int, builds: int, masked: int) -> None:
    """A mask makes each shard another call. Of other ranks' calls those that differ in what a host knows are tried."""
    keep = torch.ones(1, length, dtype=torch.bool)
    keep[:, ::2] = False
    config = ParallelConfig(ring_degree=4)
    for fields, expected in (({}, builds), ({"attn_mask": keep}, masked)):
        with use_parallel(config), use_attention_config("TORCH_SDPA", device="cpu"):
            layer = Attention(4, 8, role="self")
        build = MaskedMetadataBuilder.build
        with patch.object(MaskedMetadataBuilder, "build", autospec=True, side_effect=build) as made:
            prepare_attention(layer, {"self": AttentionMetadata(**fields)}, {"self": (length, length)})
        assert made.call_count == expected


def parts_of(count: int, dtype: torch.dtype) -> list[Part]:
    return [
        (randn(2, 5, 3, 8, seed=seed).to(dtype), 3 * randn(2, 3, 5, seed=seed + 50)) for seed in range(count)
    ]


def merge_all(parts: Sequence[Part]) -> Part:
    merged = None
    for number, part in enumerate(parts, 1):
        merged = merge_part(merged, part, is_last=number == len(parts))
    assert merged is not None
    return merged


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_are_rounded_once(count: int, dtype: torch.dtype) -> None:
    parts = parts_of(count, dtype)
    outputs = torch.stack([output for output, _ in parts]).double()
    lses = torch.stack([lse for _, lse in parts]).double()
    exact = (lses.softmax(0).transpose(2, 3).unsqueeze(-1) * outputs).sum(0)
    output, lse = merge_all(parts)
    assert output.dtype == dtype
    torch.testing.assert_close(lse, lses.logsumexp(0).float(), atol=1e-5, rtol=0)
    # Half a unit in the last of bfloat16's eight bits, and what float32 adds.
    rounding = 2**-8 if dtype == torch.bfloat16 and count > 1 else 0.0
    assert bool(((output.double() - exact).abs() <= rounding * exact.abs() + 1e-5).all())


def test_the_sum_so_far_is_written_over_where_no_gradient_needs_it() -> None:
    first, second, third, fourth = parts_of(4, torch.bfloat16)
    so_far = merge_part(first, second, is_last=False)
    assert so_far[0].dtype == torch.float32
    assert merge_part(so_far, third, is_last=False)[0] is so_far[0]
    fourth[0].requires_grad_()
    assert merge_part(so_far, fourth, is_last=False)[0] is not so_far[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [2, 7])
@every_config
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cu_seqlens_q": (0, 1, 2)},
        {"packed_padding": PackedPadding(1, 1)},
        {"packed_padding": PackedPadding(0, 0)},
    ],
    ids=str,
)
def test_every_rank_takes_part_in_every_exchange_backwards(
    config: dict[str, Any], causal: bool, length: int, fields: dict[str, Any]
) -> None:
    """A rank that made no use of what came still sends gradients back: zeros. Others wait for them."""

    def work(parallel: Parallel) -> tuple[list[Tensor], Tensor]:
        with use_attention_config("TORCH_SDPA", device="cpu"):
            layer = Attention(1, 8, role="self", causal=causal, requires_grad=True)
        leaves = [parallel.split(randn(1, length, 1, 8, seed=n)).requires_grad_() for n in range(3)]
        return leaves, layer(*leaves, AttentionMetadata(**fields))

    ranks = fake_ranks(config, work)
    traders = config.get("ulysses_degree", 1)
    for number, (own, output) in enumerate(ranks):
        # With one head, a rank of each Ulysses group has none, and sees what its ring hands round nowhere.
        ring = [leaves for leaves, _ in ranks[number % traders :: traders]]
        met = [own[0], *(leaf for leaves in (ring if traders == 1 else [own]) for leaf in leaves[1:])]
        grads = torch.autograd.grad(output.sum(), met, retain_graph=True, allow_unused=True)
        assert all(grad is not None for grad in grads)


@pytest.mark.parametrize("is_float", [False, True])
@every_ring
def test_gradients_beside_rows_without_a_key(config: dict[str, Any], is_float: bool) -> None:
    """They are zeros, and no NaN, on every rank."""
    mask: Tensor = randn(2, 1, 6, 6, seed=5) > 0
    mask[:, :, 3] = False
    if is_float:
        mask = torch.where(mask, randn(2, 1, 6, 6, seed=6), float("-inf"))
    call = Call(6, kv_heads=2, fields={"attn_mask": mask})
    weights = randn(2, 6, 4, 8, seed=3)
    found = []
    for run in (call.alone, lambda: call.on_ranks(config)):
        leaves = call.own = [leaf.detach().requires_grad_() for leaf in call.own]
        found.append(torch.autograd.grad((run() * weights).sum(), leaves))
    for together, alone in zip(*found, strict=True):
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_what_ring_needs_is_in_the_facts() -> None:
    """Whoever claims a ring gives log-sum-exps, and whoever gives their gradients has a backward."""
    claims = 0
    for name in registry.registered_names():
        backend = registry.load_backend(registry.default_path(name), name)
        for facts in (backend.facts, *(variant.facts for variant in backend.facts.variants)):
            for mode in RING_MODES:
                claims += mode in facts.sequence_parallel
                assert facts.lse or mode not in facts.sequence_parallel, (name, mode)
            assert facts.backward or not facts.lse_backward, name
    assert claims


@every_ring
def test_a_kernel_without_gradients_of_the_lse_is_refused_for_training(config: dict[str, Any]) -> None:
    platform = current_omni_platform(fake_device("sm_90", packages={"fa3-fwd": "0.0.2"}, cudnn=91900))
    parallel = ParallelConfig.model_validate(config)
    needs: dict[str, Any] = {"role": "self", "requires_grad": True, "dtype": "bfloat16"}
    for backend in ("CUDNN_ATTN", "FLASH_ATTN"):
        with (
            use_parallel(parallel),
            use_attention_config(backend, platform=platform),
            pytest.raises(
                BackendRejectedError, match=r"needs a backward pass through the log-sum-exp"
            ) as raised,
        ):
            Attention(4, 64, **needs)
        assert str(parallel.mode) in str(raised.value)
    with use_parallel(parallel), use_attention_config(None, platform=platform):
        chosen = Attention(4, 64, **needs).selection
    assert chosen is not None and chosen.backend_cls.facts.lse_backward


def flash_layer(config: AttentionConfig, **needs: Any) -> Attention:
    with use_attention_config(config, platform=FLASH.platform):
        return Attention(4, 128, role="self", **needs)


@every_ring
def test_gradients_that_would_be_wrong_are_refused_in_the_call(config: dict[str, Any]) -> None:
    """The layer said nothing of a backward pass."""
    tensors = [randn(1, 8, 4, 128, seed=n).to(FLASH.dtype) for n in range(3)]

    def work(parallel: Parallel) -> list[str]:
        layer, texts = flash_layer(FLASH.config), []
        own = [parallel.split(tensor) for tensor in tensors]
        with torch.no_grad():
            assert layer(*own).shape == own[0].shape
        for number in range(3):
            leaves = [tensor.clone().requires_grad_(number == n) for n, tensor in enumerate(own)]
            with pytest.raises(MetadataError) as raised:
                layer(*leaves)
            texts.append(str(raised.value))
        return texts

    with FLASH.kernels():
        texts = [text for texts in fake_ranks(config, work) for text in texts]
    assert all('"self": FLASH_ATTN under' in text and "no_grad" in text for text in texts)


@every_ring
def test_calls_without_a_log_sum_exp_are_refused_while_preparing(config: dict[str, Any]) -> None:
    """On every rank, before anything is sent; a fallback that was declared takes them."""
    keep = torch.arange(8) < torch.tensor([[6], [3]])
    tensors = [randn(2, 8, 4, 128, seed=n).to(FLASH.dtype) for n in range(3)]
    record = AttentionMetadata(attn_mask=keep)
    spec = AttentionSpec(backend="FLASH_ATTN", variant=FLASH.variant, fallback=("TORCH_SDPA",))
    choices = {"alone": FLASH.config, "with a fallback": AttentionConfig(default=spec)}

    def work(parallel: Parallel, choice: str) -> Tensor | str:
        layer = flash_layer(choices[choice])
        own = [parallel.split(tensor) for tensor in tensors]
        try:
            prepare_attention(layer, {"self": replace(record)}, {"self": (8, 8)})
        except MetadataError as error:
            return str(error)
        output = layer(*own, replace(record))
        assert layer.fallbacks_taken and "TORCH_SDPA" in layer.route
        return output

    with FLASH.kernels():
        refused = fake_ranks(config, lambda parallel: work(parallel, "alone"))
        taken = fake_ranks(config, lambda parallel: work(parallel, "with a fallback"))
        alone = flash_layer(choices["alone"])(*tensors, replace(record))
    assert all("log-sum-exp" in text and "FLASH_ATTN" in text for text in refused if isinstance(text, str))
    assert all(isinstance(text, str) for text in refused)
    torch.testing.assert_close(torch.cat(taken, dim=1), alone, atol=2e-2, rtol=0)  # type: ignore[arg-type]


@every_ring
def test_causal_layers_need_queries_and_keys_split_alike(config: dict[str, Any]) -> None:
    needs = {"causal": True}
    packed = {"cu_seqlens_q": (0, 4, 12), "cu_seqlens_k": (0, 6, 12)}
    same = {"cu_seqlens_q": (0, 4, 12), "cu_seqlens_k": (0, 4, 12)}
    for call, found in (
        (Call(12, 13, needs=needs), "split alike"),
        (Call(12, batch=1, needs=needs, fields=packed), "cu_seqlens_k"),
    ):

        def work(parallel: Parallel, call: Call = call, found: str = found) -> None:
            with pytest.raises(MetadataError, match=found) as raised:
                prepare_attention(call.layer(), {"self": call.record()}, {"self": call.whole_lengths})
            assert "ulysses_degree alone" in str(raised.value)

        fake_ranks(config, work)
    document = torch.arange(12) >= 4
    Call(12, batch=1, needs=needs, fields=same).check(config, (document[:, None] == document)[None, None])


def test_words_for_a_person() -> None:
    texts = {}
    for name in ("ring 3", "ulysses 2 ring 2"):
        with (
            use_parallel(ParallelConfig.model_validate(CONFIGS[name])),
            use_attention_config("TORCH_SDPA", device="cpu"),
        ):
            texts[name] = Attention(5, 8, role="self").parallel
    assert texts["ring 3"] == "3 ranks hand keys and values round, each attends to all keys in turn"
    assert texts["ulysses 2 ring 2"] == (
        "2 ranks trade tokens for heads, 2 to 3 of 5 heads each; "
        "2 ranks hand keys and values round, each attends to all keys in turn"
    )


@pytest.mark.parametrize("stand", [s for s in STANDS if "ring" in s.facts.sequence_parallel], ids=str)
def test_a_causal_ring_builds_an_impl_for_earlier_shards(stand: Stand) -> None:
    """It serves what the layer's own does, and its builder prepares for it."""
    with stand.kernels(), use_parallel(ParallelConfig(ring_degree=2)):
        layer = stand.layer(4, 128, causal=True)
    impls: dict[str, AttentionImpl] = layer._routes[0].called.impls  # type: ignore[union-attr]
    assert {name: impl.causal for name, impl in impls.items()} == {"own": True, "full": False}
    assert layer.impl is impls["own"]
