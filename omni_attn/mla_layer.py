"""MLAAttention: multi-head latent attention over a paged cache of latents.

With latents c and rope keys r of all tokens, and a head's part W = [W_K; W_V] of the up-projection, a query [q | p]
sees keys [W_K c | r] and values W_V c. Where there are few queries they are absorbed, as q . W_K c = W_K^T q . c: the
query [W_K^T q | p] attends to the rows [c | r] as they are kept, and W_V is applied to what comes out. The softmax
scale is the same in both forms (DeepSeek-V2, arXiv 2405.04434, section 2.1). Legend: see omni_attn.ops.mla.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling as _is_compiling

from omni_attn.backends.mla import MLAImpl, MLAMetadata
from omni_attn.backends.mla_context import MOST_ROWS, workspace_rows
from omni_attn.backends.paged import PagedMetadataBuilder
from omni_attn.backends.refusals import refuse_output_scales
from omni_attn.errors import MetadataError
from omni_attn.facts import MLAAttentionSpec
from omni_attn.kv_cache.cached_layer import CachedLayer, cached_request
from omni_attn.kv_cache.mla_checks import mla_call_problem, mla_sizes
from omni_attn.kv_cache.step import PagedCall, PagedStep

if TYPE_CHECKING:
    from omni_attn.backends.abstract import AttentionBackend
    from omni_attn.config import AttentionConfig

__all__ = ["MLAAttention"]


class MLAAttention(CachedLayer):
    """Latent attention: writes a step's latents into the cache, then attends to all that is there.

    The backend is chosen while constructing. The layer has no parameters of its own and keeps no cache: the
    up-projection stays the model's, and its weight is read where it lies, so that a checkpoint may be loaded at any
    time. It has no backward.

    Args:
        num_heads: H.
        role, role_category ... compile, batch_invariant: what the layer needs; see AttentionRequest.
        kv_cache: what it keeps per token; its head_size is C + E.
        qk_nope_head_size, v_head_size: K and V.
        kv_b_proj: the up-projection without bias, weight [H * (K + V), C], of each head first the key's rows.
        prefix: its unique name in the model; cache and metadata are found by it.
        dtype: of its tensors; None = the one in force, else that of the cache.
        softmax_scale: None = (K + E) ** -0.5.
        decode_threshold: most new tokens of a request that count as decode.
        non_causal_blocks: steps may be non-causal: blocks of equal length whose tokens see one another.
        workspace: rows of earlier latents that are opened at once for prefills; None = for streams of max_seqlen_k.
        cache_group: name of the page table that it uses, None = its role.
        impl_overrides: backend name -> an impl class of the model's own, see Attention.
        config: the choice of backends for this layer alone.

    Raises:
        BackendRejectedError, NoBackendError, BackendImportError, ConfigError: see select; nothing is built then.
        TypeError: an override does not subclass the selected impl.
        ValueError: a size is out of range or does not fit the others, no prefix, or a dtype that cannot be told.
        NotImplementedError: kv_sharing_target: latent attention reads no other layer's cache.
    """

    kv_b_proj: nn.Linear

    def __init__(
        self,
        num_heads: int,
        *,
        role: str,
        kv_cache: MLAAttentionSpec,
        qk_nope_head_size: int,
        v_head_size: int,
        kv_b_proj: nn.Linear,
        prefix: str,
        role_category: str | None = None,
        dtype: str | torch.dtype | None = None,
        softmax_scale: float | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        compile: bool = False,
        batch_invariant: bool = False,
        decode_threshold: int = 1,
        non_causal_blocks: bool = False,
        workspace: int | None = None,
        cache_group: str | None = None,
        kv_sharing_target: str | None = None,
        impl_overrides: Mapping[str, type[MLAImpl]] | None = None,
        config: AttentionConfig | Mapping[str, object] | str | None = None,
    ) -> None:
        sizes = mla_sizes(role, num_heads, kv_cache, qk_nope_head_size, v_head_size, kv_b_proj, prefix)
        if kv_sharing_target is not None:
            raise NotImplementedError(
                f"layer {prefix!r}: it should read the cache of {kv_sharing_target!r}, and latent attention reads its "
                "own alone: leave kv_sharing_target out"
            )
        request = cached_request(
            role=role,
            role_category=role_category,
            num_heads=num_heads,
            head_size=sizes.latent + sizes.rope,
            num_kv_heads=1,
            value_head_size=sizes.latent,
            dtype=dtype,
            causal=True,
            softmax_scale=(sizes.nope + sizes.rope) ** -0.5 if softmax_scale is None else softmax_scale,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            compile=compile,
            batch_invariant=batch_invariant,
            kv_cache=kv_cache,
        )
        if workspace is None:
            workspace = workspace_rows(request.max_seqlen_k or MOST_ROWS, 1, kv_cache.block_size)
        super().__init__(
            request,
            prefix=prefix,
            cache_group=cache_group,
            kv_sharing_target=None,
            impl_overrides=impl_overrides,
            config=config,
            options={"sizes": sizes},
            builder_options={
                "decode_threshold": decode_threshold,
                "non_causal_blocks": non_causal_blocks,
                "workspace": workspace,
            },
        )
        self.sizes, self.workspace = sizes, workspace
        # Not a submodule: it is the model's, whose checkpoint would have it twice.
        self.__dict__["kv_b_proj"] = kv_b_proj

    @staticmethod
    def _classes(backend: type[AttentionBackend]) -> tuple[type[Any], type[PagedMetadataBuilder]]:
        return backend.get_mla_impl_cls(), backend.get_mla_builder_cls()

    def forward(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope_key: torch.Tensor,
        step: PagedStep | PagedCall | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the latents into the cache where the step has slots for them, then attends.

        Args:
            query: [T, H, K + E], its last E channels with positions applied; rows behind the step's are padding, whose
                output is zeros.
            latent: [T, C], normalised; rope_key: [T, E] or [T, 1, E], with positions applied; query's dtype.
            step: the step, or this layer's part of it; None = a run that measures memory: zeros, and the most memory
                that opening earlier latents takes.
            output: [T, H, V] that is written and given back; None = a new one.

        Raises:
            MetadataError: shapes or dtypes do not fit, or the layer has no part in the step.
            NotImplementedError: an output scale is given.
        """
        impl = self.impl
        if impl is None:
            raise self._only_stated()
        refuse_output_scales(impl, output_scale, output_block_scale)
        if output is None:
            output = query.new_empty(query.shape[0], impl.num_heads, self.sizes.value)
        if step is None:
            self._reserve(latent)
            return output.zero_()
        call = self._call_of(step)
        if rope_key.dim() == 3:
            rope_key = rope_key.squeeze(1)
        weight = self.kv_b_proj.weight
        shapes = (query.shape, latent.shape, rope_key.shape, call.kv_cache.shape, output.shape)
        dtypes = (query.dtype, latent.dtype, rope_key.dtype, weight.dtype, call.kv_cache.dtype)
        seen = (*shapes, call.num_tokens, *dtypes)
        if _is_compiling() or seen != self._checked:
            tensors = {
                "query": query,
                "latent": latent,
                "rope_key": rope_key,
                "output": output,
                "kv_b_proj.weight": weight,
            }
            problem = mla_call_problem(
                tensors, call, self.sizes, self._kernel_spec, self.request, self._dtype
            )
            if problem is not None:
                raise MetadataError(f"{self._label}: {problem}")
            if not _is_compiling():
                self._checked = seen
        if torch.is_grad_enabled():
            self._refuse_gradients(query, latent, rope_key, weight)
        if call.slot_mapping is not None:
            impl.update_kv_cache(latent, rope_key, call.kv_cache, call.slot_mapping)
        self._attend(impl, query, latent, rope_key, call, output)
        return output

    def _attend(
        self,
        impl: MLAImpl,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope_key: torch.Tensor,
        call: PagedCall,
        output: torch.Tensor,
    ) -> None:
        metadata, kv_cache = call.metadata, call.kv_cache
        if not isinstance(metadata, MLAMetadata):
            raise MetadataError(
                f"{self._label} needs the MLAMetadata that its builder makes, found {type(metadata).__name__}"
            )
        behind, first = metadata.num_tokens, metadata.split.num_decode_tokens
        if metadata.prefill is not None:
            own = slice(first, behind)
            parts = query[own], latent[own], rope_key[own]
            impl.forward_mha(*parts, kv_cache, metadata, self.kv_b_proj, output[own])
        if metadata.decode is not None:
            key_HKC, value_HVC = self._up_projections()
            nope, rope = query[:first, :, : self.sizes.nope], query[:first, :, self.sizes.nope :]
            absorbed_HTC = torch.bmm(nope.transpose(0, 1), key_HKC)
            latents, _ = impl.forward_mqa((absorbed_HTC.transpose(0, 1), rope), kv_cache, metadata)
            values = latents.transpose(0, 1), value_HVC.transpose(1, 2)
            target = output[:first].transpose(0, 1)
            # Dynamo traces no product into a transposed output.
            if output.dtype == query.dtype and not _is_compiling():
                torch.bmm(*values, out=target)
            else:
                target.copy_(torch.bmm(*values))
        if behind < output.shape[0]:
            output[behind:].zero_()

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W_K [H, K, C] and W_V [H, V, C], views of the weight as it is now."""
        latent, nope, _, value = self.sizes
        both = self.kv_b_proj.weight.view(-1, nope + value, latent)
        return both[:, :nope], both[:, nope:]

    def _reserve(self, latent: torch.Tensor) -> None:
        """Takes as much memory as one chunk of earlier latents and what is made of it, and gives it back."""
        held = latent.new_empty(self.workspace, self.kv_cache_spec.head_size)
        opened = latent.new_empty(self.workspace, self.kv_b_proj.weight.shape[0])
        del held, opened
