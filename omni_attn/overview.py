"""The overview of backends: what their facts say, as rows for the command line and for docs/backends.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omni_attn.backends.registry import (
    DiffusionAttentionBackendEnum,
    default_path,
    load_backend,
    registered_names,
    runtime_path,
)
from omni_attn.facts import BackendFacts, KernelFacts
from omni_attn.facts.device import FAMILIES_WITH_CAPABILITY
from omni_attn.plain import to_plain
from omni_attn.platforms import family_class_paths

PLACE_COLUMNS = ("backend", "variant", "devices", "needs", "dtypes", "head sizes", "numerics", "tested on")
FEATURE_COLUMNS = (
    "backend",
    "variant",
    "masks",
    "causal",
    "GQA",
    "packed",
    "window",
    "LSE",
    "backward",
    "compile",
    "CUDA graph",
    "sequence parallel",
    "options",
)
PAGED_COLUMNS = (
    "backend",
    "variant",
    "keeps",
    "page sizes",
    "layouts",
    "cache dtypes",
    "caches",
    "causal",
    "non-causal",
    "causal by request",
    "window",
    "CUDA graph",
    "host lengths",
    "batch invariant",
    "tested on",
)
UNTESTED = "untested on hardware"


@dataclass(frozen=True)
class ListedBackend:
    """One class of the overview: a name's own, or the one that a device family has for it."""

    name: str
    facts: BackendFacts
    family: str | None = None

    @property
    def label(self) -> str:
        """The name, and the family: "FLASH_ATTN on rocm"."""
        return self.name if self.family is None else f"{self.name} on {self.family}"


@dataclass(frozen=True)
class BackendRow:
    """One kernel of the overview: a backend's variant, or the backend itself where it has none."""

    backend: str
    variant: str | None
    kernel: KernelFacts
    facts: BackendFacts

    def place_cells(self) -> tuple[str, ...]:
        """Cells under PLACE_COLUMNS: where it runs and how exact it is."""
        numerics = self.facts.numerics + (f" ({self.facts.error})" if self.facts.error else "")
        return (
            self.backend,
            self.variant or "-",
            _devices(self.kernel),
            " or ".join(map(str, self.kernel.packages)) or "torch",
            _join(self.kernel.dtypes),
            _head_sizes(self.kernel),
            numerics,
            ", ".join(self.kernel.tested_on) or UNTESTED,
        )

    def feature_cells(self) -> tuple[str, ...]:
        """Cells under FEATURE_COLUMNS: what it can do."""
        kernel = self.kernel
        features = (kernel.causal, kernel.gqa, kernel.packing, kernel.window, kernel.lse, kernel.backward)
        return (
            self.backend,
            self.variant or "-",
            _join(kernel.mask_kinds) or "no",
            *map(_yes, features),
            kernel.compile_mode.replace("_", " "),
            _yes(kernel.cudagraph),
            _join(kernel.sequence_parallel) or "no",
            _join(self.facts.option_fields) or "-",
        )

    def paged_cells(self) -> tuple[str, ...]:
        """Cells under PAGED_COLUMNS: what it takes of a paged KV cache."""
        kernel, cache = self.kernel, self.kernel.cache
        assert cache is not None
        return (
            self.backend,
            self.variant or "-",
            "latents (MLA)" if "mla" in cache.kinds else "keys and values",
            ", ".join(map(str, cache.block_sizes)),
            ", ".join(cache.layouts),
            ", ".join(("the layer's", *sorted(cache.cache_dtypes))),
            _join(cache.kinds).replace("_", " "),
            _yes(kernel.causal),
            *map(_yes, (cache.non_causal, cache.causal_by_request, kernel.window)),
            cache.cudagraph.name.lower().replace("_", " "),
            "needed" if cache.host_lengths else "not needed",
            _yes(kernel.batch_invariant),
            ", ".join(kernel.tested_on) or UNTESTED,
        )


