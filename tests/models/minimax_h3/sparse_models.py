"""Small MiniMax-H3 models on video sparse attention, and a sequence that is large enough to leave tiles out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omni_attn import prepare_attention
from omni_attn.config import AttentionConfig
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.selector import use_attention_config
from tests.models.minimax_h3.tiny_models import Kind, build_inputs, build_model

# Three tiles in time and two in each direction of space, of which half are left out.
SPARSE_KIND = Kind(grid=(6, 4, 8), condition_video=5)
SPARSE: dict[str, Any] = {
    "per_role": {
        "self": {"backend": "FASTVIDEO_VSA", "fastvideo_vsa": {"sparsity": 0.5, "tile_size": [2, 2, 4]}}
    }
}
ALL_TILES = {"per_role": {"self": {"backend": "FASTVIDEO_VSA", "fastvideo_vsa": {"sparsity": 0.0}}}}


def run(
    model: MiniMaxH3Model, kind: Kind, padded_len: int | None = None, **changes: Any
) -> tuple[Tensor, Tensor]:
    """One call with the sequence's own records, batch 1."""
    records = model.attention_records(kind.layout, padded_len)
    lengths = model.config.attention_lengths(kind.rows if padded_len is None else padded_len, kind.text)
    prepare_attention(model, records, lengths)
    inputs = build_inputs(kind, batch=1, padded_len=padded_len) | changes
    with torch.no_grad():
        video, audio = model(**inputs, attention_records=records)
    return video, audio


def sparse_model(config: Any = SPARSE, **changes: Any) -> MiniMaxH3Model:
    with use_attention_config(AttentionConfig.model_validate(config), device="cpu"):
        return build_model(**changes)
