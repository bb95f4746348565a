"""Lists, as JSON and YAML readers hand them over, mean what tuples mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.errors import MetadataError
from omni_attn.testing import fake_device
from tests.layer.counting import counting_backend
from tests.layer.stands import HEAD_SIZE, Stand, every_stand, tensors

PREFIX = torch.tensor([[True, True, True, False, False, False]])
FIELDS: list[dict[str, Any]] = [
    {"attn_mask": PREFIX, "kv_lengths": [3]},
    {"cu_seqlens_q": [0, 2, 6]},
    {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_k": [0, 3, 6], "max_seqlen_q": 4, "max_seqlen_k": 3},
    {"vsa_dit_seq_shape": [1, 2, 3]},
]


@every_stand
@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "+".join(fields))
def test_record_fields(stand: Stand, fields: dict[str, Any]) -> None:
    call = tensors(1, 6, 6)
    as_tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    with stand.kernels():
        as_lists, expected = (stand.both(*call, AttentionMetadata(**given)) for given in (fields, as_tuples))
    assert all(torch.equal(*outputs) for outputs in zip(as_lists, expected, strict=True))


def test_lengths_of_a_preparation() -> None:
    with counting_backend("COUNTING") as tally:
        layer, record = Attention(4, HEAD_SIZE, role="self", config="COUNTING"), AttentionMetadata()
        for lengths in ([3, 4], (3, 4)):
            prepare_attention(layer, {"self": record}, {"self": lengths})  # type: ignore[dict-item]
        layer(*tensors(1, 3, 4), record)
        assert tally.builds == [(record, (3, 4))]
        with pytest.raises(MetadataError, match=r"3 query and 4 key.*5 and 4"):
            layer(*tensors(1, 5, 4), record)


def test_two_roles_of_one_record_agree_in_either_form() -> None:
    with use_attention_config(None, platform=fake_device("cpu")):
        model = torch.nn.ModuleList(Attention(4, HEAD_SIZE, role=role) for role in ("self", "joint"))
    record = AttentionMetadata()
    prepare_attention(model, dict.fromkeys(("self", "joint"), record), {"self": [3, 4], "joint": (3, 4)})
    assert len(record.memo) == 1


def test_length_hints_of_a_scope_and_the_window_of_a_layer() -> None:
    with use_attention_config(None, platform=fake_device("cpu"), lengths={"self": [32760, 512]}):  # type: ignore[dict-item]
        request = Attention(4, HEAD_SIZE, role="self", causal=True, window=[2, 0]).request  # type: ignore[arg-type]
    assert (request.max_seqlen_q, request.max_seqlen_k, request.window) == (32760, 512, (2, 0))
    hash(request)
