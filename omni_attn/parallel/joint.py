"""Joint streams: tokens, of text for example, that attend together with the sequence that is split.

Every rank holds them whole. A layer gets them as layer inputs beside its own tokens, and gives back both outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.facts import AttentionRequest

JOINT_INPUTS = ("joint_query", "joint_key", "joint_value")


@dataclass(frozen=True)
class JointTokens:
    """How many tokens of queries and of keys the joint streams have, and on which side of the sequence they lie."""

    query: int = 0
    key: int = 0
    order: Literal["front", "rear"] = "front"

    @classmethod
    def of(cls, record: AttentionMetadata) -> JointTokens:
        """What a record states."""
        query, key = record.joint_tokens
        return cls(query, key, record.joint_order)


def split_joint(inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Layer inputs of joint streams, and those of the backend."""
    joint = {name: tensor for name, tensor in inputs.items() if name in JOINT_INPUTS}
    return joint, {name: tensor for name, tensor in inputs.items() if name not in JOINT_INPUTS}


def check_order(request: AttentionRequest, stated: JointTokens) -> None:
    """Whether joint streams have a place in the layer's order.

    Raises:
        MetadataError: joint queries in a causal layer, or joint keys in one with a window.
    """
    if request.causal and stated.query:
        raise MetadataError(
            f'role "{request.role}": the layer is causal, and joint queries ({stated.query} tokens, joint_order='
            f"{stated.order!r}) have no place in its order: leave out joint_query; joint keys are seen by all queries"
        )
    if request.window is not None and stated.key:
        raise MetadataError(
            f'role "{request.role}": the layer has a window of {request.window} tokens, beside which joint streams '
            f"({stated.key} keys, joint_order={stated.order!r}) have no place: build the layer without a window, and "
            "state it as attn_mask"
        )


def check_joint(
    request: AttentionRequest, joint: Mapping[str, Tensor], stated: JointTokens, query: Tensor
) -> None:
    """Holds the streams that came against those that the record states, against the layer and against its query.

    Raises:
        MetadataError: lengths that the record does not state, keys without values, another shape or dtype than goes
            with the query, and see check_order.
    """
    found = tuple(joint[name].shape[1] if name in joint else 0 for name in JOINT_INPUTS)
    if found != (stated.query, stated.key, stated.key):
        raise MetadataError(
            f'role "{request.role}": joint_query, joint_key and joint_value came with {found} tokens, and the record '
            f"states joint_tokens=({stated.query}, {stated.key}): pass and state the same, keys and values always "
            "together"
        )
    check_order(request, stated)
    wanted = {
        "joint_query": (request.num_heads, request.head_size),
        "joint_key": (request.num_kv_heads, request.head_size),
        "joint_value": (request.num_kv_heads, request.value_head_size),
    }
    for name, tensor in joint.items():
        fits = (tensor.shape[0], *tensor.shape[2:]) == (query.shape[0], *wanted[name])
        if not fits or tensor.dtype != query.dtype or tensor.device != query.device:
            raise MetadataError(
                f'role "{request.role}": {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, beside '
                f"query {query.dtype} {tuple(query.shape)} on {query.device}: needs [{query.shape[0]}, tokens, "
                f"{wanted[name][0]}, {wanted[name][1]}] in its dtype, on its device"
            )


def _join(own: Tensor, joint: Tensor | None, order: str) -> Tensor:
    """[B, S, ...] with the joint tokens before ("front") or behind ("rear") them."""
    if joint is None:
        return own
    return torch.cat((joint, own) if order == "front" else (own, joint), dim=1)


def join_streams(
    request: AttentionRequest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    joint: Mapping[str, Tensor],
    order: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with the joint tokens beside the others.

    Joint keys of a causal layer are put in front, where every query sees them, whatever was stated.
    """
    keys = "front" if request.causal else order
    return (
        _join(query, joint.get("joint_query"), order),
        _join(key, joint.get("joint_key"), keys),
        _join(value, joint.get("joint_value"), keys),
    )
