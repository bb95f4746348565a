"""Public fault B41 (group G6): one backend's metadata in another backend's hands.

Each backend's impl gets None, a raw record and every kind of M; each builder gets every record. The answer is
REF's for what the metadata means, or an error that names the field or type and the backend; never an AttributeError.
Metadata of a sparse backend on its dense route is in test_g6_sparse.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

from omni_attn import AttentionMetadata, PackedPadding, VideoLayout
from omni_attn.backends.abstract import AttentionMetadataBuilder
from omni_attn.ops.reference import reference_attention
from omni_attn.products import build_product
from tests.layer.stands import HEAD_SIZE, STANDS, Stand, assert_close, every_stand, outcome_of, tensors

CALL = tensors(1, 6, 6)
KEEP = torch.tensor([[True, True, False, True, True, False]])
PREFIX = torch.tensor([[True] * 4 + [False] * 2])


def packed_reference() -> torch.Tensor:
    parts = [reference_attention(*(x[:, part] for x in CALL))[0] for part in (slice(0, 2), slice(2, 6))]
    return torch.cat(parts, dim=1)


def padded_reference() -> torch.Tensor:
    return torch.cat(
        [reference_attention(*(x[:, :4] for x in CALL))[0], torch.zeros(1, 2, 4, HEAD_SIZE)], dim=1
    )


#: What a record says, and the numbers that it means.
RECORDS: dict[str, tuple[AttentionMetadata, Callable[[], torch.Tensor]]] = {
    "empty": (AttentionMetadata(), lambda: reference_attention(*CALL)[0]),
    "step": (
        AttentionMetadata(step=2, num_steps=4, sigma=0.5),
        lambda: reference_attention(*CALL)[0],
    ),
    "grid": (AttentionMetadata(vsa_dit_seq_shape=(1, 2, 3)), lambda: reference_attention(*CALL)[0]),
    "grid, all blocks": (
        AttentionMetadata(vsa_dit_seq_shape=(1, 2, 3), preserve_vsa_all_blocks=True),
        lambda: reference_attention(*CALL)[0],
    ),
    "layout": (
        AttentionMetadata(video_layout=VideoLayout((2,), ((1, 2, 2),), 6)),
        lambda: reference_attention(*CALL)[0],
    ),
    "mask": (AttentionMetadata(attn_mask=KEEP), lambda: reference_attention(*CALL, attn_mask=KEEP)[0]),
    "mask with lengths": (
        AttentionMetadata(attn_mask=PREFIX, kv_lengths=(4,)),
        lambda: reference_attention(*CALL, attn_mask=PREFIX)[0],
    ),
    "packed": (AttentionMetadata(cu_seqlens_q=(0, 2, 6)), packed_reference),
    "packed padding": (AttentionMetadata(packed_padding=PackedPadding(4, 4)), padded_reference),
}
every_record = pytest.mark.parametrize("stated", RECORDS.values(), ids=list(RECORDS))
Meaning = tuple[AttentionMetadata, Callable[[], torch.Tensor]]


def assert_understood_or_refused(
    stand: Stand, expected: torch.Tensor, call: Callable[[], torch.Tensor], *names: str
) -> None:
    """REF's numbers, or a refusal that names the backend and what was handed to it: its type or a field of it."""
    outcome = outcome_of(call)
    if isinstance(outcome, str):
        assert stand.name in outcome and any(name in outcome for name in names), outcome
    else:
        assert_close(outcome, expected)


@every_stand
@every_record
def test_b41_every_record_in_every_builder(stand: Stand, stated: Meaning) -> None:
    record, meaning = stated
    with stand.kernels():
        for output in stand.both(*CALL, record):
            assert_close(output, meaning())


@pytest.mark.parametrize("stand", [s for s in STANDS if not s.facts.needs_video_grid], ids=str)
@pytest.mark.parametrize("name", ["empty", "step", "grid", "layout"])
def test_b41_what_does_not_concern_a_dense_backend_is_optional(stand: Stand, name: str) -> None:
    """A dense backend stands in for a sparse one on the very same record."""
    record, meaning = RECORDS[name]
    with stand.kernels():
        for output in stand.both(*CALL, record):
            assert_close(output, meaning())


def pairs() -> Iterator[tuple[Stand, Stand]]:
    """Every impl with each kind of M, as the first stand that makes it does, and with the M of each of its siblings."""
    firsts = {makes(stand): stand for stand in reversed(STANDS)}
    for stand, other in product(STANDS, STANDS):
        if makes(stand) is makes(other) or firsts[makes(other)] is other:
            yield stand, other


def makes(stand: Stand) -> type[AttentionMetadataBuilder]:
    return stand.backend.get_impl_cls().builder_cls or stand.backend.get_builder_cls()


@pytest.mark.parametrize(("stand", "other"), list(pairs()), ids=str)
@every_record
def test_b41_every_m_in_every_impl(stand: Stand, other: Stand, stated: Meaning) -> None:
    record, meaning = stated
    with other.kernels():
        made = outcome_of(lambda: build_product(other.impl(4, HEAD_SIZE)[1], record, (6, 6)))
    if isinstance(made, str):  # the other backend does not even make one of it
        assert other.limits(*CALL, record).told_by(made)
        return
    fields = [type(made).__name__, *vars(made)]
    with stand.kernels():
        impl, _ = stand.impl(4, HEAD_SIZE)
        assert_understood_or_refused(stand, meaning(), lambda: impl.forward(*CALL, made), *fields)


@every_stand
def test_b41_none_in_every_impl(stand: Stand) -> None:
    with stand.kernels():
        impl, _ = stand.impl(4, HEAD_SIZE)
        expected = reference_attention(*CALL)[0]
        assert_understood_or_refused(stand, expected, lambda: impl.forward(*CALL, None), "None")


@every_stand
@every_record
def test_b41_a_record_that_nobody_prepared_in_every_impl(stand: Stand, stated: Meaning) -> None:
    record, meaning = stated
    with stand.kernels():
        impl, _ = stand.impl(4, HEAD_SIZE)
        assert_understood_or_refused(
            stand, meaning(), lambda: impl.forward(*CALL, record), "AttentionMetadata", *record.stated
        )
