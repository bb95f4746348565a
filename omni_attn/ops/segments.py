"""Attention over parts of one sequence, for kernels that know only whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
AttendWithLSE = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Segment(NamedTuple):
    """Query rows [query_start, query_end) attend to keys [key_start, key_end)."""

    query_start: int
    query_end: int
    key_start: int
    key_end: int


def attend_segments(
    attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: tuple[Segment, ...]
) -> torch.Tensor:
    """Runs `attend` on each segment of [B, S, H, D] tensors; rows of no segment, or without a key, are zeros."""
    if (
        len(segments) == 1
        and segments[0][:2] == (0, query.shape[1])
        and segments[0].key_end > segments[0].key_start
    ):
        keys = slice(
            segments[0].key_start, segments[0].key_end
        )  # all rows: nothing to clear, nothing to copy
        return attend(query, key[:, keys], value[:, keys])
    output = query.new_zeros(*query.shape[:3], value.shape[-1])
    for segment in segments:
        rows = slice(segment.query_start, segment.query_end)
        keys = slice(segment.key_start, segment.key_end)
        if segment.query_end > segment.query_start and segment.key_end > segment.key_start:
            output[:, rows] = attend(query[:, rows], key[:, keys], value[:, keys])
    return output


def attend_segments_with_lse(
    attend: AttendWithLSE,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: tuple[Segment, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """attend_segments, with the log-sum-exp [B, H, Sq] beside the output: -inf for rows of no segment."""
    output, lse = empty_attention(query, value)
    for query_start, query_end, key_start, key_end in segments:
        if query_end > query_start and key_end > key_start:
            rows, keys = slice(query_start, query_end), slice(key_start, key_end)
            output[:, rows], lse[:, :, rows] = attend(query[:, rows], key[:, keys], value[:, keys])
    return output, lse


def empty_attention(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over no key: zeros [B, Sq, H, Dv], and a log-sum-exp [B, H, Sq] of -inf in float32."""
    batch, length, heads, _ = query.shape
    lse = torch.full((batch, heads, length), float("-inf"), dtype=torch.float32, device=query.device)
    return query.new_zeros(batch, length, heads, value.shape[-1]), lse
