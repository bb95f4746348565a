"""Devices, dtypes, memory and optional libraries of a run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from omni_attn.errors import ConfigError, OmniAttnError
from omni_attn.models import runtime
from omni_attn.models.runtime import (
    available_memory,
    check_memory,
    import_extra,
    no_progress,
    parameter_bytes,
    resolve_device,
    resolve_dtype,
)

CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_devices_without_a_gpu() -> None:
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match=r"device: 'cuda:1' was asked for, and .* sees 0 CUDA devices"):
        resolve_device("cuda:1")
    with pytest.raises(ConfigError, match=r"'mps' was asked for, .* auto or cpu"):
        resolve_device("mps")


def test_devices_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("auto") == torch.device("cuda", 1)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="sees 2 CUDA devices"):
        resolve_device("cuda:2")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("cdua", "Did you mean 'cuda'"), ("gpu", "Did you mean 'cuda'"), ("meta", "Write auto, cpu")],
)
def test_devices_that_models_do_not_run_on(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{hint}"):
        resolve_device(name)


def test_dtypes() -> None:
    assert resolve_dtype("auto", "cpu") == "float32"
    assert resolve_dtype("auto", "cuda") == resolve_dtype("auto", "mps") == "bfloat16"
    assert resolve_dtype("float16", "cpu") == "float16"
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        resolve_dtype("bfloat", "cpu")


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_memory(CPU) < 2**60
    monkeypatch.setattr(runtime, "available_memory", lambda _: 3 * 2**30)
    check_memory(3 * 2**30, CPU)
    with pytest.raises(
        ConfigError, match=r"X needs 3\.50 GiB on cpu, and 3\.00 GiB are available\. Do this\."
    ):
        check_memory(7 * 2**29, CPU, what="X", advice="Do this.")


def test_parameter_bytes_need_no_storage() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, dtype=torch.bfloat16))
    assert parameter_bytes(model) == 16 * 4 + 25 * 2


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"Sampling needs diffusers") as error:
        import_extra("diffusers", "Sampling")
    assert str(error.value).endswith('pip install "omni-attn[pipelines]"')
    assert isinstance(error.value, OmniAttnError) and isinstance(error.value.__cause__, ImportError)


def test_no_progress_gives_the_items() -> None:
    assert list(no_progress(range(3), 3, "anything")) == [0, 1, 2]


def test_models_import_no_library_of_the_extra() -> None:
    code = (
        "import sys, omni_attn.models.wan.family, omni_attn.models.wan.pipeline\n"
        "extra = {'diffusers', 'transformers', 'safetensors', 'PIL', 'psutil', 'ftfy'} & set(sys.modules)\n"
        "assert not extra, extra\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
