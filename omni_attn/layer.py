"""Attention: the one layer that model authors write. Selects once at construction, runs a kernel per call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling as _is_compiling
from torch.nn.modules.module import _has_any_global_hook

from omni_attn.backends.metadata import AttentionMetadata, Prepared
from omni_attn.calls import check_mask_usage, check_prepared, check_tensors, layer_inputs_of
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.facts import AttentionRequest, KVCacheSpec
from omni_attn.parallel.context import current_parallel
from omni_attn.parallel.dispatch import NOT_SPLIT, split_layer
from omni_attn.parallel.joint import JointTokens, check_joint, join_streams, split_joint
from omni_attn.products import build_prepared
from omni_attn.routes import (
    Route,
    build_routes,
    canonical_overrides,
    group_name,
    layer_index_of,
    served_dtypes,
)
from omni_attn.selector import CollectedLayer, Selection, current_scope, select

if TYPE_CHECKING:
    from omni_attn.backends.abstract import AttentionImpl
    from omni_attn.calibration import LayerCalibration
    from omni_attn.config import AttentionConfig
    from omni_attn.facts.request import MaskUsage, SequenceParallel
    from omni_attn.parallel.strategy import Strategy

# No record holds it, so that a layer's first call takes the whole way.
_NO_CALL: tuple[Prepared, Any, Any] = (Prepared(None, (0, 0)), (), None)


class Attention(nn.Module):
    """Attention of query [B, Sq, H, D] over key [B, Sk, G, D] and value [B, Sk, G, Dv]: [B, Sq, H, Dv].

    The backend is chosen while constructing, from `config`, else from the config in force (`use_attention_config`),
    else from an empty one; `selection` says which and why. The layer has no parameters.

    Args:
        num_heads, head_size: query heads and their channels.
        role, role_category ... batch_invariant: what the layer needs; see AttentionRequest.
        impl_overrides: backend name -> an impl class of the model's own; used if that backend is selected, and must
            subclass the impl it replaces.
        custom_attention: a module called as (query, key, value, metadata) in place of any backend; it owns its
            communication and requires skip_sequence_parallel=True.
        sequence_parallel: None = as the ranks in force are configured (`use_parallel`), or not at all without such.
        skip_sequence_parallel: run on each rank's own tensors, whatever the parallel configuration.
        config: the choice of backends for this layer alone.
        prefix: the layer's name in the model, for reports; options that go by layer number find it in there.
        kv_cache: refused: PagedAttention is the layer over a KV cache.

    Raises:
        BackendRejectedError, NoBackendError, BackendImportError, ConfigError: see select; nothing is built then.
        TypeError: an override does not subclass the selected impl.
        ValueError: a field is out of range, kv_cache, custom_attention without skip_sequence_parallel, or a
            sequence_parallel that is not that of the ranks in force.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        *,
        role: str,
        role_category: str | None = None,
        num_kv_heads: int | None = None,
        value_head_size: int | None = None,
        dtype: str | torch.dtype | None = None,
        causal: bool = False,
        mask_usage: MaskUsage | None = None,
        packed: bool = False,
        softmax_scale: float | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        video_grid: bool = False,
        sequence_parallel: SequenceParallel | None = None,
        requires_grad: bool = False,
        compile: bool = False,
        window: tuple[int, int] | None = None,
        batch_invariant: bool = False,
        kv_cache: KVCacheSpec | None = None,
        impl_overrides: Mapping[str, type[AttentionImpl]] | None = None,
        custom_attention: Callable[..., torch.Tensor] | None = None,
        skip_sequence_parallel: bool = False,
        config: AttentionConfig | Mapping[str, object] | str | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        if kv_cache is not None:
            raise ValueError(
                f'role "{role}": kv_cache= makes a layer whose keys and values lie in pages, and Attention takes them '
                "from its arguments: build a PagedAttention with it, and a prefix"
            )
        scope, ranks = current_scope(), current_parallel()
        parallel = None if skip_sequence_parallel else ranks
        if parallel is not None:
            if sequence_parallel not in (None, parallel.mode):
                raise ValueError(
                    f'role "{role}": sequence_parallel={sequence_parallel!r}, and the ranks in force are connected for '
                    f"{parallel.mode}: leave it out, or connect them for it"
                )
            sequence_parallel = parallel.mode
        hints = scope.lengths.get(role, (None, None))
        self.request = AttentionRequest(
            role=role,
            role_category=role_category,
            num_heads=num_heads,
            head_size=head_size,
            num_kv_heads=num_kv_heads,
            value_head_size=value_head_size,
            dtype=scope.dtype if dtype is None else str(dtype),
            causal=causal,
            mask_usage=mask_usage,
            packed=packed,
            softmax_scale=softmax_scale,
            max_seqlen_q=hints[0] if max_seqlen_q is None else max_seqlen_q,
            max_seqlen_k=hints[1] if max_seqlen_k is None else max_seqlen_k,
            video_grid=video_grid,
            sequence_parallel=None if skip_sequence_parallel else sequence_parallel,
            requires_grad=requires_grad,
            compile=compile,
            window=window,
            batch_invariant=batch_invariant,
        )
        if custom_attention is not None and not skip_sequence_parallel:
            raise ValueError(
                f'role "{role}": custom_attention owns its communication, so it requires skip_sequence_parallel=True'
            )
        if num_heads is None or head_size < 1:
            raise ValueError(
                f'role "{role}": a layer needs num_heads and head_size, found {num_heads} and {head_size}'
            )
        self.role, self.role_category, self.prefix = role, role_category, prefix
        self.custom_attention = custom_attention
        self.impl_overrides = canonical_overrides(impl_overrides)
        self.fallbacks_taken = 0
        self.routes_taken: Counter[str] = Counter()
        self._calibration: LayerCalibration | None = None
        self._config, self._platform = scope.config_for(config), scope.platform_or_current()
        self._is_among_ranks = ranks is not None
        self._split: Strategy | None = None
        routes: tuple[Route, ...] = ()
        if scope.collected is None:
            self._split = None if parallel is None else split_layer(self.request, parallel)
            routes = self._build_routes(self.request) if custom_attention is None else ()
        elif custom_attention is None:
            scope.collected.append(CollectedLayer(self.request, prefix))
        self._settle(routes)

    def _build_routes(self, request: AttentionRequest) -> tuple[Route, ...]:
        return build_routes(request, self._config, self._platform, self.impl_overrides, self._split)

    def _settle(self, routes: tuple[Route, ...]) -> None:
        """Takes on constructed routes; none = the layer is custom, or was only asked for its request."""
        self._routes = routes
        self._called = tuple(route.called for route in routes)
        self._dtypes: tuple[torch.dtype, ...] = ()
        self.group_id = "custom_attention" if self.custom_attention is not None else "not selected"
        for route in routes:
            route.builder.layer_index = layer_index_of(self.prefix)
            if self._calibration is not None:
                route.builder.calibration = self._calibration
        if routes:
            # One object for layers of equal needs: compiled code then sees that equal layers are equal.
            self.request, self._split = routes[0].selection.request, routes[0].split
            self.group_id = group_name(routes)
            self._dtypes = tuple(getattr(torch, name) for name in served_dtypes(routes[0], self._platform))
        stated = self.request.dtype
        self._dtype: torch.dtype | None = None if stated is None else getattr(torch, stated)
        self._own_record = AttentionMetadata()  # of calls that state nothing
        self._active: Prepared | None = None
        # The last call that was checked in full: product, shapes with dtypes, impl. See forward.
        self._last = _NO_CALL

    @property
    def selection(self) -> Selection | None:
        """What was selected and why; None with custom_attention."""
        return self._routes[0].selection if self._routes else None

    @property
    def impl(self) -> AttentionImpl | None:
        """The selected backend's object of this layer; None with custom_attention."""
        return self._routes[0].impl if self._routes else None

    @property
    def parallel(self) -> str | None:
        """What the ranks do with this layer's sequence, in words; None for a layer that was built without ranks."""
        if self._split is not None:
            return self._split.describe()
        return NOT_SPLIT if self._is_among_ranks else None

    @property
    def active_route(self) -> Route | None:
        """The selected route, or the fallback that the last preparation took; None where nothing was selected."""
        if not self._routes:
            return None
        return self._routes[self._active.route if self._active else 0]

    @property
    def route(self) -> str:
        """What was prepared last, in words: the selected backend, one of its own routes, or a fallback."""
        active = self.active_route
        if active is None:
            return self.group_id
        own = getattr(self._active.product, "route", None) if self._active else None
        return f"{active.selection.label}: {own}" if own else active.selection.label

    @property
    def route_reason(self) -> str | None:
        """Why the backend took the route of its own that `route` tells; None if it has no such routes."""
        return getattr(self._active.product, "route_reason", None) if self._active else None

    @property
    def other_route(self) -> str | None:
        """The route and its reason where the last preparation leaves the kernel that was selected; None elsewhere."""
        product = self._active.product if self._active else None
        left = product is not None and not getattr(product, "runs_kernel", True)
        return f"{self.route}, {self.route_reason}" if left else None

    @property
    def fallback_reason(self) -> str | None:
        """Why the last preparation took a fallback; None if it took none."""
        return self._active.refusal if self._active else None

    def reads(self, name: str) -> bool:
        """Whether the selected backend reads a layer input (`gate_compress`), so that a model may skip making it."""
        return any(name in route.layer_inputs for route in self._routes)

    def calibrate(self, calibration: LayerCalibration) -> None:
        """Tells the builders what a checkpoint says about this layer, for options that need it (target_sparsity)."""
        self._calibration = calibration
        self._settle(self._routes)

    def prepare(self, record: AttentionMetadata, lengths: tuple[int, int]) -> Prepared:
        """What calls with `lengths` = (query tokens, key tokens) need; built unless the group already has it.

        Raises:
            MetadataError: the record states something that this layer or its backends cannot express.
        """
        if not self._routes:
            raise MetadataError(
                f'role "{self.role}": nothing was selected for this layer, so nothing is prepared'
            )
        check_mask_usage(self.request, record)
        made = record.prepared(self.group_id)
        if made is None or made.lengths != lengths or made.mask_version != record.mask_version:
            made = build_prepared(self._routes, record, lengths)
            record.keep(self.group_id, made)
        self._active = made
        if made is not self._last[0]:
            self._last = _NO_CALL  # so that the next call tells its own route again
        self.fallbacks_taken += made.route > 0
        self.routes_taken[self.route] += 1
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Copies and files leave out what belongs to the last step."""
        last_step = {"_last": _NO_CALL, "_active": None, "_own_record": AttentionMetadata()}
        return {**self.__dict__, **last_step, "routes_taken": Counter()}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """See forward. nn.Module's own way takes longer than all else here, and is left out where no hook needs it."""
        hooks = (
            self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        )
        if hooks or self._compiled_call_impl is not None or _has_any_global_hook():  # type: ignore[no-untyped-call]
            return super().__call__(query, key, value, metadata)  # type: ignore[no-any-return]
        return self.forward(query, key, value, metadata)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Attention of this call.

        Args:
            query: [B, Sq, H, D]; packed sequences as [1, T, H, D].
            key: [B, Sk, G, D]; value: [B, Sk, G, Dv]; same dtype and device as query.
            metadata: the step's record; None = plain dense attention. Its lengths and masks are those of the whole
                sequence where ranks split it, and query, key and value then this rank's tokens.

        Returns:
            [B, Sq, H, Dv], contiguous, in query's dtype; rows that see no key are zeros. With a joint query of Jq
            tokens among the record's layer inputs [B, Jq + Sq, H, Dv], in the order of the streams.

        Raises:
            MetadataError: shapes, lengths, masks or layer inputs do not fit.
        """
        if self.custom_attention is not None:
            return self.custom_attention(query, key, value, metadata)
        if _is_compiling():
            return self._forward_checked(query, key, value, metadata)
        record = self._own_record if metadata is None else metadata
        made = record.memo.get(self.group_id)
        last, call, impl = self._last
        if (
            made
            is last  # what was checked for the last call holds for one like it, unless the product is a step's own
            and (query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype) == call
            and not record.layer_inputs
        ):
            try:
                return impl.forward(query, key, value, last.product)  # type: ignore[no-any-return]
            except Exception:
                self._check_call(query, key, value)  # a mixture of dtypes or devices is told in our words
                raise
        return self._forward_checked(query, key, value, metadata)

    def _forward_checked(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata | None,
    ) -> torch.Tensor:
        """The whole way: tensors against the layer, the record against the call, extra inputs against the backend."""
        joint, beside = split_joint(metadata.layer_inputs if metadata is not None else {})
        stated = JointTokens() if metadata is None else JointTokens.of(metadata)
        check_joint(self.request, joint, stated, query)
        if self._split is None:
            query, key, value = join_streams(self.request, query, key, value, joint, stated.order)
            joint = {}
        lengths = self._check_call(query, key, value)
        made = self._find_prepared(metadata, lengths)
        route, impl = self._routes[made.route], self._called[made.route]
        check_prepared(route.label, made, query, lengths)
        inputs = layer_inputs_of(self._routes, route, beside)
        output = impl.forward(query, key, value, made.product, **inputs, **joint)
        if not _is_compiling():
            self._active = made
            dtypes = (query.dtype, key.dtype, value.dtype)
            call = (query.shape, key.shape, value.shape, *dtypes)
            self._last = _NO_CALL if beside or stated.key else (made, call, impl)
        return output

    def _find_prepared(self, metadata: AttentionMetadata | None, lengths: tuple[int, int]) -> Prepared:
        """What the record holds for this group, or builds it late.

        Compiled code only reads what was prepared; a call without a record is simple enough to build in a trace.
        """
        made = None if metadata is None else metadata.prepared(self.group_id)
        if _is_compiling():
            if metadata is None and self._split is None:
                return Prepared(self._routes[0].builder.build(AttentionMetadata(), lengths), lengths)
            if made is None:
                raise MetadataError(
                    f'role "{self.role}": the record was not prepared before compiled code; call '
                    "prepare_attention(model, {role: record}, lengths) outside of it"
                )
            return made
        record = self._own_record if metadata is None else metadata
        check_mask_usage(self.request, record)
        if made is not None:
            return made
        if self._split is not None:
            # Other ranks may have another number of tokens in each call, so nothing is kept.
            return build_prepared(self._routes, record, lengths, own=True)
        return self.prepare(record, lengths)

    def _check_call(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
        if not self._routes:
            raise MetadataError(f'role "{self.role}": this layer only stated its request, it cannot run')
        if self.request.sequence_parallel is not None and self._split is None:
            raise MetadataError(
                f'role "{self.role}": sequence_parallel={self.request.sequence_parallel!r} was stated, and no ranks '
                "were in force when the layer was built: it would attend to one rank's tokens only. Build it inside "
                "use_parallel, or leave it out to run on one device"
            )
        lengths = check_tensors(self.request, query, key, value)
        if _is_compiling():
            if query.dtype not in self._dtypes:
                raise MetadataError(
                    f"{self._routes[0].label} has no kernel for {query.dtype}; state dtype= when the layer is built, "
                    "so that the choice takes it into account"
                )
        elif query.dtype is not self._dtype:
            self._check_dtype(query.dtype)
        return lengths

    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Judges a dtype that was unknown at construction, or another; a default or a declared fallback may move."""
        request, current = replace(self.request, dtype=str(dtype)), self._routes[0].selection
        try:
            chosen = select(request, self._config, self._platform)
            if (chosen.class_path, chosen.variant, chosen.index) != (
                current.class_path,
                current.variant,
                current.index,
            ):
                self._settle(self._build_routes(request))
        except BackendRejectedError as error:
            raise MetadataError(f"{error} (dtype found in a call)") from error
        self._dtype = dtype

    def extra_repr(self) -> str:
        """Role and choice, for print(model)."""
        return (
            f"role={self.role!r}, heads={self.request.num_heads}x{self.request.head_size}, runs={self.route}"
        )
