"""The pages of a causal Wan model's streams: frames and text, and the step of a chunk over both."""

from __future__ import annotations

import torch

from omni_attn.errors import MetadataError
from omni_attn.kv_cache import (
    BlockPool,
    BlockTable,
    CommonAttentionMetadata,
    KVCacheLayout,
    PagedStep,
    StepInputs,
    allocate_kv_cache,
    init_attention_groups,
    make_step,
    paged_layers,
    split_pages,
)
from omni_attn.models.wan.causal.model import CausalWanModel
from omni_attn.models.wan.config import TEXT_TOKENS

FRAMES, TEXT = "self", "cross"  # the cache groups, named as the roles that read them


class CausalCache:
    """Keys and values of some streams, which go forward together: one prompt and one guidance branch each.

    `begin` takes their texts up; then, for every chunk: `open`, as many steps as it takes, each of which writes the
    same slots, the last of them with the clean chunk, and `commit`. What a window forgets is given back to the pool
    when the next chunk is opened: nothing is copied.

    Args:
        model: on the device where the pages are to lie.
        streams: how many.
        num_frames: most latent frames of a stream, None = no end.
        text_tokens: most rows of a prompt.
        layout: "NHD", "HND", or "auto" for what the backends prefer.

    Attributes:
        groups: attention groups of the model's layers.
        kv_caches: layer -> its pages, for the kernels.
        max_seq_len: most keys of a stream in any step.

    Raises:
        ConfigError: no layout or page size suits all backends, or a stream without an end has no window.
    """

    def __init__(
        self,
        model: CausalWanModel,
        *,
        streams: int,
        num_frames: int | None,
        text_tokens: int = TEXT_TOKENS,
        layout: str = "auto",
    ) -> None:
        plan, config = model.plan, model.config
        self.plan, self.streams = plan, tuple(range(streams))
        specs = {FRAMES: plan.self_spec(config), TEXT: plan.text_spec(config)}
        held = plan.held_frames(num_frames) * plan.frame_tokens
        most = {FRAMES: held, TEXT: text_tokens}
        self.max_seq_len = max(most.values())
        self.groups = init_attention_groups(paged_layers(model), specs, model.device)
        self._layout = KVCacheLayout()
        self._layout.resolve(
            {group.selection.label: group.cache_facts.layouts for group in self.groups}, layout
        )
        self._tables: dict[str, BlockTable] = {}
        self.kv_caches: dict[str, torch.Tensor] = {}
        for name, spec in specs.items():
            row = -(-most[name] // spec.block_size)
            pool = BlockPool(streams * row + 1)
            self._tables[name] = BlockTable(pool, spec.block_size, streams, row, model.device, group=name)
            self._allocate(name, pool.num_blocks, model.device)
        self._steps = {name: StepInputs(table) for name, table in self._tables.items()}

    def _allocate(self, cache_group: str, num_blocks: int, device: torch.device) -> None:
        for group in self.groups:
            if group.cache_group == cache_group:
                for layer in group.layer_names:
                    pages = allocate_kv_cache(group.kv_cache_spec, num_blocks, self._layout.value, device)
                    self.kv_caches[layer] = split_pages(pages, group.kernel_spec.block_size)

    @property
    def layout(self) -> str:
        """Order of the pages in memory."""
        return self._layout.value

    @property
    def first_frame(self) -> int:
        """Latent frames before the open or next chunk, forgotten ones counted."""
        return self._tables[FRAMES].position(self.streams[0]) // self.plan.frame_tokens

    def begin(self, model: CausalWanModel, text: torch.Tensor) -> None:
        """Starts all streams anew, each with the text [B, L, text_dim] of its row.

        Raises:
            MetadataError: another number of streams, or more rows than there are pages for.
        """
        if text.ndim != 3 or text.shape[0] != len(self.streams):
            raise MetadataError(
                f"text has shape {list(text.shape)}; this cache has {len(self.streams)} streams and needs "
                f"[{len(self.streams)}, rows, {model.config.text_dim}]."
            )
        for table in self._tables.values():
            for stream in set(table.streams):
                table.remove(stream)
            for stream in self.streams:
                table.add(stream)
        table = self._tables[TEXT]
        for stream in self.streams:
            table.append(stream, text.shape[1])
        groups = [group for group in self.groups if group.cache_group == TEXT]
        common = self._steps[TEXT].common(self.streams, causal=False)
        model.write_text(text, make_step(groups, {TEXT: common}, self.kv_caches))
        for stream in self.streams:
            table.commit(stream)

    def open(self, frames: int) -> None:
        """Makes room for the next chunk of so many latent frames in every stream; what its window forgets goes.

        Raises:
            KVCacheError: a chunk is open, or the streams are at their end.
            MetadataError: more frames than a chunk has.
        """
        plan, table = self.plan, self._tables[FRAMES]
        if not 0 < frames <= plan.chunk_frames:
            raise MetadataError(
                f"a chunk of {frames} latent frames was asked for; this model makes 1 to {plan.chunk_frames} at once."
            )
        history = plan.history(frames)
        for stream in self.streams:
            if history is not None:
                kept, sink = history * plan.frame_tokens, plan.sink_frames * plan.frame_tokens
                table.evict(stream, window=kept, sink=sink)
            table.append(stream, frames * plan.frame_tokens)

    def commons(self) -> dict[str, CommonAttentionMetadata]:
        """What a step of the open chunk looks like; the same objects for all steps of the chunk."""
        queries = [self._tables[FRAMES].chunk(stream) for stream in self.streams]
        return {
            FRAMES: self._steps[FRAMES].common(self.streams, causal=False),
            TEXT: self._steps[TEXT].common(self.streams, causal=False, query_lens=queries, write=False),
        }

    def step(self) -> PagedStep:
        """A step of the open chunk: metadata is built once per chunk and group."""
        return make_step(self.groups, self.commons(), self.kv_caches)

    def commit(self) -> None:
        """Makes the open chunk history, as the last step wrote it.

        Raises:
            KVCacheError: no chunk is open.
        """
        for stream in self.streams:
            self._tables[FRAMES].commit(stream)

    def discard(self) -> None:
        """Takes the open chunk back, as if it had not been opened; what its window forgot stays forgotten.

        Raises:
            KVCacheError: no chunk is open.
        """
        for stream in self.streams:
            self._tables[FRAMES].discard(stream)
