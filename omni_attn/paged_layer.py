"""PagedAttention: the layer over a paged KV cache. Selects once at construction, writes and reads pages per call.

Legend: T query tokens of all requests, H heads, G kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling as _is_compiling

from omni_attn.backends.paged import PagedAttentionImpl, PagedMetadataBuilder
from omni_attn.errors import MetadataError
from omni_attn.facts import KVCacheSpec
from omni_attn.facts.kv_cache import kv_cache_shape
from omni_attn.kv_cache.cached_layer import CachedLayer, cached_request
from omni_attn.kv_cache.paged_checks import paged_call_problem, unfit_slots
from omni_attn.kv_cache.step import PagedCall, PagedStep

if TYPE_CHECKING:
    from omni_attn.backends.abstract import AttentionBackend
    from omni_attn.config import AttentionConfig

__all__ = ["PagedAttention"]


class PagedAttention(CachedLayer):
    """Attention of query [T, H, D] over the pages of a KV cache, into which the step's own keys and values go first.

    The backend is chosen while constructing, as Attention's; the layer has no parameters and keeps no cache: pages,
    slots and metadata come with each step. It has no backward.

    Args:
        num_heads, head_size: query heads and their channels.
        role, role_category ... batch_invariant: what the layer needs; see AttentionRequest. Fallbacks that a person
            declared apply at selection; a step that the selected backend cannot express raises.
        kv_cache: what it keeps per token.
        prefix: its unique name in the model; cache and metadata are found by it.
        dtype: of its tensors; None = the one in force, else that of the cache.
        cache_group: name of the page table that it uses, None = its role. Layers of equal needs share one.
        kv_sharing_target: prefix of an earlier layer whose cache it reads; it then writes none.
        impl_overrides: backend name -> an impl class of the model's own, see Attention.
        config: the choice of backends for this layer alone.

    Raises:
        BackendRejectedError, NoBackendError, BackendImportError, ConfigError: see select; nothing is built then.
        TypeError: an override does not subclass the selected impl.
        ValueError: a field is out of range, no prefix, or a dtype that cannot be told.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        *,
        role: str,
        kv_cache: KVCacheSpec,
        prefix: str,
        role_category: str | None = None,
        num_kv_heads: int | None = None,
        value_head_size: int | None = None,
        dtype: str | torch.dtype | None = None,
        causal: bool = False,
        softmax_scale: float | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        compile: bool = False,
        window: tuple[int, int] | None = None,
        batch_invariant: bool = False,
        cache_group: str | None = None,
        kv_sharing_target: str | None = None,
        impl_overrides: Mapping[str, type[PagedAttentionImpl]] | None = None,
        config: AttentionConfig | Mapping[str, object] | str | None = None,
    ) -> None:
        if kv_cache is None or not prefix:
            lacking = "kv_cache" if kv_cache is None else "prefix"
            raise ValueError(
                f'role "{role}": PagedAttention needs {lacking}; a layer without a cache is an Attention, and a cache '
                "is found by the layer's unique name"
            )
        if kv_cache.kind == "mla":
            raise ValueError(
                f'role "{role}": a cache of latents is read by MLAAttention; PagedAttention keeps keys and values: '
                "state a FullAttentionSpec or SlidingWindowSpec"
            )
        request = cached_request(
            role=role,
            role_category=role_category,
            num_heads=num_heads,
            head_size=head_size,
            num_kv_heads=num_kv_heads,
            value_head_size=value_head_size,
            dtype=dtype,
            causal=causal,
            softmax_scale=softmax_scale,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            compile=compile,
            window=window,
            batch_invariant=batch_invariant,
            kv_cache=kv_cache,
        )
        super().__init__(
            request,
            prefix=prefix,
            cache_group=cache_group,
            kv_sharing_target=kv_sharing_target,
            impl_overrides=impl_overrides,
            config=config,
        )

    @staticmethod
    def _classes(backend: type[AttentionBackend]) -> tuple[type[Any], type[PagedMetadataBuilder]]:
        return backend.get_paged_impl_cls(), backend.get_paged_builder_cls()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        step: PagedStep | PagedCall | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes key and value into the cache where the step has slots for them, then attends.

        Args:
            query: [T, H, D]; rows behind the step's tokens are padding, their output is zeros. What a padded step
                counts as tokens of no request has no output: some kernels leave those rows as they were.
            key: [T, G, D]; value: [T, G, Dv]; same dtype and device as query; None = the cache holds all.
            step: the step, or this layer's part of it; None = a run that measures memory, whose output is zeros.
            output: [T, H, Dv] that is written and given back; None = a new one.
            output_scale, output_block_scale: for impls with a quantised output.

        Raises:
            MetadataError: shapes or dtypes do not fit, or the layer has no part in the step.
            NotImplementedError: an output scale is given, and the impl has no quantised output.
        """
        impl: PagedAttentionImpl | None = self.impl
        if impl is None:
            raise self._only_stated()
        if output is None:
            output = query.new_empty(query.shape[0], impl.num_heads, impl.value_head_size)
        if step is None:
            no_pages = query.new_empty(kv_cache_shape(0, self._kernel_spec))
            return impl.forward(query, key, value, no_pages, None, output, output_scale, output_block_scale)
        call = self._call_of(step)
        metadata, kv_cache, slots, tokens = call
        new: tuple[object, ...] = (key is None, value is None)
        if key is not None and value is not None:
            new = (key.shape, key.dtype, value.shape, value.dtype)
        seen = (query.shape, query.dtype, new, kv_cache.shape, kv_cache.dtype, output.shape, tokens)
        if (
            _is_compiling() or seen != self._checked
        ):  # what was checked for the last call holds for one like it
            self._check(query, key, value, call, output)
            if not _is_compiling():
                self._checked = seen
        if output.dtype != query.dtype and output_scale is None and output_block_scale is None:
            raise MetadataError(
                f"{self._label}: unsupported output dtype {output.dtype}: without an output scale it is that of the "
                f"query, {query.dtype}"
            )
        if torch.is_grad_enabled():
            self._refuse_gradients(query, key, value)
        if slots is not None:
            if key is None or value is None or slots.shape[0] > key.shape[0]:
                raise MetadataError(f"{self._label}: {unfit_slots(key, slots)}")
            impl.update_kv_cache(key, value, kv_cache, slots)
        elif self.kv_sharing_target is not None and key is not None:
            raise MetadataError(
                f"{self._label}: it reads the cache of {self.kv_sharing_target!r} and keeps nothing: hand it None as "
                "key and value"
            )
        if query.shape[0] == tokens:
            return impl.forward(
                query, key, value, kv_cache, metadata, output, output_scale, output_block_scale
            )
        output[tokens:].zero_()
        key, value = (None if new is None else new[:tokens] for new in (key, value))
        part = (query[:tokens], key, value, kv_cache, metadata, output[:tokens])
        impl.forward(*part, output_scale, output_block_scale)
        return output

    def write(self, key: torch.Tensor, value: torch.Tensor, step: PagedStep | PagedCall) -> None:
        """Writes key [T, G, D] and value [T, G, Dv] into the slots of a step, and attends to nothing.

        What cross-attention reads is written so, once; steps that read it have no slots.

        Raises:
            MetadataError: shapes or dtypes do not fit, or the step has no slots for them.
        """
        call = self._call_of(step)
        if self.impl is None or call.slot_mapping is None or self.kv_sharing_target is not None:
            lacking = (
                "the layer only stated its request" if self.impl is None else "it has no slots in this step"
            )
            raise MetadataError(f"{self._label}: keys and values cannot be written: {lacking}")
        self._check(None, key, value, call, None)
        if torch.is_grad_enabled():
            self._refuse_gradients(key, value)
        if call.slot_mapping.shape[0] > key.shape[0]:
            raise MetadataError(f"{self._label}: {unfit_slots(key, call.slot_mapping)}")
        self.impl.update_kv_cache(key, value, call.kv_cache, call.slot_mapping)

    def _check(
        self,
        query: torch.Tensor | None,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        call: PagedCall,
        output: torch.Tensor | None,
    ) -> None:
        tensors = {"query": query, "key": key, "value": value, "output": output}
        problem = paged_call_problem(tensors, call, self._kernel_spec, self.request, self._dtype)
        if problem is not None:
            raise MetadataError(f"{self._label}: {problem}")
