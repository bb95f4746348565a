"""What is shipped: every package folder, the type marker, the command; and pins that cover what `make` installs."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import omni_attn
from omni_attn.facts import KernelFacts
from omni_attn.overview import built_in_facts

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in found}


def kernels() -> list[KernelFacts]:
    listed = [backend.facts for backend in built_in_facts()]
    return [k for facts in listed for k in (facts, *(v.facts for v in facts.variants))]


def test_every_folder_with_code_is_a_package() -> None:
    folders = {file.parent for file in (ROOT / "omni_attn").rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["omni_attn*"]


def test_types_are_shipped() -> None:
    assert (ROOT / "omni_attn" / "py.typed").is_file()
    assert PROJECT["tool"]["setuptools"]["package-data"] == {"omni_attn": ["py.typed"]}


def test_the_command_exists() -> None:
    module, _, function = PROJECT["project"]["scripts"]["omni-attn"].partition(":")
    assert find_spec(module) is not None
    assert function == "main"


def test_the_version_is_stated_once() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", omni_attn.__version__)


def test_licence_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("group", ["core", "dev", "pipelines"])
def test_what_make_installs_is_pinned_inside_the_users_range(group: str) -> None:
    pinned = pins()
    requirements = PROJECT["project"]["dependencies"] if group == "core" else EXTRAS[group]
    for requirement in map(Requirement, requirements):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"


def test_torch_is_pinned_and_open_for_users() -> None:
    assert pins()["torch"] == "2.13.0"
    assert "torch>=2.10" in PROJECT["project"]["dependencies"]


def test_extras_are_the_documented_ones() -> None:
    assert set(EXTRAS) == {
        *("flash-attn", "fa3", "fa4", "flashinfer", "sage", "fastvideo", "pipelines", "viz", "dev", "all")
    }
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.extras == set(EXTRAS) - {"all", "dev"}


def test_install_commands_name_extras_that_exist() -> None:
    commands = [package.install_command for kernel in kernels() for package in kernel.packages]
    named = {extra for command in commands for extra in re.findall(r"omni-attn\[([\w-]+)\]", command)}
    assert {"fa3", "flash-attn"} <= named <= set(EXTRAS)


def test_an_extra_brings_a_version_that_its_backend_accepts() -> None:
    for kernel in kernels():
        for package in kernel.packages:
            extra = re.search(r"omni-attn\[([\w-]+)\]", package.install_command)
            if extra is None:
                continue
            (wanted,) = (
                requirement
                for requirement in map(Requirement, EXTRAS[extra[1]])
                if canonicalize_name(requirement.name) == canonicalize_name(package.distribution)
            )
            if package.minimum is not None:  # an extra may bring a newer one, which serves more variants
                lowest = [limit.version for limit in wanted.specifier if limit.operator in (">=", "==", "~=")]
                assert lowest and all(package.accepts_version(version) for version in lowest)
            if package.below is not None:
                assert not wanted.specifier.contains(package.below)
