"""No variable of the person who runs the tests chooses a backend here."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMNI_ATTN_BACKEND", "DIFFUSION_ATTENTION_BACKEND"):
        monkeypatch.delenv(variable, raising=False)
