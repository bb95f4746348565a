"""Pages of streams: chunks, commits, windows with a sink, and what is refused."""

from __future__ import annotations

import pytest
import torch

from omni_attn.errors import KVCacheError, MetadataError
from omni_attn.kv_cache import BlockPool, BlockTable, StepInputs, check_slots


def table(num_blocks: int = 12, block_size: int = 2, max_reqs: int = 3, max_blocks: int = 6) -> BlockTable:
    return BlockTable(BlockPool(num_blocks), block_size, max_reqs, max_blocks, "cpu")


def test_a_pool_gives_every_page_but_the_first() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [1, 2, 3]
    with pytest.raises(KVCacheError, match="2 pages are needed, and 0 of 3 are free"):
        pool.take(2)
    pool.give_back([3, 1])
    assert pool.num_free == 2
    with pytest.raises(KVCacheError):
        pool.take(3)
    assert pool.take(2) == [1, 3]


@pytest.mark.parametrize("pages", [[0], [4], [-1], [3], [2, 2], [1, 3]])
def test_a_page_goes_back_once(pages: list[int]) -> None:
    pool = BlockPool(4)
    pool.take(2)
    with pytest.raises(KVCacheError, match=f"page {pages[-1]} was given back, and is not given out"):
        pool.give_back(pages)
    assert pool.num_free == 1  # not one of them went back
    pool.give_back([1, 2])


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(ValueError, match="num_blocks=1"):
        BlockPool(1)


def test_every_step_of_a_chunk_writes_the_same_slots() -> None:
    pages = table()
    pages.add("a")
    pages.append("a", 3)
    assert pages.slot_mapping(["a"]).tolist() == [2, 3, 4]
    version = pages.version(["a"])
    assert pages.slot_mapping(["a"]).tolist() == [2, 3, 4]
    assert pages.version(["a"]) == version
    pages.commit("a")
    assert pages.slot_mapping(["a"]).tolist() == []
    pages.append("a", 2)  # begins in the page that the first chunk ends in
    assert pages.slot_mapping(["a"]).tolist() == [5, 6]
    assert pages.version(["a"]) != version
    assert (pages.kept("a"), pages.chunk("a"), pages.position("a")) == (3, 2, 3)


def test_tensors_keep_their_address_and_end_in_nothing() -> None:
    pages = table()
    for stream in "ab":
        pages.add(stream)
        pages.append(stream, 4)
    both, slots = pages.block_table("ab"), pages.slot_mapping("ab")
    assert both.tolist() == [[1, 2, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0]]
    assert (both.dtype, slots.dtype) == (torch.int32, torch.int64)
    assert slots.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    pages.commit("b", 1)
    one, fewer = pages.block_table("b"), pages.slot_mapping("a")
    assert (one.data_ptr(), fewer.data_ptr()) == (both.data_ptr(), slots.data_ptr())
    assert fewer.tolist() == [2, 3, 4, 5]
    assert slots.tolist() == [2, 3, 4, 5, -1, -1, -1, -1]
    assert pages.block_table("b").tolist() == [[3, 0, 0, 0, 0, 0]]
    assert both[1].tolist() == [0] * 6
    assert pages.block_table("ba").tolist() == [[3, 0, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0]]


def test_a_window_with_a_sink_is_an_edit_of_the_row() -> None:
    pages = table()
    pages.add("a")
    for _ in range(3):
        pages.append("a", 4)
        pages.commit("a")
    assert pages.pages("a") == (1, 2, 3, 4, 5, 6)
    assert pages.evict("a", window=4, sink=2) == 6
    assert pages.pages("a") == (1, 5, 6)
    assert (pages.kept("a"), pages.position("a")) == (6, 12)
    pages.append("a", 4)
    assert pages.pages("a") == (1, 5, 6, 2, 3)
    assert pages.slot_mapping(["a"]).tolist() == [4, 5, 6, 7]
    pages.commit("a")
    assert pages.evict("a", window=4, sink=2) == 4
    assert pages.pages("a") == (1, 2, 3)
    assert pages.evict("a", window=4, sink=2) == 0
    assert pages.evict("a", window=100) == 0
    assert pages.evict("a", window=0) == 6
    assert pages.pages("a") == ()
    assert pages.pool.num_free == 11


@pytest.mark.parametrize(("window", "sink"), [(3, 2), (4, 1), (3, 1)])
def test_an_edge_within_a_page(window: int, sink: int) -> None:
    pages = table()
    pages.add("a")
    pages.append("a", 12)
    pages.commit("a")
    with pytest.raises(
        KVCacheError,
        match=rf"cannot forget tokens {sink} to {12 - window} of its 12: pages hold 2 .*divides sink",
    ):
        pages.evict("a", window=window, sink=sink)
    assert pages.kept("a") == 12
    gone = pages.evict("a", window=window, sink=sink, exact=False)
    assert gone == (12 - window) // 2 * 2 - (sink + 1) // 2 * 2
    assert pages.kept("a") == 12 - gone >= window + sink


