"""Calls whose tensors do not fit are refused before any work, with both numbers."""

from __future__ import annotations

import pytest
import torch

from omni_attn.errors import MetadataError
from tests.models.wan.tiny_models import build_inputs, build_model


@pytest.mark.parametrize(
    ("kind", "replaced", "text"),
    [
        ("t2v", {0: torch.zeros(2, 5, 3, 4, 6)}, r"\[2, 5, 3, 4, 6\]; this model needs \[batch, 4, frames"),
        (
            "i2v",
            {0: torch.zeros(2, 4, 3, 4, 6)},
            r"needs \[batch, 9, .*Join noise, mask and condition latent",
        ),
        ("t2v", {0: torch.zeros(4, 3, 4, 6)}, r"\[4, 3, 4, 6\]; this model needs"),
        ("t2v", {0: torch.zeros(2, 4, 3, 5, 6)}, "height, 5, is not a multiple of the patch size 2"),
        ("t2v", {0: torch.zeros(2, 4, 3, 4, 0)}, "width, 0, is not a multiple"),
        ("t2v", {0: torch.zeros(2, 4, 33, 4, 6)}, "frames gives 33 positions and rope_max_seq_len is 32"),
        (
            "t2v",
            {1: torch.zeros(3)},
            r"timestep has shape \[3\]; with 2 latents of 18 tokens it must be \[2\]",
        ),
        ("t2v", {1: torch.tensor(5)}, r"timestep has shape \[\]"),
        ("t2v", {1: torch.zeros(2, 17)}, r"timestep has shape \[2, 17\].*\[2, 18\]"),
        ("t2v", {2: torch.zeros(2, 512, 33)}, r"\[2, 512, 33\]; this model needs \[2, text tokens, 32\]"),
        ("t2v", {2: torch.zeros(1, 512, 32)}, r"\[1, 512, 32\]; this model needs \[2, text"),
        ("t2v", {3: torch.zeros(2, 7, 6)}, r"\[2, 7, 6\] came to a model without an image branch"),
        ("i2v", {3: None}, r"encoder_hidden_states_image is absent.*\[2, tokens, 6\]"),
        ("i2v", {3: torch.zeros(2, 7, 5)}, r"\[2, 7, 5\]; this model needs \[2, tokens, 6\]"),
        ("i2v", {3: torch.zeros(4, 7, 6)}, r"\[4, 7, 6\]; this model needs \[2, tokens, 6\]"),
        ("flf2v", {3: torch.zeros(2, 7, 6)}, r"\[2, 7, 6\]; this model needs \[2, 10, 6\] or \[4, 5, 6\]"),
    ],
)
def test_refuses(kind: str, replaced: dict[int, torch.Tensor | None], text: str) -> None:
    model, inputs = build_model(kind), list(build_inputs(kind))
    for index, value in replaced.items():
        inputs[index] = value
    with pytest.raises(MetadataError, match=text):
        model(*inputs)


def test_one_timestep_serves_the_whole_batch() -> None:
    model = build_model("t2v")
    latent, timestep, text, _ = build_inputs("t2v")
    with torch.no_grad():
        each = model(latent, timestep[:1].expand(2), text)
        torch.testing.assert_close(model(latent, timestep[:1], text), each, atol=1e-5, rtol=1e-5)
