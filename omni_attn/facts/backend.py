"""What a backend's kernels can do, as data. `evaluate` judges it; nothing here looks at the machine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from omni_attn.facts.kv_cache import CacheFacts, KVCacheSpec
from omni_attn.facts.packages import PackageRequirement

FLOAT16 = "float16"
BFLOAT16 = "bfloat16"
FLOAT32 = "float32"
FLOAT64 = "float64"


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Which head sizes a kernel takes: a list, or multiples within limits.

    Attributes:
        allowed: the sizes, None = not a list.
        multiple_of, minimum, maximum: the rule where there is no list; maximum None = no limit.
        beside: sizes that it takes beside that rule.
    """

    allowed: tuple[int, ...] | None = None
    multiple_of: int = 1
    minimum: int = 1
    maximum: int | None = None
    beside: tuple[int, ...] = ()

    def __contains__(self, head_size: int) -> bool:
        if self.allowed is not None:
            return head_size in self.allowed
        within = self.minimum <= head_size and (self.maximum is None or head_size <= self.maximum)
        return (within and head_size % self.multiple_of == 0) or head_size in self.beside

    def __str__(self) -> str:
        if self.allowed is not None:
            sizes = ", ".join(map(str, self.allowed))
            return sizes if len(self.allowed) == 1 else f"one of {sizes}"
        rule = f"a multiple of {self.multiple_of}" if self.multiple_of > 1 else "any size"
        if self.minimum > 1:
            rule += f" from {self.minimum}"
        if self.maximum is not None:
            rule += f" up to {self.maximum}"
        return rule + "".join(f", or {size}" for size in self.beside)


@dataclass(frozen=True, kw_only=True)
class CapabilityRange:
    """Compute capabilities from `minimum` up to, not including, `below`."""

    minimum: tuple[int, int]
    below: tuple[int, int] | None = None

    def __contains__(self, capability: tuple[int, int]) -> bool:
        return self.minimum <= capability and (self.below is None or capability < self.below)

    def __str__(self) -> str:
        low = "{}.{}".format(*self.minimum)
        if self.below == (self.minimum[0], self.minimum[1] + 1):
            return low
        return f"{low} or newer" if self.below is None else "{} to below {}.{}".format(low, *self.below)


@dataclass(frozen=True, kw_only=True)
class CapabilityHeadSizes:
    """The head sizes of devices in `capabilities`, where they differ from what the kernel takes elsewhere."""

    capabilities: CapabilityRange
    head_sizes: HeadSizes


