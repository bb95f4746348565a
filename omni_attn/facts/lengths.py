"""Sequence lengths against a kernel's limits: judged at selection where hints tell them, and again for each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_attn.facts.backend import KernelFacts


def length_reasons(
    facts: KernelFacts,
    queries: int | None,
    keys: int | None,
    *,
    causal: bool = False,
    longest_of_many: bool = False,
) -> Iterator[str]:
    """Reasons, each "needs X, found Y", why a kernel cannot attend with so many query and key tokens.

    Args:
        queries, keys: tokens of one sequence, None if unknown. Zero on either side needs no kernel, and no reason.
        causal: the layer is causal.
        longest_of_many: the numbers are the longest of several packed sequences, whose own lengths are not known.
    """
    if 0 in (queries, keys):
        return
    if None not in (queries, keys) and queries != keys:
        if not facts.unequal_lengths:
            yield f"needs equal query and key lengths, found {queries} and {keys}"
        if causal and facts.causal and not facts.causal_unequal_lengths:
            yield f"needs equal query and key lengths for causal attention, found {queries} and {keys}"
    for side, least, found in (
        ("query", facts.min_query_tokens, queries),
        ("key", facts.min_key_tokens, keys),
    ):
        if found is not None and found < least:
            yield f"needs at least {least} {side} tokens, found {found}"
    ragged = keys is not None and keys % facts.key_tile != 0 and keys < facts.min_ragged_keys
    if ragged and not causal and not longest_of_many:
        yield (
            f"needs a multiple of {facts.key_tile} key tokens, or at least {facts.min_ragged_keys} key tokens, "
            f"found {keys}"
        )


def gathered_reasons(facts: KernelFacts, *, causal: bool) -> Iterator[str]:
    """Reasons why a kernel cannot attend from the queries of one rank to keys that all ranks gathered."""
    where = "for sequence parallelism allgather_kv"
    if not facts.unequal_lengths:
        yield f"needs unequal query and key lengths {where}, found equal ones only"
    elif causal and facts.causal and not facts.causal_unequal_lengths:
        yield f"needs causal attention of unequal lengths {where}, found equal ones only"
