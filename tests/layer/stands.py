"""Every registered backend, ready to run on the CPU: a machine that accepts it, stand-in kernels behind it.

A backend that arrives later is found here by its registered name, or as the class of a device family, and meets every
recipe that uses `every_stand`. What its facts do not claim it must refuse, which recipes check in place of numbers; the
backends of limited.py prove it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, islice
from typing import Any
from unittest.mock import patch

import pytest
import torch

from omni_attn.backends import registry
from omni_attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.config import AttentionConfig, AttentionSpec
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.facts import AttentionRequest, KernelFacts
from omni_attn.layer import Attention
from omni_attn.platforms import OmniPlatform, current_omni_platform, family_class_paths
from omni_attn.platforms.assumed import ASSUMED_NAMES
from omni_attn.products import build_product
from omni_attn.selector import use_attention_config
from omni_attn.testing import fake_device, fake_kernels
from omni_attn.testing.harness import with_grid
from omni_attn.testing.standins.log import CallLog
from tests.layer.limited import LIMITED, limited_kernels
from tests.layer.limits import Limits, length_limits, limits_of

#: The one head size that every kernel takes.
HEAD_SIZE = 128
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CUDNN = 91900


@dataclass(frozen=True)
class Stand:
    """One backend, or one variant of it; `path` is the class that a device family has in place of the name's own."""

    name: str
    variant: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        return self.name if self.variant is None else f"{self.name}-{self.variant}"

    @property
    def backend(self) -> type[AttentionBackend]:
        return LIMITED.get(self.name) or load(self.name, self.path)

    @property
    def facts(self) -> KernelFacts:
        facts = self.backend.facts
        return next((v.facts for v in facts.variants if v.name == self.variant), facts)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(backend=self.name, variant=self.variant)

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(default=self.spec)

    @property
    def dtype(self) -> torch.dtype:
        """The most exact dtype in which a layer of this backend can be built."""
        exact_first = (torch.float32, torch.float16, torch.bfloat16)
        return next(d for d in exact_first if str(d).removeprefix("torch.") in self.facts.dtypes)

    @cached_property
    def platform(self) -> OmniPlatform:
        """The first assumed machine, CPU first, on which this backend runs a plain layer."""
        packages = {p.distribution: p.minimum or "1.0" for p in self.facts.packages}
        request = AttentionRequest(role="self", num_heads=4, head_size=HEAD_SIZE, video_grid=True)
        for name in ("cpu", *ASSUMED_NAMES):
            device = fake_device(name, packages=packages, cudnn=CUDNN)
            platform = current_omni_platform(device)
            elsewhere = self.name not in LIMITED and (
                load(self.name, platform.class_path(self.name)) is not self.backend
            )
            if not elsewhere and not self.backend.validate_configuration(request, device, self.spec):
                return platform
        raise AssertionError(f"no assumed machine runs {self}")

    @contextmanager
    def kernels(self, *, publishes_grid: bool = True) -> Iterator[CallLog]:
        """Stand-in kernels; and the grid that a video model states, for recipes which are about something else.

        What a method leaves out, or sees from afar, is no subject of these recipes either.
        """
        stand_ins: AbstractContextManager[CallLog] = (
            limited_kernels(self.name) if self.name in LIMITED else fake_kernels(self.name, self.variant)
        )
        with ExitStack() as stack:
            if publishes_grid and self.facts.needs_video_grid:
                stack.enter_context(published_grid(self.builder_cls))
            if publishes_grid and self.name == "BLOCK_SUMMARY_ATTN":
                stack.enter_context(one_token_blocks(self.builder_cls))
            yield stack.enter_context(stand_ins)

    @property
    def builder_cls(self) -> type[AttentionMetadataBuilder]:
        return self.backend.get_impl_cls().builder_cls or self.backend.get_builder_cls()

    def lengths(self, queries: int, keys: int) -> tuple[int, int]:
        """The nearest lengths from these on that this backend takes, for recipes that are not about lengths."""
        if not self.facts.unequal_lengths:
            tokens = next(n for n in count(max(queries, keys)) if self._takes(n, n))
            return tokens, tokens
        fitting_keys = next(n for n in count(keys) if self._takes(None, n))
        return next(n for n in count(queries) if self._takes(n, None)), fitting_keys

    def tokens(self, number: int) -> int:
        """The shortest length of queries and keys that this backend takes is number 1, and so on."""
        return next(islice((n for n in count(1) if self._takes(n, n)), number - 1, None))

    def _takes(self, queries: int | None, keys: int | None) -> bool:
        return not any(length_limits(self.facts, (queries, keys)))

    def call(self, batch: int, queries: int, keys: int, **shape: int) -> list[torch.Tensor]:
        """Random tensors of such lengths, in this backend's dtype."""
        return [x.to(self.dtype) for x in tensors(batch, *self.lengths(queries, keys), **shape)]

    def accepts(self, **needs: Any) -> bool:
        """Whether a layer with these needs would be built on this backend's machine."""
        usual = {"role": "self", "num_heads": 4, "head_size": HEAD_SIZE, "video_grid": True}
        request = AttentionRequest(**{**usual, **needs})
        return not self.backend.validate_configuration(request, self.platform.device, self.spec)

    def limits(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        record: AttentionMetadata | None = None,
        **geometry: Any,
    ) -> Limits:
        """What the facts refuse of a call."""
        return limits_of(self.facts, (query, key, value), record, **geometry)

    def layer(self, num_heads: int, head_size: int, *, role: str = "self", **needs: Any) -> Attention:
        """A layer that chose this backend by name. Call it with the kernels in place."""
        with use_attention_config(self.config, platform=self.platform):
            return Attention(num_heads, head_size, role=role, **{"video_grid": True, **needs})

    def impl(self, num_heads: int, head_size: int, **geometry: Any) -> tuple[AttentionImpl, Any]:
        """The impl in itself, with its builder: no layer, and so no rule on dtypes."""
        arguments: dict[str, Any] = {
            "num_heads": num_heads,
            "num_kv_heads": num_heads,
            "head_size": head_size,
            "softmax_scale": head_size**-0.5,
            "spec": self.spec,
            "variant": self.variant,
            **geometry,
        }
        return self.backend.get_impl_cls()(**arguments), self.builder_cls(**arguments)

    def run_impl(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        record: AttentionMetadata | None = None,
        **geometry: Any,
    ) -> torch.Tensor:
        """What impl and builder make of one call."""
        impl, builder = self.impl(query.shape[2], query.shape[3], num_kv_heads=key.shape[2], **geometry)
        product = build_product(builder, record or AttentionMetadata(), (query.shape[1], key.shape[1]))
        return impl.forward(query, key, value, product)

    def run_layer(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        record: AttentionMetadata | None = None,
        **needs: Any,
    ) -> torch.Tensor:
        """What a layer makes of one call in a dtype that the backend takes."""
        layer = self.layer(query.shape[2], query.shape[3], num_kv_heads=key.shape[2], **needs)
        return layer(*(x.to(self.dtype) for x in (query, key, value)), record)

    def both(self, *call: Any, needs: Mapping[str, Any] | None = None, **geometry: Any) -> list[torch.Tensor]:
        """The same call through the impl in float32 and through a layer; `needs` are the layer's alone.

        Nothing for a call that the facts do not claim: its refusal is then checked, by its words.
        """
        in_float32, as_layer = partial(self.run_impl, *call), partial(self.run_layer, *call, **(needs or {}))
        runs = [partial(run, **geometry) for run in (in_float32, as_layer)]
        return self._held_to_facts(runs, self.limits(*call, **geometry))

    def _held_to_facts(
        self, runs: Sequence[Callable[[], torch.Tensor]], limits: Limits
    ) -> list[torch.Tensor]:
        if limits.must:
            self.refuses(runs[-1], limits)
            return []
        outcomes = [outcome_of(run) for run in runs]
        refusals = [outcome for outcome in outcomes if isinstance(outcome, str)]
        assert all(limits.told_by(text) for text in refusals), refusals
        return [] if refusals else outcomes

    def refuses(self, call: Callable[[], object], limits: Limits) -> None:
        """Asserts that a call is refused by name, in the words of one of its limits."""
        text = refusal_of(call)
        assert self.name in text and limits.told_by(text), (text, limits)


