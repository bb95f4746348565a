"""The overview of backends: what their facts say, as rows for the command line and for docs/backends.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omni_attn.backends.registry import (
    DiffusionAttentionBackendEnum,
    default_path,
    load_backend,
    registered_names,
    runtime_path,
)
from omni_attn.facts import BackendFacts, KernelFacts
from omni_attn.plain import to_plain

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
UNTESTED = "untested on hardware"


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
            str(self.kernel.head_sizes),
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


def built_in_facts() -> dict[str, BackendFacts]:
    """Facts of the backends that come with omni_attn, whatever else is registered on this machine."""
    return {
        member.name: load_backend(member.value, member.name).facts for member in DiffusionAttentionBackendEnum
    }


def registered_facts() -> dict[str, BackendFacts]:
    """Facts of every backend that can be selected here, those of other people's packages included."""
    paths = {name: runtime_path(name) or default_path(name) for name in registered_names()}
    return {name: load_backend(path, name).facts for name, path in paths.items()}


def backend_rows(backends: dict[str, BackendFacts]) -> list[BackendRow]:
    """One row per kernel, in the order of `backends` and of their variants."""
    return [row for name, facts in backends.items() for row in _rows_of(name, facts)]


def backends_as_data(backends: dict[str, BackendFacts]) -> list[dict[str, Any]]:
    """The facts of every backend as plain data for JSON."""
    return [{"backend": name, **to_plain(facts)} for name, facts in backends.items()]


def backends_markdown(backends: dict[str, BackendFacts]) -> str:
    """The two tables as GitHub Markdown, with one line on each backend above them."""
    rows = backend_rows(backends)
    return "\n".join(
        [
            *(f"- `{name}`: {facts.summary}" for name, facts in backends.items()),
            "",
            "## Where a backend runs",
            "",
            *_markdown_table(PLACE_COLUMNS, [row.place_cells() for row in rows]),
            "",
            "## What it can do",
            "",
            *_markdown_table(FEATURE_COLUMNS, [row.feature_cells() for row in rows]),
            "",
        ]
    )


def _rows_of(name: str, facts: BackendFacts) -> Iterator[BackendRow]:
    if not facts.variants:
        yield BackendRow(name, None, facts, facts)
    for variant in facts.variants:
        yield BackendRow(name, variant.name, variant.facts, facts)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---' for _ in columns)} |"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def _devices(kernel: KernelFacts) -> str:
    kinds = _join(kernel.device_kinds) or "any"
    ranges = " or ".join(map(str, kernel.capabilities))
    floors = "".join(
        f"; cuDNN >= {floor.version // 10000}.{floor.version // 100 % 100} on {floor.capabilities}"
        for floor in kernel.cudnn
    )
    return f"{kinds} {ranges}".strip() + floors


def _join(words: frozenset[str]) -> str:
    return ", ".join(sorted(words))


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
