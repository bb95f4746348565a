"""Attention: the one layer that model authors write. Selects once at construction, runs a kernel per call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling as _is_compiling
from torch.nn.modules.module import _has_any_global_hook

from omni_attn.backends.metadata import AttentionMetadata, Prepared
from omni_attn.calls import check_prepared, check_tensors, layer_inputs_of
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.facts import AttentionRequest
from omni_attn.routes import Route, build_prepared, build_routes, group_name
from omni_attn.selector import CollectedLayer, Selection, current_scope

if TYPE_CHECKING:
    from omni_attn.backends.abstract import AttentionImpl
    from omni_attn.config import AttentionConfig
    from omni_attn.facts.request import MaskUsage, SequenceParallel

__all__ = ["Attention", "prepare_attention"]


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
        skip_sequence_parallel: run on each rank's own tensors, whatever the parallel configuration.
        config: the choice of backends for this layer alone.
        prefix: the layer's name in the model, for texts.

    Raises:
        BackendRejectedError, NoBackendError, BackendImportError, ConfigError: see select; nothing is built then.
        TypeError: an override does not subclass the selected impl.
        ValueError: a field is out of range, or custom_attention without skip_sequence_parallel.
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
        impl_overrides: Mapping[str, type[AttentionImpl]] | None = None,
        custom_attention: Callable[..., torch.Tensor] | None = None,
        skip_sequence_parallel: bool = False,
        config: AttentionConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        scope = current_scope()
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
        self.prefix = prefix
        self.custom_attention = custom_attention
        self.impl_overrides = dict(impl_overrides or {})
        self.fallbacks_taken = 0
        self._config = scope.config if config is None else config
        self._platform = scope.platform
        self._settle(scope.collected)

    def _settle(self, collected: list[CollectedLayer] | None = None) -> None:
        """Chooses and constructs the impls, or leaves the request where it is asked for."""
        request = self.request
        routes: tuple[Route, ...] = ()
        if collected is not None:
            collected.append(CollectedLayer(request, self.prefix))
        elif self.custom_attention is None:
            routes = build_routes(request, self._config, self._platform, self.impl_overrides)
            # One object for layers of equal needs: compiled code then sees that equal layers are equal.
            self.request = request = routes[0].selection.request
        self.role, self.role_category = request.role, request.role_category
        self.group_id = (
            group_name(routes) if routes else "custom_attention" if self.custom_attention else "not selected"
        )
        self._routes = routes
        self._impls = tuple(route.impl for route in routes)
        self._route = routes[0].selection.label if routes else self.group_id
        self._dtype: torch.dtype | None = (
            None if request.dtype is None else getattr(torch, request.dtype, None)
        )
        self._dtypes = (
            tuple(getattr(torch, name) for name in sorted(routes[0].facts.dtypes)) if routes else ()
        )
        self._own_record = AttentionMetadata()  # of calls that state nothing
        self._last: tuple[Any, ...] = (None,) * 4  # see __call__

    @property
    def selection(self) -> Selection | None:
        """What was selected and why; None with custom_attention."""
        return self._routes[0].selection if self._routes else None

    @property
    def impl(self) -> AttentionImpl | None:
        """The selected backend's object of this layer; None with custom_attention."""
        return self._impls[0] if self._impls else None

    @property
    def route(self) -> str:
        """What was prepared last: the selected backend, one of its own routes, or a fallback."""
        return self._route

    def reads(self, name: str) -> bool:
        """Whether the selected backend reads a layer input (`gate_compress`), so that a model may skip making it."""
        return any(name in route.selection.backend_cls.facts.layer_inputs for route in self._routes)

    def prepare(self, record: AttentionMetadata, lengths: tuple[int, int]) -> None:
        """Builds what calls with `lengths` = (query tokens, key tokens) need, unless the group already has it.

        Raises:
            MetadataError: the record states something that this layer or its backends cannot express.
        """
        made = record.prepared(self.group_id)
        if made is None or made.lengths != lengths:
            made = self._build(record, lengths)
            record.keep(self.group_id, made)
        self._note_route(made)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """See forward. A call like the layer's last one goes straight to its kernel.

        Hooks, compiled code and layer inputs take nn.Module's way through forward.
        """
        if not _is_compiling():
            record = self._own_record if metadata is None else metadata
            memo, call, run, product = self._last
            if (
                record.memo is memo
                and (query.shape, key.shape, value.shape, query.dtype) == call
                and not (record.layer_inputs or self._forward_hooks or self._forward_pre_hooks)
                and not (self._backward_hooks or self._backward_pre_hooks or self._compiled_call_impl)
                and not _has_any_global_hook()  # type: ignore[no-untyped-call]
            ):
                return run(query, key, value, product)  # type: ignore[no-any-return]
        output: torch.Tensor = super().__call__(query, key, value, metadata)
        return output

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
            metadata: the step's record; None = plain dense attention.

        Returns:
            [B, Sq, H, Dv], contiguous, in query's dtype; rows that see no key are zeros.

        Raises:
            MetadataError: shapes, lengths, masks or layer inputs do not fit.
        """
        if self.custom_attention is not None:
            return self.custom_attention(query, key, value, metadata)
        lengths = self._check_call(query, key, value)
        made = self._find_prepared(metadata, lengths)
        check_prepared(self.role, made, query, lengths)
        impl = self._impls[made.route]
        if metadata is not None and metadata.layer_inputs:
            inputs = layer_inputs_of(self._routes, made.route, metadata.layer_inputs)
            return impl.forward(query, key, value, made.product, **inputs)
        output = impl.forward(query, key, value, made.product)
        if not _is_compiling():
            self._remember(metadata, (query.shape, key.shape, value.shape, query.dtype), made)
        return output

    def _remember(self, metadata: AttentionMetadata | None, call: tuple[Any, ...], made: Prepared) -> None:
        """Notes a call that was checked in full, for `__call__`; not one whose product changes with the step."""
        record = self._own_record if metadata is None else metadata
        if self.group_id in record.memo:
            self._last = (record.memo, call, self._impls[made.route].forward_for(made.product), made.product)

    def _build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> Prepared:
        if not self._routes:
            raise MetadataError(
                f'role "{self.role}": nothing was selected for this layer, so nothing is prepared'
            )
        return build_prepared(self._routes, record, lengths)

    def _note_route(self, made: Prepared) -> None:
        own = getattr(made.product, "route", None)
        label = self._routes[made.route].selection.label
        self._route = f"{label}: {own}" if own else label
        self.fallbacks_taken += made.route > 0

    def _find_prepared(self, metadata: AttentionMetadata | None, lengths: tuple[int, int]) -> Prepared:
        """What the record holds for this group, or builds it late.

        Compiled code only reads what was prepared; a call without a record is simple enough to build in a trace.
        """
        if metadata is None:
            if _is_compiling():
                return self._build(AttentionMetadata(), lengths)
            self.prepare(self._own_record, lengths)
            metadata = self._own_record
        made = metadata.prepared(self.group_id)
        if made is None:
            if _is_compiling():
                raise MetadataError(
                    f'role "{self.role}": the record was not prepared before compiled code; call '
                    "prepare_attention(model, {role: record}, lengths) outside of it"
                )
            self.prepare(metadata, lengths)
            made = metadata.prepared(self.group_id)
            assert made is not None
        return made

    def _check_call(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
        if not self._routes:
            raise MetadataError(f'role "{self.role}": this layer only stated its request, it cannot run')
        lengths = check_tensors(self.request, query, key, value)
        if _is_compiling():
            if query.dtype not in self._dtypes:
                raise MetadataError(f'role "{self.role}": {self._route} has no kernel for {query.dtype}')
        elif query.dtype is not self._dtype:
            self._check_dtype(query.dtype)
        return lengths

    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Judges a dtype that was unknown at construction, or another; a default or a declared fallback may move on."""
        known, self.request = self.request, replace(self.request, dtype=str(dtype))
        selection = self._routes[0].selection
        device, spec = self._platform.device, selection.spec
        if selection.backend_cls.validate_configuration(self.request, device, spec):
            try:
                self._settle()
            except BackendRejectedError as error:
                self.request = known
                raise MetadataError(f"{error} (found in a call)") from error
        self._dtype = dtype

    def extra_repr(self) -> str:
        """Role and choice, for print(model)."""
        return (
            f"role={self.role!r}, heads={self.request.num_heads}x{self.request.head_size}, runs={self._route}"
        )


