"""The device that a command speaks about: this machine, or one that `--assume` describes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from omni_attn.errors import ConfigError

if TYPE_CHECKING:
    from omni_attn.config import PipelineConfig
    from omni_attn.platforms import OmniPlatform

Assume = Annotated[
    str | None,
    typer.Option(
        "--assume",
        metavar="DEVICE",
        help="Answer for this device instead of the machine's own: sm_80, sm_90, sm_100, gfx942, cpu, mps, npu, ...",
    ),
]
Packages = Annotated[
    str | None,
    typer.Option(
        "--packages",
        metavar="NAME=VERSION,...",
        help="With --assume: distributions installed there, for example fa3-fwd=0.0.3. Without it: none.",
    ),
]
Cudnn = Annotated[
    str | None,
    typer.Option(
        "--cudnn",
        metavar="VERSION",
        help="With --assume: cuDNN there, 9.19.0 or as torch writes it (91900). Without it: none.",
    ),
]


def target_platform(
    config: PipelineConfig, assume: str | None, packages: str | None, cudnn: str | None
) -> OmniPlatform | None:
    """The assumed platform, None for the machine's own.

    Raises:
        ConfigError: an unknown device, packages or a cuDNN version that cannot be read, either of them without a
            device, or a pipeline that names another kind of device than the assumed one.
    """
    if assume is None:
        given = [name for name, value in (("--packages", packages), ("--cudnn", cudnn)) if value is not None]
        if given:
            raise ConfigError(
                f"{' and '.join(given)}: describes an assumed device, and none was named. Add --assume, for example "
                "--assume sm_90."
            )
        return None
    from omni_attn.platforms import current_omni_platform
    from omni_attn.platforms.assumed import assumed_device

    installed = parse_packages(packages or "")
    warn_of_unknown(installed)
    device = assumed_device(assume, installed, None if cudnn is None else parse_cudnn(cudnn))
    asked = config.device.partition(":")[0]
    if asked not in ("auto", device.kind) and (asked, device.kind) != ("cuda", "rocm"):
        raise ConfigError(
            f"--assume {assume}: is a {device.kind} device, and the pipeline says device: {config.device}. "
            "Add --set device=auto."
        )
    return current_omni_platform(device)


def parse_packages(text: str) -> dict[str, str]:
    """The mapping in "name=version,name=version"; names in the index's canonical spelling.

    Raises:
        ConfigError: an entry without a name or with no valid version; all of them at once.
    """
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version

    packages: dict[str, str] = {}
    problems: list[str] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, version = (part.strip() for part in entry.partition("="))
        try:
            Version(version)
        except InvalidVersion:
            wrong = f"{version!r} is not a version" if version else "names no version"
            problems.append(
                f"--packages: {entry!r}{':' if version else ''} {wrong}. Write NAME=VERSION, for example fa3-fwd=0.0.3."
            )
            continue
        if not name:
            problems.append(
                f"--packages: {entry!r} names no package. Write NAME=VERSION, for example fa3-fwd=0.0.3."
            )
            continue
        packages[canonicalize_name(name)] = version
    if problems:
        raise ConfigError(*problems)
    return packages


def parse_cudnn(text: str) -> int:
    """The number that torch writes for a cuDNN version: 91900 for "9.19.0", "9.19" and "91900".

    Raises:
        ConfigError: none of these.
    """
    text = text.strip()
    if re.fullmatch(r"[1-9]\d{3,5}", text):
        return int(text)
    if match := re.fullmatch(r"([1-9]\d?)\.(\d\d?)(?:\.(\d\d?))?", text):
        major, minor, patch = (int(part or 0) for part in match.groups())
        # Up to version 8 the minor version had one digit: 8902 is 8.9.2.
        return major * (10_000 if major >= 9 else 1_000) + minor * 100 + patch
    raise ConfigError(f"--cudnn {text!r}: is not a cuDNN version. Write 9.19.0, or 91900 as torch does.")


def warn_of_unknown(packages: Iterable[str]) -> None:
    """Warns of distributions that no registered backend asks for: most likely misspelt."""
    from omni_attn.cli.console import warn
    from omni_attn.config.names import nearest
    from omni_attn.overview import registered_facts

    known = {
        package.distribution
        for backend in registered_facts()
        for kernel in (backend.facts, *(variant.facts for variant in backend.facts.variants))
        for package in kernel.packages
    }
    for name in packages:
        if name not in known:
            near = nearest(name, sorted(known), 0.4)
            hint = f" Did you mean {near}?" if near else ""
            warn(f"--packages: no backend here asks for {name!r}.{hint} Known: {', '.join(sorted(known))}.")
