"""One attention call to measure: what its layer needs, its tensors, its record, and its float64 reference.

Legend: B batch, S sequence, H heads, G kv heads, D head size, R sampled query rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.config import AttentionConfig, AttentionSpec
from omni_attn.facts import AttentionRequest
from omni_attn.layer import Attention
from omni_attn.ops.reference import reference_attention
from omni_attn.platforms import OmniPlatform
from omni_attn.selector import use_attention_config
from omni_attn.tuning.shapes import Shape

SAMPLED_ROWS = 64
# A role that only says "padding" does not say how much: the last sixteenth of the keys is hidden then.
_HIDDEN_PART = 16
_SEED = 0

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention call.

    Attributes:
        name: of a named shape, or a role.
        request: what the layer needs; dtype, num_heads and both lengths are known.
        batch: items.
        kept_keys: keys that a [B, K] mask leaves in sight, known on the host; None = no mask.
        grid: the (T, H, W) grid that the record publishes.
    """

    name: str
    request: AttentionRequest
    batch: int = 1
    kept_keys: int | None = None
    grid: tuple[int, int, int] | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """(query tokens, key tokens)."""
        queries, keys = self.request.max_seqlen_q, self.request.max_seqlen_k
        assert queries is not None and keys is not None
        return queries, keys

    @property
    def heads(self) -> int:
        """Query heads."""
        assert self.request.num_heads is not None
        return self.request.num_heads

    @property
    def operations(self) -> int:
        """4 B Sq Sk H D: multiplications and additions of a dense call, whatever is masked."""
        queries, keys = self.lengths
        return 4 * self.batch * queries * keys * self.heads * self.request.head_size

    def __str__(self) -> str:
        queries, keys = self.lengths
        masked = "" if self.kept_keys is None else f" ({self.kept_keys} keys kept by a padding mask)"
        return f"{queries} x {keys} tokens{masked}, {self.heads} heads of {self.request.head_size}"

    def layer(self, spec: AttentionSpec | None, platform: OmniPlatform) -> Attention:
        """A layer of this call that runs a spec, None = the platform's default.

        Raises:
            OmniAttnError: it cannot be built here.
        """
        needs = {f.name: getattr(self.request, f.name) for f in fields(AttentionRequest)}
        with use_attention_config(AttentionConfig(default=spec), platform=platform):
            return Attention(needs.pop("num_heads"), needs.pop("head_size"), **needs)

    def tensors(self, device: torch.device) -> Tensors:
        """Seeded normal query [B, Sq, H, D], key [B, Sk, G, D] and value [B, Sk, G, Dv]."""
        request = self.request
        queries, keys = self.lengths
        generator = torch.Generator(device).manual_seed(_SEED)
        kv_heads, value_size = (
            request.num_kv_heads or self.heads,
            request.value_head_size or request.head_size,
        )
        query, key, value = (
            torch.randn(self.batch, *shape, generator=generator, device=device, dtype=self.dtype)
            for shape in (
                (queries, self.heads, request.head_size),
                (keys, kv_heads, request.head_size),
                (keys, kv_heads, value_size),
            )
        )
        return query, key, value

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensors."""
        assert self.request.dtype is not None
        found: torch.dtype = getattr(torch, self.request.dtype)
        return found

    @property
    def tensor_bytes(self) -> int:
        """Size of query, key, value and one output."""
        queries, keys = self.lengths
        kv_heads, value_size = self.request.num_kv_heads or self.heads, self.request.value_head_size or 0
        per_query = self.heads * (self.request.head_size + value_size)
        per_key = kv_heads * (self.request.head_size + value_size)
        return self.batch * (queries * per_query + keys * per_key) * self.dtype.itemsize

    def record(self, device: torch.device) -> AttentionMetadata:
        """What the model would state: its mask on the device with the lengths as host facts, its grid."""
        if self.kept_keys is None:
            return AttentionMetadata(vsa_dit_seq_shape=self.grid)
        mask = (torch.arange(self.lengths[1], device=device) < self.kept_keys).expand(self.batch, -1)
        return AttentionMetadata(
            attn_mask=mask.contiguous(),
            mask_mode="padding",
            kv_lengths=(self.kept_keys,) * self.batch,
            vsa_dit_seq_shape=self.grid,
        )

    def sample(self, device: torch.device) -> torch.Tensor:
        """Indices of the query rows that are compared with the reference, at most SAMPLED_ROWS."""
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randperm(self.lengths[0], generator=generator)[:SAMPLED_ROWS].sort().values.to(device)

    def expected(self, tensors: Tensors, sample: torch.Tensor) -> torch.Tensor:
        """The sampled rows in float64, [B, R, H, Dv]; one head after the other, to bound memory."""
        if tensors[0].device.type == "mps":  # which has no float64
            return self.expected((tensors[0].cpu(), tensors[1].cpu(), tensors[2].cpu()), sample.cpu())
        query, key, value = tensors
        query, keep = query[:, sample], self._keep(sample)
        shared = query.shape[2] // key.shape[2]
        outputs = []
        for head in range(query.shape[2]):
            group = slice(head // shared, head // shared + 1)
            outputs.append(
                reference_attention(
                    query[:, :, head : head + 1],
                    key[:, :, group],
                    value[:, :, group],
                    softmax_scale=self.request.softmax_scale,
                    attn_mask=keep,
                )[0]
            )
        return torch.cat(outputs, dim=2)

    def _keep(self, sample: torch.Tensor) -> torch.Tensor | None:
        """Keep mask [1, 1, R, Sk] of padding, causal and window together; aligned at the bottom right."""
        queries, keys = self.lengths
        request = self.request
        if self.kept_keys is None and not request.causal and request.window is None:
            return None
        key = torch.arange(keys, device=sample.device)[None, :]
        position = (sample + (keys - queries))[:, None]
        keep = (key < (keys if self.kept_keys is None else self.kept_keys)).expand(len(sample), -1)
        left, right = request.window or (-1, -1)
        if request.causal:
            keep = keep & (key <= position)
        if left >= 0:
            keep = keep & (key >= position - left)
        if right >= 0:
            keep = keep & (key <= position + right)
        return keep[None, None]


def case_of_shape(shape: Shape, dtype: str) -> Case:
    """The call of a named shape."""
    request = AttentionRequest(
        role=shape.role,
        role_category=shape.role,
        num_heads=shape.heads,
        head_size=shape.head_size,
        dtype=dtype,
        mask_usage="never" if shape.kept_keys is None else "padding",
        max_seqlen_q=shape.queries,
        max_seqlen_k=shape.keys,
        video_grid=shape.grid is not None,
    )
    return Case(
        name=shape.name, request=request, batch=shape.batch, kept_keys=shape.kept_keys, grid=shape.grid
    )


def case_of_request(request: AttentionRequest) -> Case:
    """The call of a model's layer, whose request states both lengths.

    A layer that takes padding masks is measured with one; masks of any other kind are the step's own and unknown here.
    """
    keys = request.max_seqlen_k
    assert keys is not None
    kept = keys - keys // _HIDDEN_PART if request.mask_usage == "padding" else None
    return Case(name=request.role, request=replace(request, sequence_parallel=None), kept_keys=kept)
