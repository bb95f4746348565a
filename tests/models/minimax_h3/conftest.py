"""Models of these tests run on the CPU, also where there is a GPU that default backends would be selected for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_attn.selector import use_attention_config


@pytest.fixture(autouse=True)
def _select_for_the_cpu() -> Iterator[None]:
    with use_attention_config(None, device="cpu"):
        yield
