"""FASTVIDEO_VSA says what it selects: the selection, executed, is its output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn.backends.metadata import AttentionMetadata, PackedPadding
from omni_attn.config import AttentionConfig
from omni_attn.errors import MetadataError
from omni_attn.layer import Attention
from omni_attn.ops.block_sparse.selection import BlockSelection
from omni_attn.platforms import current_omni_platform
from omni_attn.selector import use_attention_config
from tests.inspection.stubs import EXECUTOR

GRID = (3, 5, 4)
TOKENS = 60


def run(
    record: AttentionMetadata, *, tokens: int = TOKENS, gate: torch.Tensor | None = None, **options: Any
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, BlockSelection | None]:
    """Tensors, output and selection of one call with two key heads."""
    spec = {"backend": "FASTVIDEO_VSA", "fastvideo_vsa": {"tile_size": [2, 2, 3], **options}}
    with use_attention_config(
        AttentionConfig.model_validate({"default": spec}), platform=current_omni_platform("cpu")
    ):
        layer = Attention(4, 16, num_kv_heads=2, role="self", video_grid=True, dtype="float32")
    generator = torch.Generator().manual_seed(0)
    tensors = tuple(torch.randn(2, tokens, heads, 16, generator=generator) for heads in (4, 2, 2))
    if record.packed_padding is not None:
        tensors = tuple(x[:1] for x in tensors)
    inputs = {} if gate is None else {"gate_compress": gate}
    if gate is not None:
        record = record.with_layer_inputs(**inputs)
    output = layer(*tensors, record)
    made = record.prepared(layer.group_id)
    assert made is not None and layer.impl is not None
    return tensors, output, layer.impl.select_blocks(*tensors, made.product, **inputs)


def executed(tensors: tuple[torch.Tensor, ...], selection: BlockSelection) -> torch.Tensor:
    used = selection.query_blocks.tokens
    packed = EXECUTOR.pack(*(x[:, :used] for x in tensors), selection.query_blocks, selection.key_blocks)
    return EXECUTOR.attend(packed, selection.selected, 16**-0.5, selection.coarse)


@pytest.mark.parametrize("weight", ["gate", "one"])
@pytest.mark.parametrize("is_gated", [False, True])
def test_the_selection_is_what_runs(weight: str, is_gated: bool) -> None:
    gate = torch.randn(2, TOKENS, 4, 16) if is_gated else None
    record = AttentionMetadata(vsa_dit_seq_shape=GRID)
    tensors, output, selection = run(record, gate=gate, topk=3, coarse_weight=weight)
    assert selection is not None
    assert (selection.coarse is not None) == (is_gated or weight == "one")
    torch.testing.assert_close(executed(tensors, selection), output)


def test_padding_is_no_part_of_it() -> None:
    record = AttentionMetadata(vsa_dit_seq_shape=GRID, packed_padding=PackedPadding(TOKENS, TOKENS))
    tensors, output, selection = run(record, tokens=TOKENS + 7, topk=3)
    assert selection is not None and selection.query_blocks.tokens == TOKENS
    torch.testing.assert_close(executed(tensors, selection), output[:, :TOKENS])


def test_routes_with_all_tiles() -> None:
    assert run(AttentionMetadata(vsa_dit_seq_shape=GRID), sparsity=0.0)[2] is None
    record = AttentionMetadata(vsa_dit_seq_shape=GRID, preserve_vsa_all_blocks=True)
    _, _, selection = run(record, sparsity=0.0)
    assert selection is not None
    assert (selection.selected.counts == selection.key_blocks.num_blocks).all()


def test_a_product_of_another_backend_is_refused_by_name() -> None:
    config = AttentionConfig.model_validate({"default": "FASTVIDEO_VSA"})
    with use_attention_config(config, platform=current_omni_platform("cpu")):
        layer = Attention(4, 16, role="self", video_grid=True)
    assert layer.impl is not None
    with pytest.raises(
        MetadataError, match=r"FASTVIDEO_VSA needs the FastVideoVSAMetadata .* found NoneType"
    ):
        layer.impl.select_blocks(*[torch.zeros(1, TOKENS, 4, 16)] * 3, None)
