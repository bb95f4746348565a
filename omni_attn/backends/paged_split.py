"""Which requests of a step continue a stream by a few tokens, and which bring many: kernels serve them apart.

Host arithmetic only. The vocabulary is that of language models: decode = at most `threshold` new tokens of a request
whose prompt is complete, short extend = as few of an incomplete prompt, long extend = more than that behind earlier
tokens, prefill = no earlier tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.errors import MetadataError


class Split(NamedTuple):
    """A step whose first requests are decodes: how many requests and tokens lie on each side."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    common: CommonAttentionMetadata,
    decode_threshold: int = 1,
    *,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> Split:
    """Where the decodes of a step end, its requests being ordered already (see reorder_decodes_first).

    Args:
        common: the step. Requests and tokens of padding count on the side that the last real request is on; padding
            alone is all decode.
        decode_threshold: most new tokens of a decode.
        require_uniform: all decodes have as many new tokens as the first one; padding may stand among them.
        treat_short_extends_as_decodes: if not, requests that is_prefilling names are prefills however short.

    Raises:
        MetadataError: short extends are to be told apart, and the step does not state is_prefilling.
    """
    requests, tokens = common.num_reqs, common.num_actual_tokens
    all_decodes = Split(requests, 0, tokens, 0)
    told_apart = not treat_short_extends_as_decodes
    if told_apart and common.is_prefilling is None:
        raise MetadataError(
            "short extends are to be told from decodes, and the step says nothing of it: state is_prefilling, bool "
            f"[{requests}] on the host"
        )
    uniform = require_uniform and decode_threshold > 1
    if common.max_query_len <= decode_threshold and not uniform and not told_apart:
        return all_decodes
    starts = common.query_start_loc_cpu.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    if not lengths:
        return all_decodes
    if lengths[0] > decode_threshold:
        return Split(0, requests, 0, tokens)
    prefills = [length > decode_threshold for length in lengths]
    if require_uniform:
        # Padding in front of the first real request says nothing about how many tokens a decode has.
        first = next((length for length in lengths if length), 0)
        prefills = [long or length not in (0, first) for long, length in zip(prefills, lengths, strict=True)]
    if told_apart and common.is_prefilling is not None:
        # A padded row may hold what an earlier step left there.
        stated = common.is_prefilling.tolist()
        prefills = [
            long or (extends and length > 0)
            for long, extends, length in zip(prefills, stated, lengths, strict=True)
        ]
    if True not in prefills:
        return all_decodes
    decodes = prefills.index(True)
    return Split(decodes, requests - decodes, starts[decodes], tokens - starts[decodes])


def reorder_decodes_first(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    is_prefilling: Sequence[bool],
    threshold: int = 1,
) -> list[int]:
    """An order of requests for split_decodes_and_prefills that moves as few of them as it can.

    Decodes come first, then short extends, long extends, prefills. Requests that already lie where their kind belongs
    stay there; the others fill the places that are left, in their old order.

    Args:
        query_lens: new tokens of each request; context_lens: earlier ones; is_prefilling: its prompt is incomplete.
        threshold: most new tokens of a decode.

    Returns:
        For each new place the old one.
    """
    kinds = [
        _kind(new, earlier, extends, threshold)
        for new, earlier, extends in zip(query_lens, context_lens, is_prefilling, strict=True)
    ]
    wrong = [
        place for place, (is_, wanted) in enumerate(zip(kinds, sorted(kinds), strict=True)) if is_ != wanted
    ]
    order = list(range(len(kinds)))
    for place, request in zip(wrong, sorted(wrong, key=kinds.__getitem__), strict=True):
        order[place] = request
    return order


def _kind(new: int, earlier: int, extends: bool, threshold: int) -> int:
    if not earlier:
        return 3
    if new > threshold:
        return 2
    return 1 if extends else 0