def prepare_attention(
    model: nn.Module,
    records: Mapping[str, AttentionMetadata],
    lengths: Mapping[str, tuple[int, int]],
) -> None:
    """Prepares one step: each group of layers builds once what its calls need. Call it before the blocks run.

    Args:
        model: module whose Attention layers are prepared.
        records: role -> what the calls of that role look like; roles not named stay unprepared.
        lengths: role -> (query tokens, key tokens), for every role in records.

    Raises:
        MetadataError: a role that no layer has or that lacks lengths; one record for calls of different lengths; or
            a record that a backend cannot express.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    roles = {layer.role for layer in layers}
    for role in records:
        if role not in roles:
            raise MetadataError(f'no layer has role "{role}"; the roles of this model are {sorted(roles)}')
        if role not in lengths:
            raise MetadataError(f'role "{role}" has a record but no lengths: give (query tokens, key tokens)')
    done: dict[tuple[int, str], tuple[str, tuple[int, int]]] = {}
    for layer in layers:
        record = records.get(layer.role)
        if record is None or layer.custom_attention is not None:
            continue
        wanted = lengths[layer.role]
        role, known = done.setdefault((id(record), layer.group_id), (layer.role, wanted))
        if known != wanted:
            raise MetadataError(
                f'roles "{role}" and "{layer.role}" share one record but have lengths {known} and {wanted}: state one '
                "record per kind of call"
            )
        layer.prepare(record, wanted)
