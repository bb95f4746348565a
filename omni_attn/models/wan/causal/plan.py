"""What a causal Wan model keeps of the frames before a chunk, in numbers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omni_attn.errors import ConfigError
from omni_attn.facts import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from omni_attn.models.wan.config import TEXT_TOKENS, WanConfig

TEXT_BLOCK_SIZE = 16  # divides the rows of every prompt, and suits every kernel


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """Chunks, window and pages of the streams of one model.

    Attributes:
        frame_tokens: tokens of a latent frame.
        chunk_frames: latent frames that are denoised together.
        window_frames: the last latent frames that a chunk sees, its own among them; None = all.
        sink_frames: the first latent frames, which every chunk sees beside its window.
        block_size: tokens of a page; divides a latent frame, so that the window ends between pages.
        dtype: of the layers' tensors; cache_dtype: of what is kept, None = the same.

    Raises:
        ConfigError: numbers contradict one another; all problems at once.
    """

    frame_tokens: int
    chunk_frames: int = 3
    window_frames: int | None = None
    sink_frames: int = 0
    block_size: int = 8
    dtype: str = "float32"
    cache_dtype: str | None = None

    def __post_init__(self) -> None:
        problems = []
        counts = {name: getattr(self, name) for name in ("frame_tokens", "chunk_frames", "block_size")}
        problems += [
            f"{name} is {count}; it must be at least 1." for name, count in counts.items() if count < 1
        ]
        if self.window_frames is not None and self.window_frames < self.chunk_frames:
            problems.append(
                f"window_frames is {self.window_frames}, and a chunk of chunk_frames {self.chunk_frames} is a part of "
                f"its own window. Make the window at least {self.chunk_frames}, or null for all frames."
            )
        if self.sink_frames < 0 or (self.sink_frames and self.window_frames is None):
            problems.append(
                f"sink_frames is {self.sink_frames} with window_frames {self.window_frames}; sinks are frames that a "
                "window would forget. Set both, or leave sink_frames at 0."
            )
        if not problems and self.frame_tokens % self.block_size:
            problems.append(
                f"block_size is {self.block_size}, which does not divide a latent frame of {self.frame_tokens} tokens: "
                "frames are forgotten whole. Choose a divisor."
            )
        if problems:
            raise ConfigError(*problems)

    @property
    def chunk_tokens(self) -> int:
        """Query tokens of a whole chunk."""
        return self.chunk_frames * self.frame_tokens

    def held_frames(self, num_frames: int | None) -> int:
        """Most latent frames that a stream of `num_frames` (None = no end) holds at once.

        Raises:
            ConfigError: without a window, no cache is large enough for a stream without an end.
        """
        if self.window_frames is None:
            if num_frames is None:
                raise ConfigError(
                    "A stream without an end was asked for, and window_frames is null, so that every frame would be "
                    "kept. Set window_frames, or say how many frames there are."
                )
            return num_frames
        held = self.sink_frames + self.window_frames
        return held if num_frames is None else min(held, num_frames)

    def history(self, chunk_frames: int) -> int | None:
        """Last frames that remain visible in front of a chunk of so many frames; None = all."""
        return None if self.window_frames is None else self.window_frames - chunk_frames

    def self_spec(self, config: WanConfig) -> KVCacheSpec:
        """What self-attention keeps."""
        common = self._common(config, self.block_size)
        if self.window_frames is None:
            return FullAttentionSpec(**common)
        tokens = self.frame_tokens
        return SlidingWindowSpec(**common, window=self.window_frames * tokens, sink=self.sink_frames * tokens)

    def text_spec(self, config: WanConfig) -> KVCacheSpec:
        """What cross-attention keeps of a prompt."""
        return FullAttentionSpec(**self._common(config, TEXT_BLOCK_SIZE))

    def cache_bytes(self, config: WanConfig, *, streams: int, num_frames: int | None) -> int:
        """Size of all pages of a model with so many streams."""
        frames, text = self.self_spec(config), self.text_spec(config)
        kept = self.held_frames(num_frames) * self.frame_tokens // self.block_size
        pages = (streams * kept + 1) * frames.page_bytes
        pages += (streams * -(-TEXT_TOKENS // TEXT_BLOCK_SIZE) + 1) * text.page_bytes
        return config.num_layers * pages

    def _common(self, config: WanConfig, block_size: int) -> dict[str, Any]:
        return {
            "block_size": block_size,
            "num_kv_heads": config.num_attention_heads,
            "head_size": config.attention_head_dim,
            "dtype": self.cache_dtype or self.dtype,
        }
