"""Checks of one attention call: tensors and record against the layer, and against what was prepared."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from omni_attn.backends.metadata import AttentionMetadata, Prepared
from omni_attn.errors import MetadataError
from omni_attn.facts import AttentionRequest
from omni_attn.routes import Route


def check_tensors(
    request: AttentionRequest, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[int, int]:
    """Holds query [B, Sq, H, D], key [B, Sk, G, D] and value [B, Sk, G, Dv] against the layer: (Sq, Sk).

    Raises:
        MetadataError: a shape does not fit the layer, or the three do not fit one another.
    """
    wanted = (
        ("query", query, request.num_heads, request.head_size),
        ("key", key, request.num_kv_heads, request.head_size),
        ("value", value, request.num_kv_heads, request.value_head_size),
    )
    for name, tensor, heads, size in wanted:
        shape = tensor.shape
        if len(shape) != 4 or shape[2] != heads or shape[3] != size:
            raise MetadataError(
                f'role "{request.role}": {name} has shape {tuple(shape)}, the layer was built for {heads} heads of '
                f"{size} channels: needs [batch, tokens, {heads}, {size}]"
            )
    if key.shape[:2] != value.shape[:2] or query.shape[0] != key.shape[0]:
        raise MetadataError(
            f'role "{request.role}": query {tuple(query.shape)}, key {tuple(key.shape)} and value '
            f"{tuple(value.shape)} need one batch size, and key and value one length"
        )
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise MetadataError(
            f'role "{request.role}": query, key and value need one dtype, found {query.dtype}, {key.dtype} and '
            f"{value.dtype}"
        )
    if key.device != query.device or value.device != query.device:
        raise MetadataError(
            f'role "{request.role}": query, key and value need one device, found {query.device}, {key.device} and '
            f"{value.device}"
        )
    return query.shape[1], key.shape[1]


def check_mask_usage(request: AttentionRequest, record: AttentionMetadata) -> None:
    """Holds a record's mask against what the layer said of the masks it gets.

    Raises:
        MetadataError: it said "never".
    """
    if request.mask_usage == "never" and record.attn_mask is not None and record.mask_mode != "none":
        raise MetadataError(
            f'role "{request.role}": the layer said mask_usage="never", and a record with attn_mask came; state the '
            "masks it gets, or leave the mask out"
        )


def check_prepared(where: str, made: Prepared, query: torch.Tensor, lengths: tuple[int, int]) -> None:
    """Holds a call against what was prepared for it; `where` heads the text.

    Raises:
        MetadataError: other lengths, another batch size or another device than the record was prepared for.
    """
    if made.call_lengths != lengths:
        raise MetadataError(
            f"{where}: the record was prepared for {made.call_lengths[0]} query and {made.call_lengths[1]} key tokens, "
            f"the call has {lengths[0]} and {lengths[1]}: prepare each kind of call with its own record and lengths"
        )
    if made.mask_batch is not None and made.mask_batch != query.shape[0]:
        raise MetadataError(
            f"{where}: mask or packing is for a batch of {made.mask_batch}, query has {query.shape[0]}"
        )
    if made.mask_device is not None and made.mask_device != query.device:
        raise MetadataError(f"{where}: attn_mask is on {made.mask_device}, query on {query.device}")


def layer_inputs_of(
    routes: tuple[Route, ...], active: Route, inputs: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The inputs that the active route reads; another route of the layer may be the reader of the rest.

    Raises:
        MetadataError: an input that no route of the layer would read.
    """
    unread = [name for name in inputs if not any(name in route.layer_inputs for route in routes)]
    if unread:
        raise MetadataError(
            f"{routes[0].label} reads no layer input {', '.join(unread)}; ask attention.reads(name) before making it"
        )
    return {name: tensor for name, tensor in inputs.items() if name in active.layer_inputs}
