"""What the tests of one backend are made of: tensors, prepared calls, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import SkipTest

import torch

from omni_attn.backends.abstract import AttentionBackend, AttentionImpl
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.facts import AttentionRequest, BackendFacts, DeviceInfo, KernelFacts, evaluate
from omni_attn.products import build_product

if TYPE_CHECKING:
    from omni_attn.config import AttentionSpec

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Largest deviation over the documented relative error, see allowed_error.
DOCUMENTED_FACTOR = 5.0
# Without a machine only what a request asks of the kernel is judged: the limits on hardware and packages are left out.
_NOWHERE = DeviceInfo(kind="any", name="any")
_ANYWHERE: dict[str, Any] = {"device_kinds": frozenset(), "capabilities": (), "cudnn": (), "packages": ()}
_ANYWHERE |= {"architectures": frozenset()}


def allowed_error(facts: BackendFacts, dtype: torch.dtype) -> float:
    """Maximum absolute error that the tests of a backend allow, on their normal tensors of variance 1.

    An exact kernel may be off by what its dtype rounds. A quantised or approximate one documents a relative error r,
    the norm of the deviation over the norm of the output. Attention averages values of variance 1, so outputs have
    a standard deviation of at most 1, and deviations one of at most r. The largest of the ten thousand numbers that a
    test compares is expected at 4 standard deviations; 5 r leaves room for tails, and is far below the differences
    that a wrong mask, scale or order makes, which are of the size of the values themselves. Without a documented
    number the dtype decides: what nobody stated is not allowed for.
    """
    limit = TOLERANCE[dtype]
    if facts.numerics == "exact" or facts.error is None:
        return limit
    return max(limit, DOCUMENTED_FACTOR * float(facts.error))


class BackendHarness:
    """One factory method to write, `get_backend`; the attributes say where and how to run.

    Attributes:
        variant: which variant; None = the first of the facts, if there are any.
        dtype, device: of the tensors.
        head_size: a size that the backend takes; heads, kv_heads: query heads and shared key-value heads.
        spec: options of the choice; None = the backend's own.
        machine: facts of the machine that the kernels run on, None for stand-ins.
        tolerance: allowed maximum absolute error against float64; None = by dtype and documented error.
    """

    variant: str | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    head_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    spec: AttentionSpec | None = None
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

    def query_tokens(self, least: int) -> int:
        """The smallest number of query tokens from `least` on that the backend takes."""
        return max(least, self.facts.min_query_tokens)

    def key_tokens(self, least: int) -> int:
        """The smallest number of key tokens from `least` on that the backend takes; 0 stays 0."""
        least = max(least, self.facts.min_key_tokens) if least else 0
        whole_tiles = -(-least // self.facts.key_tile) * self.facts.key_tile
        return least if least >= self.facts.min_ragged_keys else whole_tiles

    def tokens(self, least: int) -> int:
        """The smallest number from `least` on that the backend takes for queries and keys alike; 0 stays 0."""
        return self.key_tokens(self.query_tokens(least)) if least else 0

    def tensors(
        self, batch: int, queries: int, keys: int, *, kv_heads: int | None = None, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random query, key and value; as many queries as keys where the backend takes nothing else.

        Lengths that the backend does not take become the next longer ones that it takes; equal ones stay equal.
        """
        if not self.facts.unequal_lengths:
            queries = keys
        if queries == keys:
            queries = keys = self.tokens(keys)
        else:
            queries, keys = self.query_tokens(queries), self.key_tokens(keys)
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
            "spec": self.spec,
            "variant": self.variant or next((v.name for v in self.get_backend().facts.variants), None),
            **geometry,
        }
        impl_cls = self.get_backend().get_impl_cls()
        builder = (impl_cls.builder_cls or self.get_backend().get_builder_cls())(**arguments)
        lengths = (query.shape[1], key.shape[1])
        return impl_cls(**arguments), build_product(builder, self.stated(record, lengths), lengths)

    def stated(self, record: AttentionMetadata | None, lengths: tuple[int, int]) -> AttentionMetadata:
        """A record as the model of such a backend would state it, for tests that are about something else.

        Where it needs a video's grid, that is one row of all tokens in use, and all its tiles are attended to on the
        backend's own kernel: then a sparse kernel owes the numbers of the dense reference.
        """
        return (
            (record or AttentionMetadata()) if not self.facts.needs_video_grid else with_grid(record, lengths)
        )

    def close(self, output: torch.Tensor, expected: torch.Tensor) -> None:
        """Asserts equality with a float64 result, within the tolerance; NaN never passes."""
        assert output.shape == expected.shape, f"shape {tuple(output.shape)}, needs {tuple(expected.shape)}"
        limit = self.tolerance
        if limit is None:
            limit = allowed_error(self.get_backend().facts, self.dtype)
        error = (output.double() - expected.double()).abs().max().item() if output.numel() else 0.0
        assert error <= limit, f"error {error:.2e} against float64, allowed {limit:.1e}"

    def reasons(self, **needs: Any) -> tuple[str, ...]:
        """Why the facts refuse a request with these needs; empty = they accept it."""
        request = AttentionRequest(
            **{
                "role": "self",
                "num_heads": self.heads,
                "head_size": self.head_size,
                "video_grid": True,
                **needs,
            },
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

    def skip(self, reason: str) -> NoReturn:
        """Ends a test that has nothing to check here, in a way that pytest and run_conformance both know."""
        raise SkipTest(reason)

    def masked(self, rows: list[list[int]], **facts: Any) -> AttentionMetadata:
        """A record with a key-padding mask of rows of 0 and 1."""
        mask = torch.tensor(rows, dtype=torch.bool, device=self.device)
        return AttentionMetadata(attn_mask=mask, **facts)


def with_grid(record: AttentionMetadata | None, lengths: tuple[int, int]) -> AttentionMetadata:
    """A record with a grid of one row that holds all tokens in use, unless it states one."""
    record = record or AttentionMetadata()
    if record.vsa_dit_seq_shape is not None:
        return record
    padding = record.packed_padding
    tokens = lengths[0] if padding is None else padding.q_length
    return replace(record, vsa_dit_seq_shape=(1, 1, tokens), preserve_vsa_all_blocks=True)


def raised(kind: type[Exception], call: Callable[[], object]) -> Exception:
    """What a call raises, which has to be of a kind; without pytest.raises, so that no pytest is needed."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"nothing was raised, needs {kind.__name__}")
