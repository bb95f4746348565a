"""How the pages of a KV cache lie in memory: one layout that all backends of a model take, and the memory itself.

Legend: N pages, P tokens of a page, G kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from omni_attn.config.names import nearest
from omni_attn.errors import ConfigError
from omni_attn.facts.kv_cache import KV_LAYOUTS, KVCacheSpec, kv_cache_shape

CACHE_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""What the names of a KVCacheSpec's dtype mean."""

# Order in memory of the logical axes (N, 2, P, G, D). Keys and values lie apart, so that a page can be handed to a
# kernel as several smaller ones (see split_pages), and pages that follow one another are one run of rows.
_ORDER = {"NHD": (1, 0, 2, 3, 4), "HND": (1, 0, 3, 2, 4)}


def _known(layout: str) -> str:
    if layout not in KV_LAYOUTS:
        near = nearest(layout, KV_LAYOUTS)
        hint = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(f"Unknown KV cache layout {layout!r}.{hint} Known: {', '.join(KV_LAYOUTS)}.")
    return layout


def _sets(supported: Mapping[str, Sequence[str] | None]) -> str:
    able = {name: KV_LAYOUTS if layouts is None else layouts for name, layouts in supported.items()}
    return "; ".join(f"{name} takes {', '.join(layouts) or 'none'}" for name, layouts in able.items())


def common_kv_cache_layouts(supported: Mapping[str, Sequence[str] | None]) -> tuple[str, ...]:
    """Layouts that all backends take, best first: the one that most of them prefer leads; ties keep KV_LAYOUTS' order.

    Args:
        supported: backend -> its layouts, most preferred first; None = all of them, no matter which.

    Raises:
        ConfigError: no layout is left, or a name is unknown.
    """
    stated = [tuple(_known(layout) for layout in able) for able in supported.values() if able is not None]
    if len(set(stated)) == 1 and stated[0]:
        return stated[0]
    left = [layout for layout in KV_LAYOUTS if all(layout in able for able in stated)]
    if not left:
        raise ConfigError(
            f"No KV cache layout satisfies all backends of this model: {_sets(supported)}. "
            "Choose backends that share one, in attention.per_role"
        )
    return tuple(sorted(left, key=lambda layout: -sum(able[0] == layout for able in stated)))


def resolve_kv_cache_layout(
    supported: Mapping[str, Sequence[str] | None], requested: str | None = None
) -> str:
    """The layout of a model's caches: what a person asked for, else the best that all backends take.

    Args:
        supported: see common_kv_cache_layouts.
        requested: `kv_cache.layout` of the pipeline; None or "auto" = not asked.

    Raises:
        ConfigError: a backend does not take what was asked for, no layout suits them all, or a name is unknown.
    """
    candidates = common_kv_cache_layouts(supported)
    if requested in (None, "auto"):
        return candidates[0]
    assert requested is not None
    if _known(requested) not in candidates:
        raise ConfigError(
            f"kv_cache.layout {requested} does not satisfy every backend of this model: {_sets(supported)}. "
            f"Write {' or '.join(candidates)}, or leave it out"
        )
    return requested


class KVCacheLayout:
    """The layout that the caches of one model have: resolved once, then asked for by whoever needs it."""

    def __init__(self) -> None:
        self._layout: str | None = None

    def resolve(self, supported: Mapping[str, Sequence[str] | None], requested: str | None = None) -> str:
        """See resolve_kv_cache_layout; once resolved, the layout stays and must suit whoever comes later.

        Raises:
            ConfigError: see resolve_kv_cache_layout and record.
        """
        if self._layout is None or requested not in (None, "auto"):
            return self.record(resolve_kv_cache_layout(supported, requested))
        return resolve_kv_cache_layout(supported, self._layout)

    def record(self, layout: str) -> str:
        """Settles the layout; the same one again is fine.

        Raises:
            ConfigError: another one is settled, or the name is unknown.
        """
        if self._layout not in (None, _known(layout)):
            raise ConfigError(
                f"kv_cache.layout: {layout} was asked for, and it is already resolved to {self._layout}, in which "
                "caches may lie. Ask for it before the first cache is made, or ask for the same"
            )
        self._layout = layout
        return layout

    @property
    def value(self) -> str:
        """The layout.

        Raises:
            ConfigError: nothing is settled yet.
        """
        if self._layout is None:
            raise ConfigError(
                "The KV cache layout has not been resolved. Call resolve() with the layouts of all backends first"
            )
        return self._layout


def allocate_kv_cache(
    spec: KVCacheSpec, num_blocks: int, layout: str, device: torch.device | str
) -> torch.Tensor:
    """Pages of one layer, zeroed.

    Returns:
        [N, 2, P, G, D], keys before values, a view of memory in order (2, N, P, G, D) for NHD and (2, N, G, P, D) for
        HND; of MLA [N, P, D], which has no heads to order. Its dtype is the spec's; "fp8_e4m3" is
        torch.float8_e4m3fn.

    Raises:
        ConfigError: the layout is unknown.
        ValueError: no page besides the null block, or key and value differ in size.
    """
    _known(layout)
    if num_blocks < 2:
        raise ValueError(
            f"num_blocks={num_blocks}: block 0 is never given out, so a KV cache needs at least 2"
        )
    shape, dtype = kv_cache_shape(num_blocks, spec), CACHE_DTYPES[spec.dtype]
    if spec.kind == "mla":
        return torch.zeros(shape, dtype=dtype, device=device)
    order = _ORDER[layout]
    memory = torch.zeros([shape[axis] for axis in order], dtype=dtype, device=device)
    return memory.permute([order.index(axis) for axis in range(len(order))])
