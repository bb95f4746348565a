"""Backends of the tests' own that count: how often the builder prepares, and what reaches the impl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from omni_attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.registry import register_diffusion_backend, unregister_diffusion_backend
from omni_attn.errors import MetadataError
from omni_attn.facts import BackendFacts
from omni_attn.ops.reference import reference_attention

PLAIN = BackendFacts(
    summary="counts",
    dtypes=frozenset({"float32", "float16", "bfloat16"}),
    gqa=True,
    compile_mode="traceable",
)


@dataclass
class Tally:
    """What happened to one counting backend, in order."""

    constructed: int = 0
    builds: list[tuple[AttentionMetadata, tuple[int, int]]] = field(default_factory=list)
    products: list[Any] = field(default_factory=list)
    inputs: list[dict[str, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Product:
    """M of a counting backend."""

    number: int
    sigma: float | None


@contextmanager
def counting_backend(
    name: str,
    *,
    reads: frozenset[str] = frozenset(),
    layer_inputs: frozenset[str] = frozenset(),
    refuse: Callable[[AttentionMetadata, tuple[int, int]], bool] = lambda record, lengths: False,
    kernel: Callable[..., torch.Tensor] = lambda query, key, value: reference_attention(query, key, value)[0],
) -> Iterator[Tally]:
    """Registers a backend under a name of one's own for the time of the block.

    Args:
        reads: record fields that its builder declares.
        layer_inputs: what its facts name.
        refuse: which records its builder cannot express.
        kernel: what runs.
    """
    tally = Tally()
    read_fields, input_names = frozenset(reads), frozenset(layer_inputs)

    class Builder(AttentionMetadataBuilder):
        reads = read_fields

        def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> Product:
            tally.builds.append((record, lengths))
            if refuse(record, lengths):
                raise MetadataError(f"{name} cannot express this step")
            return Product(len(tally.builds), record.sigma)

    class Impl(AttentionImpl):
        def __init__(self, **geometry: Any) -> None:
            super().__init__(**geometry)
            tally.constructed += 1

        def forward(self, query: Any, key: Any, value: Any, metadata: Any, **inputs: Any) -> torch.Tensor:
            tally.products.append(metadata)
            tally.inputs.append(inputs)
            return kernel(query, key, value).to(query.dtype)

    class Backend(AttentionBackend):
        facts = replace(PLAIN, layer_inputs=input_names)

        @staticmethod
        def get_name() -> str:
            return name

        @staticmethod
        def get_impl_cls() -> type[AttentionImpl]:
            return Impl

        @staticmethod
        def get_builder_cls() -> type[AttentionMetadataBuilder]:
            return Builder

    for cls in (Builder, Impl, Backend):  # classes of two counting backends are told apart by their names
        cls.__qualname__ = f"{name}{cls.__name__}"
    register_diffusion_backend(name, Backend)
    try:
        yield tally
    finally:
        unregister_diffusion_backend(name)
