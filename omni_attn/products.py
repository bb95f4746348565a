"""From a record to what a group of layers needs of it: the first route whose builder can express the record."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omni_attn.backends.metadata import BINDING_FIELDS, AttentionMetadata, Prepared
from omni_attn.errors import MetadataError
from omni_attn.parallel.joint import JointTokens, check_order
from omni_attn.parallel.runner import ParallelBuilder
from omni_attn.parallel.views import in_key_order
from omni_attn.routes import Route

if TYPE_CHECKING:
    from omni_attn.backends.abstract import AttentionMetadataBuilder

_log = logging.getLogger("omni_attn")
_logged: set[tuple[str, str]] = set()


def build_prepared(
    routes: tuple[Route, ...], record: AttentionMetadata, lengths: tuple[int, int], *, own: bool = False
) -> Prepared:
    """What the first route that can express the record makes of it.

    Args:
        own: `lengths` are of this rank's call alone, and every rank asks the others for theirs.

    Raises:
        MetadataError: the first route's refusal, if none can.
    """
    check_order(routes[0].selection.request, JointTokens.of(record))
    split = routes[0].split
    # Once for all routes: ranks may differ in what they refuse, and not in what they exchange.
    counts = split.parallel.everyone.share_counts(lengths) if own and split is not None else None
    reads: frozenset[str] = frozenset()
    refusals: list[MetadataError] = []
    for index, route in enumerate(routes):
        # A refusal may rest on any field that its builder reads.
        reads = reads | frozenset(route.prepares.reads)
        try:
            _check_heads(route, record)
            whole = record
            if route.split is None:
                whole = in_key_order(record, lengths, causal=route.selection.request.causal)
            product = build_product(route.prepares, whole, lengths, counts)
        except MetadataError as error:
            refusals.append(MetadataError(f"{route.label}: {error}"))
            continue
        refusal = str(refusals[0]) if refusals else None
        if refusal is not None:
            _log_fallback(routes[0], route, refusal)
        _log_route(route, product)
        mask = None if record.hides_nothing else record.attn_mask
        return Prepared(
            product=product,
            lengths=lengths,
            route=index,
            reads=reads,
            refusal=refusal,
            mask_batch=_batch_of(record),
            mask_device=None if mask is None else mask.device,
            mask_version=record.mask_version,
        )
    raise refusals[0]


def build_product(
    builder: AttentionMetadataBuilder | ParallelBuilder,
    record: AttentionMetadata,
    lengths: tuple[int, int],
    counts: Sequence[tuple[int, ...]] | None = None,
) -> object:
    """What a builder makes of a record, none of whose binding fields it may overlook.

    Args:
        counts: (query tokens, key tokens) of the call on every rank; None = even shares of `lengths`.

    Raises:
        MetadataError: the record states what the builder does not read, or cannot express.
    """
    unread = record.stated & BINDING_FIELDS - frozenset(builder.reads)
    if record.hides_nothing:
        unread -= {"attn_mask"}
    if unread:
        raise MetadataError(
            f"cannot honour {', '.join(sorted(unread))}; TORCH_SDPA does: choose it for this role, or add it as "
            "fallback"
        )
    if counts is not None and isinstance(builder, ParallelBuilder):
        return builder.build_shares(record, counts)
    return builder.build(record, lengths)


def _check_heads(route: Route, record: AttentionMetadata) -> None:
    mask, heads = record.attn_mask, route.selection.request.num_heads
    if mask is not None and mask.dim() == 4 and mask.shape[1] not in (1, heads):
        raise MetadataError(f"attn_mask has {mask.shape[1]} heads, the layer {heads}")


def _batch_of(record: AttentionMetadata) -> int | None:
    """The batch size that a record is good for, None = any."""
    if record.cu_seqlens_q is not None or record.packed_padding is not None:
        return 1
    mask = record.attn_mask
    if mask is None or record.mask_mode == "none" or (mask.dim() == 4 and mask.shape[0] == 1):
        return None
    return mask.shape[0]


def _log_route(route: Route, product: object) -> None:
    """Tells a route of the backend's own once.

    Aloud where it leaves the kernel that was selected, or an option unapplied.
    """
    own, reason = getattr(product, "route", None), getattr(product, "route_reason", None)
    if own is None or (key := (route.label, f"{own}: {reason}")) in _logged:
        return
    _logged.add(key)
    as_asked = getattr(product, "runs_kernel", True) and not getattr(product, "unapplied", ())
    level = logging.INFO if as_asked else logging.WARNING
    _log.log(level, "attention %s: route %s", *key)


def _log_fallback(refused: Route, taken: Route, refusal: str) -> None:
    key = (refused.label, taken.label)  # once per choice and fallback; the texts differ with every length
    if key not in _logged:
        _logged.add(key)
        _log.warning("attention %s is the fallback taken; %s", taken.label, refusal)
