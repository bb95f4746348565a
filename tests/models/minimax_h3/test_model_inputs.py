"""Calls whose tensors do not fit are refused before any work, with both numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn import prepare_attention
from omni_attn.backends.metadata import AttentionMetadata, VideoLayout
from omni_attn.errors import MetadataError
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from tests.models.minimax_h3.tiny_models import KINDS, build_inputs, build_model


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> MiniMaxH3Model:
    """A model that must not come to any work."""
    model = build_model()

    def work(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    for part in (model.proj_in, model.audio_proj_in, model.context_embedder, model.time_embedder):
        monkeypatch.setattr(part, "forward", work)
    return model


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_states": (2, 36, 23)}, r"hidden_states has shape \[2, 36, 23\].*\[2, video rows, 24\]"),
        ({"hidden_states": (36, 24)}, r"hidden_states has shape \[36, 24\]"),
        ({"hidden_states": (2, 35, 24)}, r"video_indices is .* shape \[36\], and hidden_states has 35 rows"),
        ({"audio_hidden_states": (2, 6, 9)}, r"\[2, 6, 9\]; this model needs \[2, audio rows, 10\]"),
        ({"audio_hidden_states": (1, 6, 10)}, r"\[1, 6, 10\]; this model needs \[2, audio rows, 10\]"),
        ({"audio_hidden_states": (2, 5, 10)}, r"audio_indices .* \[6\], and audio_hidden_states has 5 rows"),
        ({"encoder_hidden_states": (2, 5, 41)}, r"encoder_hidden_states has shape \[2, 5, 41\].*, 40\]"),
        ({"encoder_hidden_states": (2, 4, 40)}, r"text_indices .* \[5\], and encoder_hidden_states has 4"),
        ({"encoder_hidden_states": None}, "neither encoder_hidden_states nor refined_text"),
        ({"refined_text": (2, 5, 40)}, r"refined_text has shape \[2, 5, 40\].* \[2, text rows, 48\]"),
        ({"position_ids": (47, 2)}, r"position_ids has shape \[47, 2\]; it must be \[rows, 3\]"),
        ({"position_ids": (46, 3)}, r"timestep_indices .* shape \[47\], and position_ids has 46 rows"),
        ({"token_tags": (47, 1)}, r"token_tags .* shape \[47, 1\], and position_ids has 47 rows"),
        ({"token_tags": (47,)}, r"token_tags is torch.float32 .* one integer for each, \[47\]"),
        ({"timestep": ()}, r"timestep has shape \[\]"),
        ({"timestep": (0,)}, r"timestep has shape \[0\]"),
        ({"video_indices": (36,)}, "video_indices is torch.float32"),
    ],
)
def test_refuses(model: MiniMaxH3Model, changes: dict[str, Any], text: str) -> None:
    replaced = {name: None if shape is None else torch.zeros(shape) for name, shape in changes.items()}
    assert KINDS["fl2va"].rows == 47
    with pytest.raises(MetadataError, match=text):
        model(**build_inputs() | replaced)


def test_rows_of_no_kind_are_padding_of_a_single_request(model: MiniMaxH3Model) -> None:
    with pytest.raises(MetadataError, match=r"17 of 64 rows belong to no kind.* the batch is 2"):
        model(**build_inputs(padded_len=64))
    inputs = build_inputs() | {
        name: tensor[:40]
        for name, tensor in build_inputs().items()
        if name in {"position_ids", "token_tags", "timestep_indices"}
    }
    with pytest.raises(
        MetadataError, match=r"36 video [+] 6 audio [+] 5 text rows are 47, and position_ids has 40"
    ):
        model(**inputs)


def test_text_of_another_width_is_not_refined(model: MiniMaxH3Model) -> None:
    with pytest.raises(MetadataError, match=r"\[2, 5, 41\]; this model needs \[batch, text rows, 40\]"):
        model.refine_text(torch.zeros(2, 5, 41))


def test_records_of_another_sequence(model: MiniMaxH3Model) -> None:
    plain, padded = build_inputs(batch=1), build_inputs(batch=1, padded_len=64)
    records = model.attention_records(KINDS["t2va"].layout)
    with pytest.raises(MetadataError, match="video_layout holds 35 rows, and video, audio and text are 47"):
        model(**plain, attention_records=records)
    records = model.attention_records(KINDS["fl2va"].layout)
    with pytest.raises(MetadataError, match=r"states no padding, and 47 of 64 rows .* padded_len 64"):
        model(**padded, attention_records=records)
    records = model.attention_records(VideoLayout((47,), (), 47), padded_len=64)
    prepare_attention(model, records, model.config.attention_lengths(64, 5))
    with pytest.raises(AssertionError, match="work began"):  # these fit
        model(**padded, attention_records=records)


def test_padding_only_adds_rows(model: MiniMaxH3Model) -> None:
    with pytest.raises(MetadataError, match="padded_len is 46, and the layout holds 47 rows"):
        model.attention_records(KINDS["fl2va"].layout, padded_len=46)
    records = model.attention_records(KINDS["fl2va"].layout, padded_len=47)
    assert records["self"].packed_padding is None


def test_records_without_the_main_blocks(model: MiniMaxH3Model) -> None:
    with pytest.raises(MetadataError, match=r"holds 'cross', and no record for 'self'"):
        model(**build_inputs(), attention_records={"cross": AttentionMetadata()})
