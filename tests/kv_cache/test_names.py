"""The public names of omni_attn.kv_cache are imported on first use."""

from __future__ import annotations

import pytest

from omni_attn import kv_cache
from tests.selection.fresh import run_fresh


def test_importing_the_package_loads_no_torch() -> None:
    program = "import omni_attn.kv_cache as k, sys; print(len(dir(k)) > 0, 'torch' in sys.modules)"
    assert run_fresh(program).split() == ["True", "False"]


def test_every_name_is_there() -> None:
    for name in kv_cache.__all__:
        assert getattr(kv_cache, name).__name__ == name
    with pytest.raises(AttributeError, match=r"no attribute 'BlockTabel'; it has .*BlockTable"):
        _ = kv_cache.BlockTabel