@dataclass(frozen=True, kw_only=True)
class CudnnFloor:
    """The cuDNN version that devices in `capabilities` need, as torch writes it (90500 = 9.5.0)."""

    capabilities: CapabilityRange
    version: int


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """Limits of one kernel. An empty tuple or set of device kinds, capabilities, packages means "not limited".

    Attributes:
        device_kinds, capabilities, cudnn: the hardware it runs on; ranges are alternatives, and hold for device kinds
            that have a compute capability.
        architectures: names of devices without a compute capability ("gfx942"), as DeviceInfo.name has them.
        excluded_architectures: the same, for the ones of a family that it does not run on.
        packages: distributions that ship it; any one of them is enough.
        dtypes: names of the query dtypes.
        head_sizes: predicate on head_size; capability_head_sizes: devices with another one, first hit counts.
        value_head_size: the value's may differ from it, under the same predicate.
        mask_kinds: of "padding", "arbitrary"; causal_with_mask: both at once.
        float_masks: "arbitrary" masks may also be float ones, which are added to the scores; bool ones always may.
        head_masks: "arbitrary" masks may differ from head to head.
        causal_unequal_lengths: causal also where query and key lengths differ.
        gqa_ratios: query heads per key-value head that it takes, where `gqa` holds; empty = any whole number.
        causal, gqa, unequal_lengths, packing, window, lse, backward, custom_scale, batch_invariant: can it.
        packed_padding: one sequence with structural padding behind it, also where several packed ones are not taken.
        device_boundaries: packing also where only the device knows the boundaries; else the host has to state them.
        right_windows: windows may also end to the right of a query's position; to the left they always may.
        compiled_backward: backward also where the forward was compiled.
        lse_backward: gradients also flow through the log-sum-exp, as a ring's merge of parts needs.
        min_query_tokens, min_key_tokens: shortest sequences.
        key_tile, min_ragged_keys: key lengths that are no multiple of key_tile need at least min_ragged_keys tokens,
            except in causal attention, whose mask covers the rest of the last tile.
        self_attention_only: it ranks what belongs together, and is refused to roles of cross-attention.
        needs_video_grid: it needs the (T, H, W) grid that a model publishes.
        compile_mode: "traceable" (torch ops only), "custom_op" (wrapped, with a fake) or "eager_only".
        cudagraph: calls can be captured in a CUDA graph.
        sequence_parallel: modes it serves on each rank.
        cache: what it takes of a paged KV cache; None = it reads none.
        tested_on: hardware that its conformance ran on; empty = untested on hardware.
    """

    device_kinds: frozenset[str] = frozenset()
    capabilities: tuple[CapabilityRange, ...] = ()
    architectures: frozenset[str] = frozenset()
    excluded_architectures: frozenset[str] = frozenset()
    cudnn: tuple[CudnnFloor, ...] = ()
    packages: tuple[PackageRequirement, ...] = ()
    dtypes: frozenset[str] = frozenset({FLOAT16, BFLOAT16})
    head_sizes: HeadSizes = HeadSizes()
    capability_head_sizes: tuple[CapabilityHeadSizes, ...] = ()
    value_head_size: bool = False
    mask_kinds: frozenset[str] = frozenset()
    float_masks: bool = True
    head_masks: bool = True
    causal: bool = False
    causal_unequal_lengths: bool = True
    causal_with_mask: bool = False
    gqa: bool = False
    gqa_ratios: frozenset[int] = frozenset()
    unequal_lengths: bool = True
    packing: bool = False
    packed_padding: bool = False
    device_boundaries: bool = True
    window: bool = False
    right_windows: bool = True
    lse: bool = False
    backward: bool = False
    compiled_backward: bool = False
    lse_backward: bool = False
    custom_scale: bool = True
    batch_invariant: bool = False
    min_query_tokens: int = 1
    min_key_tokens: int = 1
    key_tile: int = 1
    min_ragged_keys: int = 1
    self_attention_only: bool = False
    needs_video_grid: bool = False
    compile_mode: Literal["traceable", "custom_op", "eager_only"] = "eager_only"
    cudagraph: bool = False
    sequence_parallel: frozenset[str] = frozenset()
    cache: CacheFacts | None = None
    tested_on: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel generation or provider inside a backend, with limits of its own.

    Attributes:
        explicit_only: runs only where a person chose the backend, never as a platform's default.
    """

    name: str
    facts: KernelFacts
    explicit_only: bool = False


@dataclass(frozen=True, kw_only=True)
class BackendFacts(KernelFacts):
    """Static facts of a backend: its limits, and what belongs to the backend as a whole.

    Where there are variants, they carry the limits that judge a request, in order of preference, and the limits
    here are the widest of them, for documentation.

    Attributes:
        summary: one line for tables.
        variants: in order of preference; empty = the backend is one kernel.
        option_fields: fields of AttentionSpec that it owns.
        layer_inputs: names of per-layer tensors that its impl reads (`gate_compress`).
        numerics: "exact", "quantised" or "approximate"; only exact backends may be defaults.
        error: documented relative error against float64 in bfloat16, for instance "2.3e-3".
        stateless: serves plain layers; paged: facts of its kernels over a paged cache of keys and values, None = it has
            none; mla: the same over one of MLA's latents, where head_size counts latent and rope channels, and
            value_head_size the latent ones.
        selects_blocks: attends to blocks of keys that each call chooses, and its impl says which (select_blocks).
    """

    summary: str = ""
    variants: tuple[Variant, ...] = ()
    option_fields: frozenset[str] = frozenset()
    layer_inputs: frozenset[str] = frozenset()
    numerics: Literal["exact", "quantised", "approximate"] = "exact"
    error: str | None = None
    stateless: bool = True
    paged: BackendFacts | None = None
    mla: BackendFacts | None = None
    selects_blocks: bool = False

    @classmethod
    def of(cls, kernel: KernelFacts, **rest: Any) -> BackendFacts:
        """A backend with the limits of one kernel, or with those that its variants share."""
        return cls(**{f.name: getattr(kernel, f.name) for f in fields(KernelFacts)}, **rest)

    def side(self, cache: KVCacheSpec | None) -> BackendFacts | None:
        """The facts that judge layers over such a cache, or without one; None = it has no kernel for them."""
        if cache is None:
            return self if self.stateless else None
        return self.mla if cache.kind == "mla" else self.paged

    def __post_init__(self) -> None:
        if not self.stateless and self.paged is None and self.mla is None:
            raise ValueError("a backend serves stateless or paged attention, or both")
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"variant names repeat: {names}")
