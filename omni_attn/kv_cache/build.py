"""From the common metadata of a step to what each layer gets: built once per group, and only if something changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.kv_cache.groups import AttentionGroup
from omni_attn.kv_cache.step import PagedCall, PagedStep

_PAGES = ("block_table", "slot_mapping")


def build_attention_metadata(
    groups: Iterable[AttentionGroup],
    commons: Mapping[str, CommonAttentionMetadata],
    *,
    ubatch: int = 0,
    capture: bool = False,
) -> dict[str, Any]:
    """M of every layer, the same object for all layers of a group.

    A builder is asked only if its step differs from the last one: in a tensor, in what torch counts as a change of its
    contents, or in a number. So a chunk of video builds once for all of its denoising steps. Where builders can, a
    group that differs from another one in its page table alone takes over what was built for that.

    Args:
        groups: of init_attention_groups.
        commons: cache group -> what the step looks like with its page table.
        ubatch: which micro-batch it is.
        capture: a CUDA graph is captured, or replayed, with the result: it is built anew, into the buffers that the
            graph reads.

    Raises:
        MetadataError: a cache group without common metadata, or a step that a kernel cannot express.
    """
    metadata: dict[str, Any] = {}
    fresh: list[tuple[AttentionGroup, CommonAttentionMetadata, Any]] = []
    for group in groups:
        common = commons.get(group.cache_group)
        if common is None:
            raise MetadataError(
                f"layer {group.layer_names[0]!r} uses the page table {group.cache_group!r}, and the step says nothing "
                f"of it: it has {', '.join(map(repr, commons)) or 'none'}"
            )
        product = _build(group, common, ubatch, capture, fresh)
        fresh.append((group, common, product))
        for name in group.layer_names:
            if name in metadata:
                raise ValueError(
                    f"layer {name!r} is in two groups: give each layer to init_attention_groups once"
                )
            metadata[name] = product
    return metadata


def make_step(
    groups: Iterable[AttentionGroup],
    commons: Mapping[str, CommonAttentionMetadata],
    kv_caches: Mapping[str, torch.Tensor],
    *,
    ubatch: int = 0,
    capture: bool = False,
) -> PagedStep:
    """A step for the layers of all groups: metadata, pages and slots of each.

    Args:
        kv_caches: layer -> its pages, of the group's kernel_spec; a layer that reads another one's needs none.

    Raises:
        MetadataError: see build_attention_metadata; or a layer without pages.
    """
    groups = tuple(groups)
    metadata = build_attention_metadata(groups, commons, ubatch=ubatch, capture=capture)
    calls: dict[str, PagedCall] = {}
    for group in groups:
        common, sharing = commons[group.cache_group], group.sharing
        slots, tokens = common.slot_mapping, common.num_actual_tokens
        for name in group.layer_names:
            target = sharing.get(name)
            cache = kv_caches.get(name if target is None else target)
            if cache is None:
                raise MetadataError(
                    f"layer {name!r}: no KV cache was given for {target or name!r}; allocate one and add it"
                )
            calls[name] = PagedCall(metadata[name], cache, slots if target is None else None, tokens)
    return PagedStep(calls)


def _build(
    group: AttentionGroup,
    common: CommonAttentionMetadata,
    ubatch: int,
    capture: bool,
    fresh: list[tuple[AttentionGroup, CommonAttentionMetadata, Any]],
) -> Any:
    builder, built = group.builder(ubatch), group.built[ubatch]
    key = contents_key(common)
    last = built.last
    if last is not None and last[1] == key and not capture:
        return last[2]
    group.check(common)
    step = group.for_kernel(common, ubatch, capture=capture)
    other = None if capture else _like(group, common, ubatch, fresh)
    if capture:
        builder.buffers.changes += 1  # also where a builder keeps what a graph reads elsewhere
        product = builder.build_for_cudagraph_capture(step)
    elif other is not None:
        product = builder.update_block_table(other, step.block_table, step.slot_mapping)
    else:
        product = builder.build(step)
    built.last = common, key, product
    return product


def _like(
    group: AttentionGroup,
    common: CommonAttentionMetadata,
    ubatch: int,
    fresh: list[tuple[AttentionGroup, CommonAttentionMetadata, Any]],
) -> Any | None:
    """What was built in this step for a group that differs in its page table alone, from a step that does so too."""
    builder = group.builder(ubatch)
    if not builder.supports_update_block_table:
        return None
    for other, step, product in fresh:
        same_kind = type(other.builder(ubatch)) is type(builder) and other.key[1:] == group.key[1:]
        if same_kind and _differ_in_pages_alone(step, common):
            return product
    return None


def _names(common: Any) -> Iterable[str]:
    names: dict[str, Any] = common.__dataclass_fields__
    return names


def contents_key(common: CommonAttentionMetadata) -> tuple[object, ...]:
    """Equal for steps of equal contents, as far as the host can tell without a look at the device.

    Tensors are told apart by themselves and by torch's count of their changes; where torch does not count, in
    inference mode, another object is another step. Valid while `common` lives.
    """
    parts: list[object] = [type(common)]
    for name in _names(common):
        value = getattr(common, name)
        if isinstance(value, torch.Tensor):
            parts.append(id(value))
            parts.append(id(common) if value.is_inference() else value._version)
        else:
            parts.append(value if value is None or isinstance(value, (bool, int, float, str)) else id(value))
    return tuple(parts)


def _differ_in_pages_alone(one: CommonAttentionMetadata, other: CommonAttentionMetadata) -> bool:
    if type(one) is not type(other):
        return False
    for name in _names(one):
        left, right = getattr(one, name), getattr(other, name)
        if name in _PAGES or left is right:
            continue
        # Numbers by value; of tensors, the same one.
        if not (isinstance(left, (bool, int, float, str)) and type(left) is type(right) and left == right):
            return False
    # What a builder takes from the width of a table has to hold for the other one as well.
    same_width = one.block_table.shape == other.block_table.shape
    return same_width and (one.slot_mapping is None) == (other.slot_mapping is None)
