"""Facts of this machine: read once, re-read on request, and never by importing a package."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omni_attn.errors import BackendRejectedError, ConfigError
from omni_attn.facts import DeviceInfo
from omni_attn.platforms import current_omni_platform, reset_device_facts
from omni_attn.selector import select
from omni_attn.testing import fake_device, fake_package
from tests.selection.fresh import write_metadata
from tests.selection.stubs import PackagedBackend, ask, choose, registered

Install = Callable[[str, str], None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder on sys.path; facts are fresh before and after."""
    monkeypatch.syspath_prepend(str(tmp_path))
    reset_device_facts()
    yield tmp_path
    monkeypatch.undo()
    importlib.invalidate_caches()
    reset_device_facts()


@pytest.fixture
def install(site: Path) -> Install:
    """Writes a distribution's metadata; folder times differ, as they do between two runs of pip."""
    times = itertools.count(1_000_000_000, 1000)

    def write(distribution: str, version: str) -> None:
        write_metadata(site, distribution, version)
        os.utime(site, (now := next(times), now))

    return write


def this_cpu() -> DeviceInfo:
    return current_omni_platform("cpu").device


def test_an_installed_package_is_seen_after_the_reset_and_changes_the_answer(install: Install) -> None:
    config = choose("PACKAGED_TEST")
    with registered(("PACKAGED_TEST", PackagedBackend)):
        with pytest.raises(BackendRejectedError, match="omni-attn-test-kernel"):
            select(ask(), config, current_omni_platform("cpu"))
        install("omni-attn-test-kernel", "1.3")
        assert "omni-attn-test-kernel" not in this_cpu().packages
        reset_device_facts()
        assert this_cpu().packages["omni-attn-test-kernel"] == "1.3"
        assert select(ask(), config, current_omni_platform("cpu")).backend == "PACKAGED_TEST"


@pytest.mark.parametrize("version", ["1.1.9", "1.2rc1"])
def test_a_package_below_the_minimum_is_named_with_both_versions(install: Install, version: str) -> None:
    install("omni-attn-test-kernel", version)
    with registered(("PACKAGED_TEST", PackagedBackend)), pytest.raises(BackendRejectedError) as caught:
        select(ask(), choose("PACKAGED_TEST"), current_omni_platform("cpu"))
    assert all(part in str(caught.value) for part in ("omni-attn-test-kernel", "1.2", version))


def test_a_registration_brings_its_packages_into_the_facts(install: Install) -> None:
    install("omni-attn-test-kernel", "1.3")
    assert "omni-attn-test-kernel" not in this_cpu().packages
    with registered(("PACKAGED_TEST", PackagedBackend)):
        assert this_cpu().packages["omni-attn-test-kernel"] == "1.3"


def test_reading_facts_imports_no_kernel_package(site: Path) -> None:
    for module in ("flash_attn", "flash_attn_interface", "fa3_fwd_interface"):
        (site / f"{module}.py").write_text("raise SystemExit('imported')\n")
    assert this_cpu().packages["flash-attn"]
    assert not any(map(sys.modules.get, ("flash_attn", "flash_attn_interface", "fa3_fwd_interface")))


@pytest.mark.parametrize("inside", [None, "cute/__init__.py"], ids=["empty folder", "fa4 alone"])
def test_a_folder_without_code_of_its_own_is_no_installation(
    site: Path, install: Install, inside: str | None
) -> None:
    """flash-attn-4 ships flash_attn/cute and no flash_attn/__init__.py; a stray folder ships nothing at all."""
    (site / "flash_attn").mkdir()
    if inside:
        install("flash-attn-4", "4.0.0b36")
        (site / "flash_attn" / inside).parent.mkdir()
        (site / "flash_attn" / inside).write_text("")
    importlib.invalidate_caches()
    reset_device_facts()
    assert "flash-attn" not in this_cpu().packages
    assert this_cpu().packages.get("flash-attn-4") == ("4.0.0b36" if inside else None)


def test_a_stand_in_does_not_count_as_installed() -> None:
    with fake_package("flash_attn_interface", flash_attn_func=print, flash_attn_varlen_func=print):
        assert fake_device("sm_90").packages == {}
        with pytest.raises(BackendRejectedError, match="fa3-fwd"):
            select(ask(), choose("FLASH_ATTN"), fake_device("sm_90"))


@pytest.mark.parametrize("name", ["gfx942", "npu", "mps", "cpu"])
def test_cudnn_belongs_to_cuda_devices(name: str) -> None:
    assert fake_device(name, cudnn=91900).cudnn is None
    assert fake_device("sm_90", cudnn=91900).cudnn == 91900


def test_an_unknown_assumed_device_is_named_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"gfx942x|cpux"):
        fake_device("cpux")
