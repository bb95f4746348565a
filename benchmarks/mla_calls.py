"""What benchmarks/mla.py measures: shapes, tensors, our impls, and the calls of other packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from omni_attn.backends.mla import MLAMetadata, MLASizes
from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.backends.registry import DiffusionAttentionBackendEnum, load_backend
from omni_attn.facts import MLAAttentionSpec

SIZES = MLASizes(latent=512, nope=128, rope=64, value=128)
TOY_SIZES = MLASizes(latent=32, nope=16, rope=16, value=16)


@dataclass(frozen=True)
class Shape:
    """What is measured: decodes of `batch` requests over `context` tokens, or a prompt of `tokens`."""

    heads: int
    batch: int
    context: int
    tokens: int
    page_size: int
    sizes: MLASizes

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float((self.sizes.nope + self.sizes.rope) ** -0.5)


class Setting:
    """Tensors of a shape, and our impl and builder of a backend for it."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.numbers = torch.Generator(device).manual_seed(seed)
        self.spec = MLAAttentionSpec(
            block_size=shape.page_size,
            num_kv_heads=1,
            head_size=shape.sizes.latent + shape.sizes.rope,
            rope_size=shape.sizes.rope,
            dtype=str(self.dtype).removeprefix("torch."),
        )

    def random(self, *shape: int) -> torch.Tensor:
        """Numbers of variance 1."""
        return torch.randn(shape, generator=self.numbers, device=self.device, dtype=self.dtype)

    def common(self, reqs: int, query_len: int, keys: int, table: torch.Tensor) -> CommonAttentionMetadata:
        """A step of equal requests, nothing written."""
        starts = torch.arange(reqs + 1, dtype=torch.int32) * query_len
        lengths = torch.full((reqs,), keys, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(self.device),
            seq_lens_cpu=lengths,
            num_reqs=reqs,
            num_actual_tokens=reqs * query_len,
            max_query_len=query_len,
            max_seq_len=keys,
            block_table=table,
        )

    def ours(self, name: str, common: CommonAttentionMetadata) -> tuple[Any, MLAMetadata]:
        """Impl and metadata of one of our backends."""
        backend = load_backend(DiffusionAttentionBackendEnum[name].value, name)
        geometry: dict[str, Any] = {
            "kv_cache_spec": self.spec,
            "sizes": self.shape.sizes,
            "num_heads": self.shape.heads,
            "num_kv_heads": 1,
            "head_size": self.spec.head_size,
            "value_head_size": self.shape.sizes.latent,
            "softmax_scale": self.shape.scale,
            "causal": True,
        }
        builder = backend.get_mla_builder_cls()(layer_names=("layer",), device=self.device, **geometry)
        return backend.get_mla_impl_cls()(**geometry), builder.build(common)


def flashinfer_call(
    setting: Setting,
    query: tuple[torch.Tensor, torch.Tensor],
    cache: torch.Tensor,
    common: CommonAttentionMetadata,
) -> Callable[[], torch.Tensor]:
    """As its documentation has it: latent and rope parts apart, each dense."""
    shape, device = setting.shape, setting.device
    wrapper_cls = importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
    wrapper = wrapper_cls(torch.empty(256 << 20, dtype=torch.int8, device=device))
    parts = [
        part.contiguous() for part in (cache[..., : shape.sizes.latent], cache[..., shape.sizes.latent :])
    ]
    pages = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * common.block_table.shape[1]
    wrapper.plan(
        common.query_start_loc,
        pages,
        common.block_table.flatten(),
        common.seq_lens,
        shape.heads,
        shape.sizes.latent,
        shape.sizes.rope,
        shape.page_size,
        False,
        shape.scale,
        setting.dtype,
        setting.dtype,
    )
    return lambda: wrapper.run(*query, *parts, return_lse=False)


def flash_3_call(
    setting: Setting,
    query: torch.Tensor,
    key: torch.Tensor,
    rope: torch.Tensor,
    value: torch.Tensor,
    common: CommonAttentionMetadata,
) -> Callable[[], torch.Tensor]:
    """Its keys are put together before the clock runs."""
    function = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
    whole = torch.cat((key, rope[:, None].expand(-1, setting.shape.heads, -1)), dim=2)
    starts, longest = common.query_start_loc, common.max_query_len
    arguments = (query, whole, value.contiguous(), starts, starts, longest, longest)

    def call() -> torch.Tensor:
        given = function(*arguments, softmax_scale=setting.shape.scale, causal=True)
        output: torch.Tensor = given[0] if isinstance(given, tuple) else given
        return output

    return call