@contextmanager
def published_grid(builder_cls: type[AttentionMetadataBuilder]) -> Iterator[None]:
    """Every record that this builder is given states a grid, and that all tiles are kept; see with_grid.

    No video is too short for the sparse kernel meanwhile, where a builder has such a rule.
    """
    build = builder_cls.build
    length_rule = {"min_video_blocks": 0} if hasattr(builder_cls, "min_video_blocks") else {}

    def build_with_grid(
        self: AttentionMetadataBuilder, record: AttentionMetadata, lengths: tuple[int, int]
    ) -> Any:
        return build(self, with_grid(record, lengths), lengths)

    with patch.multiple(builder_cls, build=build_with_grid, **length_rule):
        yield


def one_token_blocks(builder_cls: type[AttentionMetadataBuilder]) -> AbstractContextManager[Any]:
    """Blocks of one token, whose mean is the token: what is attended to by means is exact then, however short.

    Recipes on long sequences are about shapes, and get a few large blocks.
    """
    build = builder_cls.build

    def build_either(self: Any, record: AttentionMetadata, lengths: tuple[int, int]) -> Any:
        made = build(self, record, lengths)
        return made if lengths[0] <= 4096 else replace(made, block_size=lengths[0] // 8)

    return patch.multiple(builder_cls, build=build_either, block_size=1)


def load(name: str, path: str | None = None) -> type[AttentionBackend]:
    return registry.load_backend(path or registry.runtime_path(name) or registry.default_path(name), name)


def _stands() -> list[Stand]:
    found = [Stand(name) for name in LIMITED]
    classes: list[tuple[str, str | None]] = [(name, None) for name in registry.registered_names()]
    classes += [(name, path) for _, name, path in family_class_paths()]
    for name, path in classes:
        facts = load(name, path).facts
        if not facts.stateless:  # a layer over a paged cache, which has a conformance class of its own
            continue
        variants = [v.name for v in facts.variants]
        found += [Stand(name, variant, path) for variant in variants or [None]]
    return found


STANDS = _stands()
COMPILED = [stand for stand in STANDS if stand.facts.compile_mode != "eager_only"]
every_stand = pytest.mark.parametrize("stand", STANDS, ids=str)


def tensors(
    batch: int,
    queries: int,
    keys: int,
    *,
    heads: int = 4,
    kv_heads: int | None = None,
    size: int = HEAD_SIZE,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random float32 query, key and value; bfloat16 and float16 hold the same values, so one reference serves all."""
    generator = torch.Generator().manual_seed(seed)
    counts = (heads, kv_heads or heads, kv_heads or heads)
    query, key, value = (
        torch.randn(batch, length, count, size, generator=generator).bfloat16().float()
        for length, count in zip((queries, keys, keys), counts, strict=True)
    )
    return query, key, value


def assert_close(output: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    """Maximum absolute error against a float64 result; NaN never passes."""
    assert output.shape == expected.shape
    limit = TOLERANCE[output.dtype] if tolerance is None else tolerance
    error = (output.double() - expected.double()).abs().max().item() if output.numel() else 0.0
    assert error <= limit, f"error {error:.2e}, allowed {limit:.0e}"


def refusal_of(call: Callable[[], object]) -> str:
    """The text of the refusal that a call must end in."""
    with pytest.raises((MetadataError, BackendRejectedError)) as raised:
        call()
    return str(raised.value)


def outcome_of(call: Callable[[], Any]) -> Any:
    """What a call gives, or the text of a refusal of ours."""
    try:
        return call()
    except (MetadataError, BackendRejectedError) as error:
        return str(error)
