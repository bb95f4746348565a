"""Versions and names of packages: every spelling of a distribution is one name, and odd versions break nothing."""

from __future__ import annotations

import pytest

from omni_attn.backends.flash_packages import FA2_PACKAGES
from omni_attn.errors import BackendRejectedError
from omni_attn.facts import PackageRequirement
from omni_attn.facts.packages import package_reasons
from omni_attn.platforms import current_omni_platform
from omni_attn.selector import select
from omni_attn.testing import fake_device
from tests.selection.stubs import ask, choose

[FLASH_ATTN_2] = FA2_PACKAGES


@pytest.mark.parametrize("spelling", ["fa3-fwd", "fa3_fwd", "FA3_FWD", "Fa3.Fwd"])
def test_every_spelling_of_a_distribution_is_one(spelling: str) -> None:
    device = fake_device("sm_90", packages={spelling: "0.0.3"}, cudnn=91900)
    usual = fake_device("sm_90", packages={"fa3-fwd": "0.0.3"}, cudnn=91900)
    assert device == usual and hash(device) == hash(usual)
    assert current_omni_platform(device) is current_omni_platform(usual)
    assert select(ask(), choose("FLASH_ATTN"), device).variant == "fa3"


@pytest.mark.parametrize("spelling", ["flash_attn", "Flash-Attn"])
def test_a_version_is_found_under_any_spelling(spelling: str) -> None:
    device = fake_device("sm_90", packages={spelling: "2.5"})
    with pytest.raises(BackendRejectedError, match=r"needs flash-attn >= 2\.6, < 3, found 2\.5"):
        select(ask(), choose({"default": {"backend": "FLASH_ATTN", "variant": "fa2"}}), device)


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("2.6", True),
        ("2.8.3+cu12torch2.8cxx11abiTRUE", True),
        ("2.8.3.post1", True),
        ("2.5.9.post1", False),
        ("2.6rc1", False),
        ("3.0.0b1", True),  # of the range's own making: a version before 3
        ("3", False),
        ("3.0.0", False),
    ],
)
def test_versions_are_compared_as_versions(version: str, accepted: bool) -> None:
    assert FLASH_ATTN_2.accepts_version(version) is accepted


@pytest.mark.parametrize("version", ["main", "unknown", "2.8.3-dirty-tree", "", "git+abc"])
def test_what_is_no_version_is_not_held_against_a_package(version: str) -> None:
    """A source checkout; its kernel speaks for itself when it is imported."""
    assert FLASH_ATTN_2.accepts_version(version)
    selection = select(ask(), choose("FLASH_ATTN"), fake_device("sm_90", packages={"flash-attn": version}))
    assert selection.variant == "fa2"


@pytest.mark.parametrize(
    ("installed", "reasons"),
    [
        ({"aa": "1", "bb": "2"}, ()),
        ({"aa": "1"}, ("needs aa >= 2, found 1",)),
        ({"aa": "1", "bb": "1.9"}, ("needs aa >= 2, found 1", "needs bb >= 2, found 1.9")),
        (
            {},
            ("needs aa >= 2 or bb >= 2, found none installed (`pip install aa` or `pip install bb`)",),
        ),
    ],
    ids=["one serves", "one too old", "both too old", "none"],
)
def test_one_of_several_packages_is_enough_and_each_installed_one_says_why_not(
    installed: dict[str, str], reasons: tuple[str, ...]
) -> None:
    either = tuple(PackageRequirement(distribution=name, module=name, minimum="2") for name in ("aa", "bb"))
    assert package_reasons(either, ask(), fake_device("cpu", packages=installed)) == reasons
