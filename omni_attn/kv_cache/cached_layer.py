"""What the layers over a paged cache have in common: one choice at construction, and the answers of a PagedLayer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from omni_attn.backends.paged import PagedMetadataBuilder
from omni_attn.errors import ConfigError, MetadataError
from omni_attn.facts import AttentionRequest, KVCacheSpec
from omni_attn.kv_cache.step import PagedCall, PagedStep
from omni_attn.parallel.context import current_parallel
from omni_attn.routes import canonical_overrides, construct_selected, geometry_of, overriding_class
from omni_attn.selector import CollectedLayer, Selection, current_scope

if TYPE_CHECKING:
    from omni_attn.backends.abstract import AttentionBackend
    from omni_attn.config import AttentionConfig


# What a loader sets on an impl, beside its weights.
_SCALES = frozenset({"key_scale", "value_scale", "latent_scale"})


class CachedLayer(nn.Module):
    """Selects a backend for its request, and shows groups, reports and runners what they ask for, see PagedLayer.

    Args:
        request: of cached_request.
        prefix: its unique name in the model.
        cache_group: name of its page table, None = its role.
        kv_sharing_target, impl_overrides, config: see the layers.
        options: keywords of impl and builder beside those of all backends; builder_options: of the builder alone.

    Raises:
        BackendRejectedError, NoBackendError, BackendImportError, ConfigError: see select; nothing is built then.
        ConfigError: also where ranks share a sequence: a cache holds whole ones.
        TypeError: an override does not subclass the selected impl.
    """

    def __init__(
        self,
        request: AttentionRequest,
        *,
        prefix: str,
        cache_group: str | None,
        kv_sharing_target: str | None,
        impl_overrides: Mapping[str, type[Any]] | None,
        config: AttentionConfig | Mapping[str, object] | str | None,
        options: Mapping[str, Any] | None = None,
        builder_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        assert request.kv_cache is not None and request.dtype is not None
        _refuse_ranks(request.role, prefix)
        self.request = request
        self.role, self.role_category, self.prefix = request.role, request.role_category, prefix
        self.cache_group = request.role if cache_group is None else cache_group
        self.kv_sharing_target = kv_sharing_target
        self._options, self._builder_options = dict(options or {}), dict(builder_options or {})
        self._overrides = canonical_overrides(impl_overrides)
        self._dtype: torch.dtype = getattr(torch, request.dtype)
        self._kernel_spec: KVCacheSpec = request.kv_cache
        self._checked: tuple[object, ...] = ()
        self.selection: Selection | None = None
        self.impl: Any = None
        scope = current_scope()
        if scope.collected is not None:
            scope.collected.append(CollectedLayer(request, prefix))
            return
        chosen, platform = scope.config_for(config), scope.platform_or_current()
        self.selection, self.impl = construct_selected(
            request, chosen, platform, lambda selection: (selection, self._make_impl(selection))
        )
        self.request = self.selection.request  # one object for layers of equal needs, see Attention

    @staticmethod
    @abstractmethod
    def _classes(backend: type[AttentionBackend]) -> tuple[type[Any], type[PagedMetadataBuilder]]:
        """Impl and builder of a backend for this kind of layer."""

    def _make_impl(self, selection: Selection) -> Any:
        impl_cls = overriding_class(selection, self._classes(selection.backend_cls)[0], self._overrides)
        return impl_cls(kv_cache_spec=self._kernel_spec, **self._options, **geometry_of(selection))

    def make_builder(
        self, spec: KVCacheSpec, layer_names: Sequence[str], device: torch.device
    ) -> PagedMetadataBuilder:
        """See PagedLayer."""
        assert self.selection is not None
        builder_cls = self._classes(self.selection.backend_cls)[1]
        options = self._options | self._builder_options | geometry_of(self.selection)
        return builder_cls(kv_cache_spec=spec, layer_names=layer_names, device=device, **options)

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """What the layer keeps, with the page size of its page table."""
        spec = self.request.kv_cache
        assert spec is not None
        return spec

    @property
    def kernel_spec(self) -> KVCacheSpec:
        """The same with the page size that the kernels get; the cache is allocated with that."""
        return self._kernel_spec

    @property
    def group_key(self) -> tuple[object, ...]:
        """See PagedLayer."""
        if self.selection is None:  # asked all the same where isinstance looks at a PagedLayer's properties
            return None, self.request
        geometry = geometry_of(self.selection) | self._options | self._builder_options
        spec = geometry.pop("spec")
        text = None if spec is None else spec.model_dump_json()
        geometry["dtype"], geometry["batch_invariant"] = self.request.dtype, self.request.batch_invariant
        return self.selection.class_path, type(self.impl), text, *sorted(geometry.items())

    def take_kernel_block_size(self, block_size: int) -> None:
        """See PagedLayer; the impl is made anew where the size is another one."""
        if block_size != self._kernel_spec.block_size:
            assert self.selection is not None
            self._kernel_spec = self._kernel_spec.with_block_size(block_size)
            before, self.impl = self.impl, self._make_impl(self.selection)
            for scale in _SCALES.intersection(vars(before)):  # a loader may have been here already
                setattr(self.impl, scale, getattr(before, scale))
            self._checked = ()

    def __call__(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """See forward. nn.Module's own way is left out where no hook needs it, as in Attention."""
        hooks = (
            self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        )
        if hooks or self._compiled_call_impl is not None or _has_any_global_hook():  # type: ignore[no-untyped-call]
            return super().__call__(*arguments, **named)  # type: ignore[no-any-return]
        return self.forward(*arguments, **named)  # type: ignore[no-any-return]

    def _call_of(self, step: PagedStep | PagedCall) -> PagedCall:
        return step if isinstance(step, PagedCall) else step[self.prefix]

    def _refuse_gradients(self, *tensors: torch.Tensor | None) -> None:
        if any(tensor is not None and tensor.requires_grad for tensor in tensors):
            raise MetadataError(
                f"{self._label}: attention over a paged cache has no backward, and a gradient is asked for: call it "
                "under torch.no_grad() or torch.inference_mode()"
            )

    def _only_stated(self) -> MetadataError:
        return MetadataError(f"{self._label}: this layer only stated its request, it cannot run")

    @property
    def _label(self) -> str:
        chosen = "nothing selected" if self.selection is None else self.selection.label
        return f'layer {self.prefix!r} (role "{self.role}", {chosen})'

    def extra_repr(self) -> str:
        """Role and choice, for print(model)."""
        chosen = "nothing" if self.selection is None else self.selection.label
        return f"role={self.role!r}, heads={self.request.num_heads}x{self.request.head_size}, runs={chosen}"


