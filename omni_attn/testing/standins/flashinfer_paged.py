"""Stand-ins for FlashInfer's wrappers over paged KV caches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import torch

from omni_attn.ops.reference import reference_attention
from omni_attn.testing.standins.log import CallLog


def paged_wrappers(log: CallLog) -> dict[str, Any]:
    """The two classes by name."""
    classes = (PagedPrefillStandIn, PagedDecodeStandIn)
    names = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")
    return {name: type(name, (base,), {"log": log}) for name, base in zip(names, classes, strict=True)}


class _Planned:
    """What both do: planned from host boundaries, run many times; a CUDA graph's buffers keep their place and size."""

    log: ClassVar[CallLog]
    held: dict[str, torch.Tensor] | None
    planned: tuple[Any, ...]

    def _hold(self, graph: bool, **buffers: torch.Tensor | None) -> None:
        assert graph == all(buffer is not None for buffer in buffers.values()), "a graph needs all buffers"
        self.held = {name: x for name, x in buffers.items() if x is not None} if graph else None
        self._plan_info: list[int] | None = None

    def _plan(
        self,
        queries: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        heads: tuple[int, int, int],
        page_size: int,
        positions: dict[str, Any],
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self.log.plans.append(type(self).__name__)
        for tensor in (queries, indptr, last):
            assert tensor.dtype == torch.int32 and tensor.device.type == "cpu", "a plan reads the host"
        assert indices.dtype == torch.int32 and len(indices) == int(indptr[-1]), "one entry per page"
        assert len(queries) == len(indptr) == len(last) + 1 and heads[0] % heads[1] == 0
        assert int(queries[-1]) > 0, "no query token"
        assert all((0 < n <= page_size) == (b > a) for n, (a, b) in zip(last, pairwise(indptr), strict=True))
        if self.held is None:
            self.step: tuple[torch.Tensor, ...] = (queries.clone(), indptr.clone(), indices, last.clone())
        else:
            assert len(self.held["last"]) == len(last), "a graph's number of requests is fixed"
            assert len(indices) <= len(self.held["indices"]), "too many pages"
            for name, tensor in (("query", queries), ("indptr", indptr), ("last", last)):
                if name in self.held:
                    self.held[name].copy_(tensor)
            self.held["indices"][: len(indices)] = indices
            self.step = (
                self.held.get("query", queries),
                *(self.held[n] for n in ("indptr", "indices", "last")),
            )
        self._plan_info = [len(last), int(queries[-1]) if self.held else len(indices)]
        self.planned = (heads, page_size, positions, dtypes)

    def _run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        self.log.calls.append(type(self).__name__)
        heads, page_size, positions, dtypes = self.planned
        queries, indptr, indices, last = (x.tolist() for x in self.step)
        keys, values = paged_kv_cache
        assert (q.dtype, keys.dtype) == dtypes and out.dtype == q.dtype and out.is_contiguous()
        assert tuple(q.shape) == (queries[-1], heads[0], heads[2]) == tuple(out.shape), "planned otherwise"
        assert keys.shape == values.shape and tuple(keys.shape[1:]) == (page_size, *heads[1:])
        assert q.stride(-1) == keys.stride(-1) == values.stride(-1) == 1 and keys.stride() == values.stride()
        for row, (first, end) in enumerate(pairwise(queries)):
            pages = torch.tensor(indices[indptr[row] : indptr[row + 1]], dtype=torch.int64)
            length = max(0, len(pages) - 1) * page_size + last[row]
            k, v = (x[pages].flatten(0, 1)[:length] for x in (keys, values))
            part, lse = reference_attention(q[None, first:end], k[None], v[None], **positions)
            dead = lse[0].T.isneginf()[..., None]
            out[first:end] = part[0].masked_fill(dead, float("nan")).to(q.dtype)
        return out


class PagedPrefillStandIn(_Planned):
    """BatchPrefillWithPagedKVCacheWrapper of fa2 and fa3."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert (
            float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD" and backend in ("fa2", "fa3")
        )
        buffers = {"indptr": paged_kv_indptr_buf, "indices": paged_kv_indices_buf}
        self._hold(use_cuda_graph, query=qo_indptr_buf, last=paged_kv_last_page_len_buf, **buffers)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype = torch.float16,
    ) -> None:
        """Holds for calls of this step."""
        window = None if window_left < 0 else (window_left, -1)
        self._plan(
            *(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk),
            page_size,
            {"softmax_scale": sm_scale, "causal": causal, "window": window},
            (q_data_type, kv_data_type),
        )

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        """Output [T, H, D]."""
        return self._run(q, paged_kv_cache, out)


class PagedDecodeStandIn(_Planned):
    """BatchDecodeWithPagedKVCacheWrapper: one query token of each request."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD" and backend == "fa2"
        self.use_tensor_cores = use_tensor_cores
        buffers = {"indptr": paged_kv_indptr_buffer, "indices": paged_kv_indices_buffer}
        self._hold(use_cuda_graph, last=paged_kv_last_page_len_buffer, **buffers)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **rest: Any,
    ) -> None:
        """Holds for calls of this step."""
        ratio = num_qo_heads // num_kv_heads
        assert self.use_tensor_cores or ratio in (1, 2, 3, 4, 8), f"no kernel for {ratio} heads each"
        window_left = rest.pop("window_left")
        dtypes = (rest.pop("q_data_type"), rest.pop("kv_data_type"))
        window = None if window_left < 0 else (window_left, -1)
        positions = {"softmax_scale": rest.pop("sm_scale"), "window": window}
        assert not rest, f"unknown: {rest}"
        queries = torch.arange(len(indptr), dtype=torch.int32)
        heads = (num_qo_heads, num_kv_heads, head_dim)
        self._plan(queries, indptr, indices, last_page_len, heads, page_size, positions, dtypes)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        """Output [R, H, D]."""
        return self._run(q, paged_kv_cache, out)