def built_in_facts() -> tuple[ListedBackend, ...]:
    """Every class that comes with omni_attn, whatever else is registered on this machine."""
    return _listed({member.name: member.value for member in DiffusionAttentionBackendEnum})


def registered_facts() -> tuple[ListedBackend, ...]:
    """Every class that can be selected somewhere, those of other people's packages included.

    A class that was registered at run time holds on every device family.
    """
    return _listed({name: runtime_path(name) or default_path(name) for name in registered_names()})


def _listed(paths: dict[str, str]) -> tuple[ListedBackend, ...]:
    found = []
    for name, path in paths.items():
        found.append(ListedBackend(name, load_backend(path, name).facts))
        replaced = runtime_path(name) == path
        found += [
            ListedBackend(name, load_backend(own, name).facts, family)
            for family, replaces, own in family_class_paths()
            if replaces == name and not replaced
        ]
    return tuple(found)


def backend_rows(backends: Sequence[ListedBackend]) -> list[BackendRow]:
    """One row per kernel, in the order of `backends` and of their variants."""
    return [row for backend in backends for row in _rows_of(backend)]


def paged_rows(backends: Sequence[ListedBackend]) -> list[BackendRow]:
    """One row per kernel over a paged KV cache."""
    return [
        row
        for backend in backends
        for side in (backend.facts.paged, backend.facts.mla)
        if side is not None
        for row in _rows_of(replace(backend, facts=side))
    ]


def backends_as_data(backends: Sequence[ListedBackend]) -> list[dict[str, Any]]:
    """The facts of every class as plain data for JSON; `family` is null for a name's own class."""
    return [{"backend": b.name, "family": b.family, **to_plain(b.facts)} for b in backends]


def backends_markdown(backends: Sequence[ListedBackend]) -> str:
    """The tables as GitHub Markdown, with one line on each backend above them."""
    rows = backend_rows(backends)
    return "\n".join(
        [
            *(f"- `{b.name}`{b.label.removeprefix(b.name)}: {b.facts.summary}" for b in backends),
            "",
            "## Where a backend runs",
            "",
            *_markdown_table(PLACE_COLUMNS, [row.place_cells() for row in rows]),
            "",
            "## What it can do",
            "",
            *_markdown_table(FEATURE_COLUMNS, [row.feature_cells() for row in rows]),
            "",
            "## Over a paged KV cache",
            "",
            "Kernels that read keys and values of earlier tokens from pages: [kv_cache.md](kv_cache.md).",
            "",
            *_markdown_table(PAGED_COLUMNS, [row.paged_cells() for row in paged_rows(backends)]),
            "",
        ]
    )


def _rows_of(backend: ListedBackend) -> Iterator[BackendRow]:
    name, facts = backend.name, backend.facts
    if not facts.variants:
        yield BackendRow(name, None, facts, facts)
    for variant in facts.variants:
        yield BackendRow(name, variant.name, variant.facts, facts)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---' for _ in columns)} |"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def _head_sizes(kernel: KernelFacts) -> str:
    apart = (f"{row.head_sizes} on {row.capabilities}" for row in kernel.capability_head_sizes)
    return "; ".join((str(kernel.head_sizes), *apart))


def _devices(kernel: KernelFacts) -> str:
    ranges = " or ".join(map(str, kernel.capabilities))
    kinds = ", ".join(
        f"{kind} {ranges}".strip() if kind in FAMILIES_WITH_CAPABILITY else kind
        for kind in sorted(kernel.device_kinds)
    )
    if kernel.architectures:
        kinds += f" {_join(kernel.architectures)}"
    if kernel.excluded_architectures:
        kinds += f" except {_join(kernel.excluded_architectures)}"
    floors = "".join(
        f"; cuDNN >= {floor.version // 10000}.{floor.version // 100 % 100} on {floor.capabilities}"
        for floor in kernel.cudnn
    )
    return (kinds or f"any {ranges}".strip()) + floors


def _join(words: frozenset[str]) -> str:
    return ", ".join(sorted(words))


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