def test_a_chunk_may_be_taken_back() -> None:
    pages = table()
    pages.add("a")
    pages.append("a", 3)
    pages.commit("a")
    pages.append("a", 5)
    assert len(pages.pages("a")) == 4
    pages.discard("a")
    assert (pages.pages("a"), pages.kept("a"), pages.chunk("a")) == ((1, 2), 3, 0)
    pages.append("a", 5)
    pages.commit("a", 2)
    assert (len(pages.pages("a")), pages.kept("a")) == (3, 5)
    pages.remove("a")
    assert pages.streams == ()
    assert pages.pool.num_free == 11


def test_what_a_stream_may_not_do() -> None:
    pages = table(num_blocks=8)
    pages.add("a")
    with pytest.raises(KVCacheError, match="'a' of group 'self' is in the block table already"):
        pages.add("a")
    with pytest.raises(KVCacheError, match="'b' of group 'self' is not in the block table"):
        pages.append("b", 1)
    with pytest.raises(ValueError, match="0 tokens for stream 'a'"):
        pages.append("a", 0)
    with pytest.raises(KVCacheError, match="cannot commit 0 tokens: its open chunk has 0"):
        pages.discard("a")
    pages.append("a", 4)
    with pytest.raises(KVCacheError, match="'a' of group 'self' has an open chunk of 4 tokens"):
        pages.append("a", 1)
    with pytest.raises(KVCacheError, match="cannot commit 5 tokens: its open chunk has 4"):
        pages.commit("a", 5)
    pages.commit("a")
    with pytest.raises(
        KVCacheError,
        match="'a' of group 'self' overflows its row: 4 kept tokens and 9 new ones need 7 pages of 2, and a row has 6",
    ):
        pages.append("a", 9)
    pages.add("b")
    with pytest.raises(
        KVCacheError, match="stream 'b' of group 'self': 6 pages are needed, and 5 of 7 are free"
    ):
        pages.append("b", 12)
    assert (pages.chunk("a"), pages.pages("b"), pages.pool.num_free) == (0, (), 5)
    with pytest.raises(ValueError, match="window=-1"):
        pages.evict("a", window=-1)
    pages.add("c")
    with pytest.raises(
        KVCacheError, match="'d' of group 'self' finds the block table full: it has room for 3"
    ):
        pages.add("d")
    with pytest.raises(MetadataError, match="one comes twice"):
        pages.slot_mapping(["a", "a"])
    with pytest.raises(ValueError, match="max_blocks=0"):
        table(max_blocks=0)


def test_more_tokens_than_a_step_may_write() -> None:
    pages = BlockTable(BlockPool(12), 2, 2, 6, "cpu", group="text", max_tokens=5)
    for stream in "ab":
        pages.add(stream)
        pages.append(stream, 3)
    assert pages.slot_mapping("a").shape == (3,)
    with pytest.raises(KVCacheError, match=r"group 'text': a step of 6 tokens was asked for, .* made for 5"):
        pages.slot_mapping("ab")


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ([2, 7, -1, -1], None),
        ([], None),
        ([8], "slot 8 is out of range: 4 pages of 2 tokens have slots 2 to 7"),
        ([1], "slot 1 is out of range"),
        ([-2], "slot -2 is out of range"),
        ([3, -1, 3], "slot 3 is named 2 times in one step"),
    ],
)
def test_slots_that_somebody_brings(slots: list[int], words: str | None) -> None:
    mapping = torch.tensor(slots, dtype=torch.int64)
    if words is None:
        check_slots(mapping, num_blocks=4, block_size=2)
        return
    with pytest.raises(MetadataError, match=words):
        check_slots(mapping, num_blocks=4, block_size=2)


def test_slots_of_another_kind() -> None:
    with pytest.raises(MetadataError, match=r"torch.int32 \[1\]: slots are one row of torch.int64"):
        check_slots(torch.tensor([2], dtype=torch.int32), 4, 2)


