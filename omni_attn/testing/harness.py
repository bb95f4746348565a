"""What the tests of one backend are made of: tensors, prepared calls, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from omni_attn.backends.abstract import AttentionBackend, AttentionImpl
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.facts import AttentionRequest, DeviceInfo, KernelFacts, evaluate
from omni_attn.products import build_product

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Without a machine only what a request asks of the kernel is judged: the limits on hardware and packages are left out.
_NOWHERE = DeviceInfo(kind="any", name="any")
_ANYWHERE: dict[str, Any] = {"device_kinds": frozenset(), "capabilities": (), "cudnn": (), "packages": ()}


class BackendHarness:
    """One factory method to write, `get_backend`; the attributes say where and how to run.

    Attributes:
        variant: which variant; None = the first of the facts, if there are any.
        dtype, device: of the tensors.
        head_size: a size that the backend takes; heads, kv_heads: query heads and shared key-value heads.
        machine: facts of the machine that the kernels run on, None for stand-ins.
        tolerance: allowed maximum absolute error against float64; None = by dtype.
    """

    variant: str | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    head_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    machine: DeviceInfo | None = None
    tolerance: float | None = None

    def get_backend(self) -> type[AttentionBackend]:
        """The backend under test."""
        raise TypeError(
            f"{type(self).__name__} must define get_backend(), which gives the backend under test"
        )

    def kernels(self) -> AbstractContextManager[Any]:
        """What has to be in place while a test runs, for instance stand-in kernels."""
        return nullcontext()

    # -- how pytest, or run_conformance, surrounds each test

    def setup_method(self) -> None:
        """Puts the kernels in place."""
        self._kernels = self.kernels()
        self._kernels.__enter__()

    def teardown_method(self) -> None:
        """Takes them away."""
        self._kernels.__exit__(None, None, None)

    # -- tools

    @property
    def facts(self) -> KernelFacts:
        """Facts of the variant under test."""
        facts = self.get_backend().facts
        if not facts.variants:
            return facts
        return next(v.facts for v in facts.variants if self.variant in (None, v.name))

    def tensors(
        self, batch: int, queries: int, keys: int, *, kv_heads: int | None = None, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random query, key and value; as many queries as keys where the backend takes nothing else."""
        if not self.facts.unequal_lengths:
            queries = keys
        generator = torch.Generator().manual_seed(seed)
        heads = (self.heads, kv_heads or self.heads, kv_heads or self.heads)
        shapes = [(batch, n, h, self.head_size) for n, h in zip((queries, keys, keys), heads, strict=True)]
        query, key, value = (torch.randn(s, generator=generator).to(self.device, self.dtype) for s in shapes)
        return query, key, value

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        record: AttentionMetadata | None = None,
        **geometry: Any,
    ) -> torch.Tensor:
        """Builds impl, builder and product anew, and runs one call."""
        impl, product = self.prepared(query, key, value, record, **geometry)
        return impl.forward(query, key, value, product)

    def prepared(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        record: AttentionMetadata | None = None,
        **geometry: Any,
    ) -> tuple[AttentionImpl, Any]:
        """An impl, and what its builder makes of the record."""
        arguments: dict[str, Any] = {
            "num_heads": query.shape[2],
            "num_kv_heads": key.shape[2],
            "head_size": query.shape[3],
            "value_head_size": value.shape[3],
            "softmax_scale": query.shape[3] ** -0.5,
            "variant": self.variant or next((v.name for v in self.get_backend().facts.variants), None),
            **geometry,
        }
        impl_cls = self.get_backend().get_impl_cls()
        builder = (impl_cls.builder_cls or self.get_backend().get_builder_cls())(**arguments)
        lengths = (query.shape[1], key.shape[1])
        return impl_cls(**arguments), build_product(builder, record or AttentionMetadata(), lengths)

    def close(self, output: torch.Tensor, expected: torch.Tensor) -> None:
        """Asserts equality with a float64 result, within the tolerance; NaN never passes."""
        assert output.shape == expected.shape, f"shape {tuple(output.shape)}, needs {tuple(expected.shape)}"
        limit = TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance
        error = (output.double() - expected.double()).abs().max().item() if output.numel() else 0.0
        assert error <= limit, f"error {error:.2e} against float64, allowed {limit:.0e}"

    def reasons(self, **needs: Any) -> tuple[str, ...]:
        """Why the facts refuse a request with these needs; empty = they accept it."""
        request = AttentionRequest(
            **{"role": "self", "num_heads": self.heads, "head_size": self.head_size, **needs},
        )
        if self.machine is None:
            return evaluate(replace(self.facts, **_ANYWHERE), request, _NOWHERE)
        return evaluate(self.facts, request, self.machine)

    def refused(self, **needs: Any) -> None:
        """Asserts that the facts give a reason against a request with these needs."""
        reasons = self.reasons(**needs)
        assert any("needs" in reason and "found" in reason for reason in reasons), f"nothing refuses {needs}"

    def build_fails(
        self, record: AttentionMetadata, *naming: str, queries: int = 6, keys: int = 6, **geometry: Any
    ) -> None:
        """Asserts that preparing a record raises MetadataError with certain words."""
        error = raised(
            MetadataError, lambda: self.prepared(*self.tensors(2, queries, keys), record, **geometry)
        )
        missing = [word for word in naming if word not in str(error)]
        assert not missing, f"error text lacks {missing}: {error}"

    def masked(self, rows: list[list[int]], **facts: Any) -> AttentionMetadata:
        """A record with a key-padding mask of rows of 0 and 1."""
        mask = torch.tensor(rows, dtype=torch.bool, device=self.device)
        return AttentionMetadata(attn_mask=mask, **facts)


def raised(kind: type[Exception], call: Callable[[], object]) -> Exception:
    """What a call raises, which has to be of a kind; without pytest.raises, so that no pytest is needed."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"nothing was raised, needs {kind.__name__}")
