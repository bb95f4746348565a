"""The one judge: a backend's facts against a request on a device. A pure function without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from omni_attn.facts.device import FAMILIES_WITH_CAPABILITY, cudnn_text
from omni_attn.facts.kv_cache import cache_reasons
from omni_attn.facts.lengths import gathered_reasons, length_reasons
from omni_attn.facts.packages import package_reasons

RING_MODES = ("ring", "ulysses_ring")
"""Modes of sequence parallelism that merge the attention over parts of the keys."""

if TYPE_CHECKING:
    from omni_attn.facts.backend import BackendFacts, HeadSizes, KernelFacts, Variant
    from omni_attn.facts.device import DeviceInfo
    from omni_attn.facts.request import AttentionRequest


def evaluate(facts: KernelFacts, request: AttentionRequest, device: DeviceInfo) -> tuple[str, ...]:
    """Reasons why a kernel cannot serve a request on a device, each "needs X, found Y"; empty = it can.

    Unknown facts of the request (dtype None, head_size -1, no hints, mask_usage None) give no reason: they are
    judged when they become known. For another kind of device no package is asked for. A backend with variants is judged
    by them: it can where one of them can.
    """
    variants = getattr(facts, "variants", ())
    if variants:
        return _choose(variants, request, device)[1]
    right_kind = not facts.device_kinds or device.kind in facts.device_kinds
    hardware = tuple(_device_reasons(facts, device))
    return (
        *hardware,
        *(package_reasons(facts.packages, request, device, missing=not hardware) if right_kind else ()),
        *_geometry_reasons(facts, request, device),
        *_feature_reasons(facts, request),
        *(
            cache_reasons(facts.cache, request.kv_cache, request.dtype, causal=request.causal)
            if facts.cache and request.kv_cache
            else ()
        ),
    )


def choose_variant(
    facts: BackendFacts,
    request: AttentionRequest,
    device: DeviceInfo,
    pinned: str | None = None,
    *,
    by_default: bool = False,
    more_reasons: Callable[[Variant], Iterable[str]] | None = None,
) -> tuple[str | None, tuple[str, ...]]:
    """The variant that serves a request, and the reasons if none does.

    Args:
        pinned: the variant a person asked for; only that one is judged.
        by_default: nobody chose the backend, so it has to take all that the request leaves open, see default_reasons.
        more_reasons: what else speaks against a variant, options that its kernel does not have, say.

    Returns:
        (variant, ()) where one serves it, (None, ()) for a backend without variants, (None, reasons) otherwise.
    """
    side = facts.side(request.kv_cache)
    if side is None:
        return None, (_no_side(facts, request),)
    facts = side
    if not facts.variants:
        if pinned is not None:
            return None, (f"needs no variant, found variant={pinned!r} on a backend that has none",)
        open_ends = default_reasons(facts, request) if by_default else ()
        return None, (*evaluate(facts, request, device), *open_ends)
    variants = [variant for variant in facts.variants if pinned in (None, variant.name)]
    if not variants:
        return None, (f"needs a variant of {', '.join(v.name for v in facts.variants)}, found {pinned!r}",)
    return _choose(tuple(variants), request, device, by_default, more_reasons)


def _no_side(facts: BackendFacts, request: AttentionRequest) -> str:
    if request.kv_cache is None:
        return "needs stateless attention, found support for a paged KV cache only"
    latents, other = "a paged cache of MLA's latents", "a paged KV cache"
    mla = request.kv_cache.kind == "mla"
    sides = {
        "stateless attention": facts.stateless,
        f"{other} of keys and values" if mla else latents: facts.paged if mla else facts.mla,
    }
    able = " and ".join(name for name, served in sides.items() if served)
    return f"needs {latents if mla else other}, found support for {able} only"


def _choose(
    variants: tuple[Variant, ...],
    request: AttentionRequest,
    device: DeviceInfo,
    by_default: bool = False,
    more_reasons: Callable[[Variant], Iterable[str]] | None = None,
) -> tuple[str | None, tuple[str, ...]]:
    refused: dict[str, list[str]] = {}
    for variant in variants:
        reasons = evaluate(variant.facts, request, device)
        if more_reasons is not None:
            reasons += tuple(more_reasons(variant))
        if by_default:
            reasons += tuple(default_reasons(variant.facts, request))
            if variant.explicit_only:
                reasons += ("needs to be chosen by name, found a platform default",)
        if not reasons:
            return variant.name, ()
        for reason in reasons:
            refused.setdefault(reason, []).append(variant.name)
    return None, tuple(
        reason if len(names) == len(variants) else f"{', '.join(names)}: {reason}"
        for reason, names in refused.items()
    )


def default_reasons(facts: KernelFacts, request: AttentionRequest) -> Iterator[str]:
    """Reasons against a kernel that nobody chose: it may not turn out, in a step, to lack what the request left open.

    The same limits only refuse a chosen kernel when such a step comes.
    """
    if request.packed and not facts.device_boundaries:
        yield "needs packed sequences bounded on the device for a default, found support for host boundaries only"
    if (
        request.mask_usage == "arbitrary"
        and facts.mask_kinds
        and not (facts.float_masks and facts.head_masks)
    ):
        yield "needs float masks and masks by head for a default, found support for some masks only"
    # The hints on packed sequences are the longest of them: equal ones say nothing about each sequence.
    if request.packed or None in (request.max_seqlen_q, request.max_seqlen_k):
        open_end = "on packed sequences" if request.packed else "without length hints"
        if not facts.unequal_lengths:
            yield f"needs unequal query and key lengths for a default {open_end}, found equal ones only"
        elif request.causal and facts.causal and not facts.causal_unequal_lengths:
            yield f"needs causal attention of unequal lengths for a default {open_end}, found equal ones only"


def _device_reasons(facts: KernelFacts, device: DeviceInfo) -> Iterator[str]:
    if facts.device_kinds and device.kind not in facts.device_kinds:
        this = device.kind if device.name == device.kind else f"{device.kind} ({device.name})"
        kinds = " or ".join(sorted(facts.device_kinds))
        yield f"needs {'an' if kinds[:3] in ('mps', 'npu', 'xpu') else 'a'} {kinds} device, found {this}"
        return
    found = device.capability
    # A kernel for several families limits the capability of those that have one.
    judged = not facts.device_kinds or device.kind in FAMILIES_WITH_CAPABILITY
    able = found is not None and any(found in allowed for allowed in facts.capabilities)
    if facts.capabilities and judged and not able:
        needed = " or ".join(map(str, facts.capabilities))
        there = [
            f"{p.distribution} {v}" for p in facts.packages if (v := device.packages.get(p.distribution))
        ]
        beside = f" with {', '.join(there)}" if there else ""
        yield f"needs compute capability {needed}, found {found or 'none'} ({device.name}){beside}"
    if facts.architectures and device.name not in facts.architectures:
        yield f"needs {' or '.join(sorted(facts.architectures))}, found {device.name}"
    if device.name in facts.excluded_architectures:
        yield f"needs a {device.kind} device other than {device.name}, found {device.name}"
    for floor in facts.cudnn:
        applies = device.capability is not None and device.capability in floor.capabilities
        if applies and (device.cudnn is None or device.cudnn < floor.version):
            found_text = "no cuDNN" if device.cudnn_text is None else device.cudnn_text
            yield f"needs cuDNN >= {cudnn_text(floor.version)}, found {found_text}"


def _head_sizes(facts: KernelFacts, device: DeviceInfo) -> HeadSizes:
    if device.capability is not None:
        for row in facts.capability_head_sizes:
            if device.capability in row.capabilities:
                return row.head_sizes
    return facts.head_sizes


def _geometry_reasons(facts: KernelFacts, request: AttentionRequest, device: DeviceInfo) -> Iterator[str]:
    if request.dtype is not None and request.dtype not in facts.dtypes:
        yield f"needs dtype {' or '.join(sorted(facts.dtypes))}, found {request.dtype}"
    known_head = request.head_size != -1
    allowed = _head_sizes(facts, device)
    if known_head and request.head_size not in allowed:
        here = "" if allowed is facts.head_sizes else f" on {device.name}"
        mla = request.kv_cache is not None and request.kv_cache.kind == "mla"
        why = ", which is not supported by MLA there" if mla else ""
        yield f"needs head_size {allowed}{here}, found head_size={request.head_size}{why}"
    value_head = request.value_head_size
    if known_head and value_head is not None and value_head != request.head_size:
        if not facts.value_head_size:
            yield f"needs value_head_size = head_size, found {value_head} and {request.head_size}"
        elif value_head not in allowed:
            yield f"needs value_head_size {allowed}, found value_head_size={value_head}"
    if not facts.gqa and request.num_heads is not None and request.num_kv_heads != request.num_heads:
        yield f"needs num_kv_heads = num_heads, found {request.num_kv_heads} and {request.num_heads}"
    if facts.gqa and facts.gqa_ratios and request.num_heads and request.num_kv_heads:
        ratio = request.num_heads / request.num_kv_heads
        if ratio not in facts.gqa_ratios:
            able = ", ".join(map(str, sorted(facts.gqa_ratios)))
            heads = f"{request.num_heads} over {request.num_kv_heads}"
            yield f"needs num_heads / num_kv_heads to be one of {able}, found {ratio:g} ({heads})"
    lengths = (request.max_seqlen_q, request.max_seqlen_k)
    yield from length_reasons(facts, *lengths, causal=request.causal, longest_of_many=request.packed)
    if known_head and not facts.custom_scale and not request.default_scale:
        yield f"needs softmax_scale = head_size ** -0.5, found {request.softmax_scale}"


def _feature_reasons(facts: KernelFacts, request: AttentionRequest) -> Iterator[str]:
    masked = request.mask_usage in ("padding", "arbitrary")
    if masked and request.mask_usage not in facts.mask_kinds:
        able = f"only {' and '.join(sorted(facts.mask_kinds))} masks" if facts.mask_kinds else "none"
        yield f"needs support for attn_mask ({request.mask_usage}), found {able}"
    elif masked and request.causal and facts.causal and not facts.causal_with_mask:
        yield "needs causal together with attn_mask, found support for one of them at a time"
    elif masked and request.window is not None and facts.window and not facts.causal_with_mask:
        yield "needs a window together with attn_mask, found support for one of them at a time"
    wanted = {
        "causal attention": (request.causal, facts.causal),
        "packed sequences (cu_seqlens)": (request.packed, facts.packing),
        "a sliding window": (request.window is not None, facts.window),
        "a backward pass": (request.requires_grad, facts.backward),
        "a backward pass under torch.compile": (
            request.requires_grad and request.compile,
            facts.compiled_backward,
        ),
        "batch invariance": (request.batch_invariant, facts.batch_invariant),
        "torch.compile": (request.compile, facts.compile_mode != "eager_only"),
    }
    for feature, (need, have) in wanted.items():
        if need and not have:
            yield f"needs {feature}, found no support for it"
    right = -1 if request.window is None or request.causal else request.window[1]
    if right >= 0 and facts.window and not facts.right_windows:
        yield f"needs a window of {right} tokens to the right, found support for a limit to the left only"
    if facts.self_attention_only and request.is_cross:
        category = f' of category "{request.role_category}"' if request.role_category else ""
        yield f'needs self-attention, found role "{request.role}"{category}'
    if facts.needs_video_grid and not request.video_grid:
        yield f'needs a layer that publishes its video grid, found none for role "{request.role}"'
    mode = request.sequence_parallel
    if mode is not None and mode not in facts.sequence_parallel:
        able = ", ".join(sorted(facts.sequence_parallel)) or "none"
        yield f"needs sequence parallelism {mode}, found support for {able}"
    elif mode == "allgather_kv":
        yield from gathered_reasons(facts, causal=request.causal)
    elif mode in RING_MODES and not facts.lse:
        yield f"needs the log-sum-exp of each part for sequence parallelism {mode}, found no support for it"
    elif mode in RING_MODES and request.requires_grad and not facts.lse_backward:
        yield f"needs a backward pass through the log-sum-exp for {mode}, found no support for it"
