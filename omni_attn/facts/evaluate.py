"""The one judge: a backend's facts against a request on a device. A pure function without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from omni_attn.facts.packages import package_reasons

if TYPE_CHECKING:
    from omni_attn.facts.backend import BackendFacts, KernelFacts, Variant
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
    return (
        *_device_reasons(facts, device),
        *(package_reasons(facts.packages, request, device) if right_kind else ()),
        *_geometry_reasons(facts, request),
        *_feature_reasons(facts, request),
    )


def choose_variant(
    facts: BackendFacts, request: AttentionRequest, device: DeviceInfo, pinned: str | None = None
) -> tuple[str | None, tuple[str, ...]]:
    """The variant that serves a request, and the reasons if none does.

    Args:
        pinned: the variant a person asked for; only that one is judged.

    Returns:
        (variant, ()) where one serves it, (None, ()) for a backend without variants, (None, reasons) otherwise.
    """
    if request.kv_cache is not None and not facts.paged:
        return None, ("needs a paged KV cache, found support for stateless attention only",)
    if request.kv_cache is None and not facts.stateless:
        return None, ("needs stateless attention, found support for a paged KV cache only",)
    if not facts.variants:
        if pinned is not None:
            return None, (f"needs no variant, found variant={pinned!r} on a backend that has none",)
        return None, evaluate(facts, request, device)
    variants = [variant for variant in facts.variants if pinned in (None, variant.name)]
    if not variants:
        return None, (f"needs a variant of {', '.join(v.name for v in facts.variants)}, found {pinned!r}",)
    return _choose(tuple(variants), request, device)


def _choose(
    variants: tuple[Variant, ...], request: AttentionRequest, device: DeviceInfo
) -> tuple[str | None, tuple[str, ...]]:
    refused: dict[str, list[str]] = {}
    for variant in variants:
        reasons = evaluate(variant.facts, request, device)
        if not reasons:
            return variant.name, ()
        for reason in reasons:
            refused.setdefault(reason, []).append(variant.name)
    return None, tuple(
        reason if len(names) == len(variants) else f"{', '.join(names)}: {reason}"
        for reason, names in refused.items()
    )


def _device_reasons(facts: KernelFacts, device: DeviceInfo) -> Iterator[str]:
    if facts.device_kinds and device.kind not in facts.device_kinds:
        this = device.kind if device.name == device.kind else f"{device.kind} ({device.name})"
        yield f"needs a {' or '.join(sorted(facts.device_kinds))} device, found {this}"
        return
    if facts.capabilities:
        found = device.capability
        if found is None or not any(found in allowed for allowed in facts.capabilities):
            needed = " or ".join(map(str, facts.capabilities))
            there = [
                f"{p.distribution} {v}" for p in facts.packages if (v := device.packages.get(p.distribution))
            ]
            beside = f" with {', '.join(there)}" if there else ""
            yield f"needs compute capability {needed}, found {found or 'none'} ({device.name}){beside}"
    for floor in facts.cudnn:
        applies = device.capability is not None and device.capability in floor.capabilities
        if applies and (device.cudnn is None or device.cudnn < floor.version):
            yield f"needs cuDNN >= {_cudnn(floor.version)}, found {_cudnn(device.cudnn)}"


def _cudnn(version: int | None) -> str:
    if version is None:
        return "no cuDNN"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _geometry_reasons(facts: KernelFacts, request: AttentionRequest) -> Iterator[str]:
    if request.dtype is not None and request.dtype not in facts.dtypes:
        yield f"needs dtype {' or '.join(sorted(facts.dtypes))}, found {request.dtype}"
    if request.head_size != -1 and request.head_size not in facts.head_sizes:
        yield f"needs head_size {facts.head_sizes}, found head_size={request.head_size}"
    known_head = request.head_size != -1
    if known_head and not facts.value_head_size and request.value_head_size != request.head_size:
        yield f"needs value_head_size = head_size, found {request.value_head_size} and {request.head_size}"
    if not facts.gqa and request.num_heads is not None and request.num_kv_heads != request.num_heads:
        yield f"needs num_kv_heads = num_heads, found {request.num_kv_heads} and {request.num_heads}"
    if not facts.unequal_lengths and request.unequal_lengths:
        yield f"needs equal query and key lengths, found {request.max_seqlen_q} and {request.max_seqlen_k}"
    if request.max_seqlen_k is not None and request.max_seqlen_k < facts.min_key_tokens:
        yield f"needs at least {facts.min_key_tokens} key tokens, found {request.max_seqlen_k}"
    if known_head and not facts.custom_scale and not request.default_scale:
        yield f"needs softmax_scale = head_size ** -0.5, found {request.softmax_scale}"


def _feature_reasons(facts: KernelFacts, request: AttentionRequest) -> Iterator[str]:
    masked = request.mask_usage in ("padding", "arbitrary")
    if masked and request.mask_usage not in facts.mask_kinds:
        able = f"only {' and '.join(sorted(facts.mask_kinds))} masks" if facts.mask_kinds else "none"
        yield f"needs support for attn_mask ({request.mask_usage}), found {able}"
    elif masked and request.causal and facts.causal and not facts.causal_with_mask:
        yield "needs causal together with attn_mask, found support for one of them at a time"
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
    if facts.needs_video_grid and not request.video_grid:
        yield f'needs a layer that publishes its video grid, found none for role "{request.role}"'
    mode = request.sequence_parallel
    if mode is not None and mode not in facts.sequence_parallel:
        able = ", ".join(sorted(facts.sequence_parallel)) or "none"
        yield f"needs sequence parallelism {mode}, found support for {able}"