def test_what_a_step_says() -> None:
    pages = table()
    steps = StepInputs(pages)
    for stream, tokens in (("a", 3), ("b", 4)):
        pages.add(stream)
        pages.append(stream, tokens)
    pages.commit("a")
    pages.append("a", 2)
    common = steps.common("ba", causal=False)
    assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist() == [0, 4, 6]
    assert common.seq_lens.tolist() == [4, 5]
    assert common.seq_lens_cpu is not None and common.seq_lens_cpu.tolist() == [4, 5]
    assert (common.num_reqs, common.num_actual_tokens) == (2, 6)
    assert (common.max_query_len, common.max_seq_len) == (4, 5)
    assert common.block_table.tolist() == pages.block_table("ba").tolist()
    assert common.slot_mapping is not None
    assert common.slot_mapping.tolist() == pages.slot_mapping("ba").tolist()
    assert common.causal is False and common.is_prefilling is None
    assert {t.dtype for t in (common.query_start_loc, common.query_start_loc_cpu, common.seq_lens)} == {
        torch.int32
    }


def test_an_unchanged_step_is_the_same_object() -> None:
    pages = table()
    steps = StepInputs(pages)
    pages.add("a")
    pages.append("a", 2)
    first = steps.common("a")
    assert steps.common("a") is first
    assert steps.common("a", causal=False) is not first
    each = torch.tensor([1], dtype=torch.int32)
    by_request = steps.common("a", causal=each)
    assert by_request.causal is each and steps.common("a", causal=each) is by_request
    prefill = steps.common("a", prefilling=[True])
    assert prefill.is_prefilling is not None and prefill.is_prefilling.tolist() == [True]
    again = steps.common("a")
    pages.commit("a")
    pages.append("a", 2)
    later = steps.common("a")
    assert later is not again and later.seq_lens.tolist() == [4]
    assert later.seq_lens.data_ptr() == again.seq_lens.data_ptr()


def test_a_chunk_within_a_page_changes_the_step() -> None:
    pages = table(block_size=4)
    steps = StepInputs(pages)
    pages.add("a")
    pages.append("a", 1)
    pages.commit("a")
    assert steps.common("a", query_lens=[1], write=False).seq_lens.tolist() == [1]
    pages.append("a", 1)
    assert steps.common("a", query_lens=[1], write=False).seq_lens.tolist() == [2]


def test_a_kept_step_is_there_again_after_another() -> None:
    pages = table()
    steps, others = StepInputs(pages), StepInputs(pages)
    for stream in "ab":
        pages.add(stream)
        pages.append(stream, 2)
    first = steps.common("a")
    others.common("b")
    assert steps.common("a") is first
    assert first.slot_mapping is not None
    assert (first.block_table[0, 0].item(), first.slot_mapping.tolist()) == (1, [2, 3])


def test_a_step_that_only_reads() -> None:
    """Cross-attention: the text was written once, and each step has its own queries."""
    pages = table()
    steps = StepInputs(pages)
    pages.add("text")
    pages.append("text", 5)
    pages.commit("text")
    common = steps.common(["text"], causal=False, query_lens=[7], write=False)
    assert common.slot_mapping is None
    assert (common.num_actual_tokens, common.max_query_len, common.max_seq_len) == (7, 7, 5)
    assert common.query_start_loc.tolist() == [0, 7] and common.seq_lens.tolist() == [5]


def test_steps_that_cannot_be() -> None:
    pages = table()
    steps = StepInputs(pages)
    pages.add("a")
    pages.append("a", 2)
    with pytest.raises(MetadataError, match="a step without streams"):
        steps.common([])
    with pytest.raises(MetadataError, match="one comes twice"):
        steps.common(["a", "a"])
    with pytest.raises(MetadataError, match="prefilling has 2 entries for 1 streams"):
        steps.common(["a"], prefilling=[True, False])
    with pytest.raises(MetadataError, match=r"query_lens=\[-3\]: a stream has 0 or more"):
        steps.common(["a"], query_lens=[-3], write=False)
    with pytest.raises(MetadataError, match="query_lens has 2 entries for 1 streams"):
        steps.common("a", query_lens=[1, 1])
    with pytest.raises(MetadataError, match=r"query_lens=\[3\], and the open chunks have \[2\]"):
        steps.common("a", query_lens=[3])
    with pytest.raises(MetadataError, match=r"causal is torch.int64 \[1\]: .*torch.int32 \[1\]"):
        steps.common("a", causal=torch.tensor([1]))
    with pytest.raises(KVCacheError, match="'b' of group 'self' is not in the block table"):
        steps.common("b")


def test_causality_that_nobody_counts_is_looked_at_each_time() -> None:
    pages = table()
    steps = StepInputs(pages)
    pages.add("a")
    pages.append("a", 2)
    with torch.inference_mode():
        causal = torch.ones(1, dtype=torch.int32)
        before = steps.common(["a"], causal=causal)
        causal.zero_()
        assert steps.common(["a"], causal=causal) is not before
