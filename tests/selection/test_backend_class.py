"""What a backend class must bring, and what it never is."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.registry import DiffusionAttentionBackendEnum, load_backend
from omni_attn.facts import BackendFacts, CacheFacts, FullAttentionSpec
from tests.selection import stubs
from tests.selection.stubs import PlainBackend

BACKENDS = [*(load_backend(m.value, m.name) for m in DiffusionAttentionBackendEnum), PlainBackend]
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__)


@each_backend
def test_a_backend_is_never_instantiated(backend: type[AttentionBackend]) -> None:
    with pytest.raises(TypeError, match=f"{backend.__name__}.*never instantiated"):
        backend()
    for name in ("get_name", "get_impl_cls", "get_builder_cls", "validate_configuration"):
        assert isinstance(inspect.getattr_static(backend, name), staticmethod | classmethod)


FULL: dict[str, Any] = {
    "facts": BackendFacts(),
    "get_name": staticmethod(lambda: "X"),
    "get_impl_cls": staticmethod(lambda: stubs.ReferenceImpl),
    "get_builder_cls": staticmethod(lambda: stubs.DenseBuilder),
}


@pytest.mark.parametrize("lacking", FULL)
def test_an_incomplete_class_is_refused_where_it_is_written(lacking: str) -> None:
    assert type("Whole", (AttentionBackend,), FULL).get_name() == "X"
    with pytest.raises(TypeError, match=f"Partial.*{lacking}"):
        type("Partial", (AttentionBackend,), {key: value for key, value in FULL.items() if key != lacking})


PAGED = ("get_paged_impl_cls", "get_paged_builder_cls")
CACHE = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")
STATELESS = ("get_impl_cls", "get_builder_cls")


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        *((name, ()) for name in PAGED),
        ("get_supported_kernel_block_sizes", ()),
        ("get_kv_cache_shape", (3, CACHE)),
    ],
)
@each_backend
def test_paged_methods_of_a_stateless_backend_raise(
    backend: type[AttentionBackend], method: str, arguments: tuple[Any, ...]
) -> None:
    if backend.facts.paged is not None:
        pytest.skip("serves a paged cache")
    with pytest.raises(TypeError, match="paged=None"):
        getattr(backend, method)(*arguments)


def paged_class(lacking: str | None, **facts: bool) -> type[AttentionBackend]:
    members: dict[str, Any] = FULL | {"facts": BackendFacts(paged=BackendFacts(cache=CacheFacts()), **facts)}
    members |= {name: staticmethod(lambda *_: ()) for name in PAGED}
    return type("Paged", (AttentionBackend,), {k: v for k, v in members.items() if k != lacking})


@pytest.mark.parametrize("lacking", PAGED)
@pytest.mark.parametrize("stateless", [True, False])
def test_a_paged_class_needs_its_methods(lacking: str, stateless: bool) -> None:
    assert paged_class(None, stateless=stateless).facts.paged
    with pytest.raises(TypeError, match=f"Paged.*{lacking}"):
        paged_class(lacking, stateless=stateless)


@pytest.mark.parametrize("lacking", STATELESS)
def test_a_class_for_paged_layers_alone_needs_no_stateless_methods(lacking: str) -> None:
    with pytest.raises(TypeError, match="stateless=False"):
        getattr(paged_class(lacking, stateless=False), lacking)()
    with pytest.raises(TypeError, match=f"Paged.*{lacking}"):
        paged_class(lacking, stateless=True)


def test_facts_serve_something_and_must_be_facts() -> None:
    with pytest.raises(ValueError, match="stateless or paged"):
        BackendFacts(stateless=False)
    with pytest.raises(TypeError, match="facts"):
        type("Partial", (AttentionBackend,), FULL | {"facts": {"causal": True}})