def cached_request(
    *,
    role: str,
    kv_cache: KVCacheSpec,
    dtype: str | torch.dtype | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    **needs: Any,
) -> AttentionRequest:
    """What a layer over a cache asks for; dtype and lengths that it does not state are those of the scope.

    Raises:
        ValueError: a field is out of range, or a dtype that cannot be told.
    """
    hints = current_scope().lengths.get(role, (None, None))
    return AttentionRequest(
        role=role,
        dtype=_dtype_of(role, dtype, kv_cache),
        mask_usage="never",  # what a query sees is told by pages, lengths, causality and window
        max_seqlen_q=hints[0] if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_k=hints[1] if max_seqlen_k is None else max_seqlen_k,
        kv_cache=kv_cache,
        **needs,
    )


def _dtype_of(role: str, stated: str | torch.dtype | None, spec: KVCacheSpec) -> str:
    """The dtype of a layer's tensors: what is stated, else that of the scope, else what its cache keeps.

    Raises:
        ValueError: a cache of fewer bits does not tell it.
    """
    stated = stated or current_scope().dtype
    if stated is not None:
        return str(stated)
    if spec.dtype.startswith("fp8"):
        raise ValueError(
            f'role "{role}": its cache keeps {spec.dtype}, which does not tell the dtype of its tensors: state dtype='
        )
    return spec.dtype


def _refuse_ranks(role: str, prefix: str) -> None:
    parallel = current_parallel()
    if parallel is not None:
        raise ConfigError(
            f'role "{role}", layer {prefix!r}: the pages of its KV cache hold whole sequences, and here a sequence is '
            f"split over {parallel.config.size} ranks ({parallel.config.describe()}): build it inside "
            "use_parallel(None), where each rank has whole sequences of its own, or leave the section `parallel` out"
        )
