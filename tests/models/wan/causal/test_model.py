"""CausalWanModel: one chunk is WanModel, chunks are the whole video under a block-causal mask, slots are rewritten."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_attn.backends.paged import PagedMetadataBuilder
from omni_attn.errors import ConfigError, KVCacheError, MetadataError
from omni_attn.kv_cache import paged_layers
from omni_attn.models.wan.causal import CachePlan, CausalCache
from omni_attn.models.wan.rope import build_rope_table
from tests.models.wan.causal.small import (
    CHANNELS,
    FRAME,
    HEIGHT,
    TEXT,
    WIDTH,
    begun,
    causal_model,
    forward,
    masked_model,
    plain_model,
    plan_of,
    random,
)

BATCH = 2
WINDOWS = [
    {},
    {"window_frames": 2},
    {"window_frames": 3, "sink_frames": 1},
    {"window_frames": 5, "sink_frames": 2},
    {"chunk_frames": 1, "window_frames": 2, "sink_frames": 1},
    {"chunk_frames": 3, "window_frames": 4},
    {"chunk_frames": 3, "window_frames": 50, "sink_frames": 1},
]


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def latents(frames: int, seed: int = 1) -> Tensor:
    return random(BATCH, CHANNELS, frames, HEIGHT, WIDTH, seed=seed)


def text(seed: int = 2) -> Tensor:
    return random(BATCH, TEXT, 32, seed=seed)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_weights_are_those_of_the_plain_model() -> None:
    causal, plain = causal_model(plan_of()), plain_model()
    assert list(causal.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("kind", ["t2v", "t2v_head24"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [1, 6])
def test_one_chunk_is_the_plain_model(kind: str, layout: str, block_size: int) -> None:
    plan = plan_of(chunk_frames=3, block_size=block_size)
    causal, noisy, time = causal_model(plan, kind), latents(3), torch.tensor([999.0, 20.5])
    cache = begun(causal, text(), 3, layout=layout)
    cache.open(3)
    assert cache.layout == layout
    torch.testing.assert_close(
        forward(causal, cache, noisy, time), plain_model(kind)(noisy, time, text()), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("window", WINDOWS)
def test_chunks_are_the_whole_under_a_block_causal_mask(window: dict[str, int]) -> None:
    plan, frames = plan_of(**window), 7
    causal, whole = causal_model(plan), latents(frames)
    wanted = masked_model(plan, frames)(whole, torch.tensor([300.0, 700.0]), text())
    cache = begun(causal, text(), frames)
    found = []
    for chunk in whole.split(plan.chunk_frames, dim=2):
        cache.open(chunk.shape[2])
        found.append(forward(causal, cache, chunk, [300.0, 700.0]))
        cache.commit()
    assert relative(torch.cat(found, dim=2), wanted) < 1e-5


@pytest.mark.parametrize("window", WINDOWS[:4])
def test_a_noisy_chunk_sees_the_clean_ones_before_it(window: dict[str, int]) -> None:
    """As Self-Forcing has it: noise at its own time, history at the time of the context."""
    plan, frames = plan_of(**window), 6
    causal, clean, noise = causal_model(plan), latents(frames), latents(frames, seed=5)
    masked = masked_model(plan, frames)
    cache = begun(causal, text(), frames)
    for begin in range(0, frames, 2):
        part = slice(begin, begin + 2)
        cache.open(2)
        found = [forward(causal, cache, noise[:, :, part], time) for time in (900.0, 400.0)]
        mixed, times = clean.clone(), torch.zeros(BATCH, frames * FRAME)
        mixed[:, :, part] = noise[:, :, part]
        for time, velocity in zip((900.0, 400.0), found, strict=True):
            times[:, begin * FRAME : (begin + 2) * FRAME] = time
            assert relative(velocity, masked(mixed, times, text())[:, :, part]) < 1e-5
        forward(causal, cache, clean[:, :, part], 0.0)  # the last to write is what stays
        cache.commit()


def test_no_step_but_the_last_leaves_anything() -> None:
    plan = plan_of()
    causal, whole = causal_model(plan), latents(4)
    results = []
    for junk in (0, 3):
        cache = begun(causal, text(), 4)
        cache.open(2)
        for seed in range(junk):
            forward(causal, cache, latents(2, seed=seed) * 50, 999.0)
        forward(causal, cache, whole[:, :, :2], 0.0)
        cache.commit()
        cache.open(2)
        results.append(forward(causal, cache, whole[:, :, 2:], 500.0))
    assert torch.equal(*results)


def test_pages_that_hold_nothing_may_hold_nan() -> None:
    plan = plan_of(window_frames=3, sink_frames=1)
    causal, whole = causal_model(plan), latents(7)
    results = []
    for filling in (0.0, float("nan")):
        cache = CausalCache(causal, streams=BATCH, num_frames=None, text_tokens=TEXT + 8)
        for pages in cache.kv_caches.values():
            pages.fill_(filling)
        cache.begin(causal, text())
        for chunk in whole.split(2, dim=2):
            cache.open(chunk.shape[2])
            results.append(forward(causal, cache, chunk, 0.0))
            cache.commit()
    half = len(results) // 2
    for clean, poisoned in zip(results[:half], results[half:], strict=True):
        assert torch.equal(clean, poisoned)


def test_a_cache_that_begins_anew_has_forgotten() -> None:
    plan = plan_of()
    causal, cache = causal_model(plan), None
    results = []
    for seed in (2, 8, 2):
        cache = cache or CausalCache(causal, streams=BATCH, num_frames=4, text_tokens=TEXT)
        cache.begin(causal, text(seed))
        assert cache.first_frame == 0
        cache.open(2)
        results.append(forward(causal, cache, latents(2), 500.0))
        cache.commit()
    assert torch.equal(results[0], results[2]) and not torch.allclose(results[0], results[1])


def test_metadata_is_built_once_for_a_chunk_and_group(monkeypatch: pytest.MonkeyPatch) -> None:
    builds: Counter[str] = Counter()

    def counting(cls: type[PagedMetadataBuilder]) -> None:
        own = cls.build

        def build(self: Any, common: Any) -> Any:
            builds[self.layer_names[0]] += 1
            return own(self, common)

        monkeypatch.setattr(cls, "build", build)

    causal = causal_model(plan_of(window_frames=2))
    cache = begun(causal, text(), None)
    for builder in {type(group.builder()) for group in cache.groups}:
        counting(builder)
    assert {group.cache_group: len(group.layer_names) for group in cache.groups} == {"self": 2, "cross": 2}
    for chunks in (1, 2, 3):
        cache.open(2)
        for _ in range(4):
            forward(causal, cache, latents(2), 500.0)
        forward(causal, cache, latents(2), 0.0)
        cache.commit()
        assert builds["blocks.0.attn1"] == chunks and builds["blocks.0.attn2"] <= chunks


def test_a_window_is_an_edit_of_the_block_table() -> None:
    plan = plan_of(window_frames=4, sink_frames=1)
    causal = causal_model(plan)
    cache = begun(causal, text(), None)
    places = {name: pages.data_ptr() for name, pages in cache.kv_caches.items()}
    tables = []
    for number in range(6):
        cache.open(2)
        assert cache.first_frame == 2 * number
        common = cache.commons()["self"]
        before = {name: pages.clone() for name, pages in cache.kv_caches.items()}
        forward(causal, cache, latents(2), 0.0)
        tables.append(common.block_table.clone())
        assert (
            common.seq_lens.tolist() == [(min(2 * number, 1 + 2) + 2) * FRAME] * BATCH
        )  # sink, window, chunk
        slots = common.slot_mapping
        assert slots is not None and len(set(slots.tolist())) == BATCH * 2 * FRAME
        name = "blocks.0.attn1"
        changed = (cache.kv_caches[name] != before[name]).flatten(3).any(3).any(1).flatten()
        assert set(changed.nonzero().flatten().tolist()) <= set(slots.tolist())  # nothing else was copied
        cache.commit()
    sinks = FRAME // plan.block_size
    assert all(torch.equal(table[:, :sinks], tables[0][:, :sinks]) for table in tables)
    assert {name: pages.data_ptr() for name, pages in cache.kv_caches.items()} == places
    held = BATCH * plan.held_frames(None) * FRAME // plan.block_size
    assert cache.kv_caches["blocks.0.attn1"].shape[0] == held + 1  # and page 0, which is never given out


def test_positions_go_on_behind_the_first_frame() -> None:
    whole = build_rope_table(12, (5, 2, 3), torch.device("cpu"))
    part = build_rope_table(12, (2, 2, 3), torch.device("cpu"), first_frame=3)
    for name in ("first", "second"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[:, 18:])
    model = causal_model(plan_of())
    with pytest.raises(MetadataError, match="frames 31 to 32 were asked for, and rope_max_seq_len is 32"):
        model.rope((2, 2, 3), 31)


def test_what_does_not_fit() -> None:
    causal = causal_model(plan_of())
    with pytest.raises(MetadataError, match=r"text has shape \[1, 24, 32\]; this cache has 2 streams"):
        CausalCache(causal, streams=BATCH, num_frames=4).begin(causal, text()[:1])
    cache = begun(causal, text(), 3)
    with pytest.raises(MetadataError, match=r"a chunk of 3 latent frames .* makes 1 to 2 at once"):
        cache.open(3)
    with pytest.raises(KVCacheError, match="cannot commit"):
        cache.commit()
    cache.open(2)
    with pytest.raises(MetadataError, match="query has 12 tokens"):
        forward(causal, cache, latents(1), 0.0)
    with pytest.raises(MetadataError, match=r"hidden_states has shape \[2, 3, 2, 4, 6\]"):
        forward(causal, cache, latents(2)[:, :3], 0.0)
    forward(causal, cache, latents(2), 0.0)
    cache.commit()
    with pytest.raises(KVCacheError, match="overflows its row"):
        cache.open(2)
    with pytest.raises(ConfigError, match=r"without an end was asked for, and window_frames is null"):
        CausalCache(causal, streams=1, num_frames=None)


@pytest.mark.parametrize("kind", ["i2v", "i2v_2.2"])
def test_transformers_that_read_pictures_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"reads 9 channels and gives 4.*Choose a text-to-video one"):
        causal_model(plan_of(), kind)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"chunk_frames": 0}, "chunk_frames is 0; it must be at least 1"),
        ({"window_frames": 1}, "window_frames is 1, and a chunk of chunk_frames 2"),
        ({"sink_frames": 2}, "sink_frames is 2 with window_frames None"),
        ({"block_size": 4}, "block_size is 4, which does not divide a latent frame of 6 tokens"),
    ],
)
def test_plans_that_contradict_themselves(numbers: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan_of(**numbers)


def test_sizes_of_a_plan() -> None:
    plan = CachePlan(frame_tokens=1560, window_frames=21, sink_frames=3, dtype="bfloat16")
    assert (plan.chunk_tokens, plan.held_frames(None), plan.held_frames(9)) == (4680, 24, 9)
    model = causal_model(plan_of(window_frames=4, sink_frames=1))
    cache = begun(model, random(BATCH, 512, 32), None)
    found = sum(pages.numel() * 4 for pages in cache.kv_caches.values())
    assert model.plan.cache_bytes(model.config, streams=BATCH, num_frames=None) == found
    kinds = {layer.cache_group: layer.kv_cache_spec for layer in paged_layers(model)}
    assert (kinds["self"].kind, kinds["cross"].kind) == ("sliding_window", "full")
    narrow = plan_of(cache_dtype="fp8_e4m3")
    assert narrow.self_spec(model.config).dtype == narrow.text_spec(model.config).dtype == "fp8_e4m3"


def test_a_cache_of_fewer_bits_is_near() -> None:
    whole, results = latents(4), []
    for cache_dtype in (None, "fp8_e4m3"):
        causal = causal_model(plan_of(cache_dtype=cache_dtype))
        cache = begun(causal, text(), 4)
        for chunk in whole.split(2, dim=2):
            cache.open(2)
            results.append(forward(causal, cache, chunk, 0.0))
            cache.commit()
    assert 1e-4 < relative(results[3], results[1]) < 0.1


def test_a_block_compiles_whole() -> None:
    model = causal_model(plan_of(window_frames=2))
    results = []
    for is_compiled in (False, True):
        if is_compiled:
            model.blocks[0].compile(backend="aot_eager", fullgraph=True)  # the others are like it
        cache = begun(model, random(1, TEXT, 32), None)
        with torch.no_grad():
            cache.open(2)
            results.append(forward(model, cache, random(1, CHANNELS, 2, 4, 6), 500.0))
    torch.testing.assert_close(*results)
