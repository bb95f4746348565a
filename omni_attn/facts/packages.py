"""Optional packages that a kernel needs: versions, symbols, and the build flags that a wheel publishes."""

from __future__ import annotations

import ast
import functools
import importlib.machinery
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from omni_attn.facts.device import DeviceInfo
    from omni_attn.facts.request import AttentionRequest

#: Version of a module that is there without package metadata; no version limit is held against it.
UNKNOWN_VERSION = "unknown"


@dataclass(frozen=True, kw_only=True)
class BuildFlag:
    """A compile-time switch of a wheel that takes something away.

    Attributes:
        name: the flag as the wheel's own config spells it.
        dtype, feature, head_sizes, mask_usage: what is missing where the flag is on: a dtype, a boolean need of the
            request ("window", "requires_grad"), the head sizes (low, high] that the missing kernel would serve, or
            the masks that would run through it.
        always: what is missing, where every call of the kernel needs it.
    """

    name: str
    dtype: str | None = None
    feature: str | None = None
    head_sizes: tuple[int, int] | None = None
    mask_usage: str | None = None
    always: str | None = None

    def need(self, request: AttentionRequest) -> str | None:
        """What the request needs that this flag takes away, None if it needs nothing of the kind."""
        if self.always is not None:
            return self.always
        if self.dtype is not None and request.dtype == self.dtype:
            return f"dtype {self.dtype}"
        if self.feature is not None and getattr(request, self.feature):
            return self.feature
        if self.mask_usage is not None and request.mask_usage == self.mask_usage:
            return f"attn_mask ({self.mask_usage})"
        if self.head_sizes is not None and self.head_sizes[0] < request.head_size <= self.head_sizes[1]:
            return f"head_size {request.head_size}"
        return None


@dataclass(frozen=True, kw_only=True)
class PackageRequirement:
    """One distribution that ships a kernel.

    Attributes:
        distribution: name on the package index.
        module: what is imported.
        symbols: attributes that must be there once imported.
        config_module: module in which the wheel publishes its build flags; read as a file, never imported.
        minimum, below: accepted versions, minimum included, below not.
        flags: switches that matter, judged against what the wheel publishes.
        known_flags: the ones that are on in the published wheel, used where it cannot be read.
        install: what to type.
    """

    distribution: str
    module: str
    symbols: tuple[str, ...] = ()
    config_module: str | None = None
    minimum: str | None = None
    below: str | None = None
    flags: tuple[BuildFlag, ...] = ()
    known_flags: frozenset[str] = frozenset()
    install: str = ""

    def __str__(self) -> str:
        limits = [f" >= {self.minimum}"] if self.minimum else []
        limits += [f" < {self.below}"] if self.below else []
        return self.distribution + ",".join(limits)

    @property
    def install_command(self) -> str:
        return self.install or f"pip install {self.distribution}"

    def accepts_version(self, found: str) -> bool:
        """True where a version lies within the accepted range, or cannot be read as one."""
        try:
            version = Version(found)
        except InvalidVersion:
            return True
        return (self.minimum is None or version >= Version(self.minimum)) and (
            self.below is None or version < Version(self.below)
        )

    def lacks_head_size(self, head_size: int) -> bool:
        """True where the build that is installed here has no kernel for a head size, or none of the kind at all."""
        on = read_build_flags(self.config_module) if self.config_module else None
        on = self.known_flags if on is None else on
        return any(
            flag.always is not None
            or (flag.head_sizes is not None and flag.head_sizes[0] < head_size <= flag.head_sizes[1])
            for flag in self.flags
            if flag.name in on
        )

    def reasons(self, request: AttentionRequest, device: DeviceInfo) -> tuple[str, ...] | None:
        """Why the installed distribution does not do; () if it does, None if it is not installed."""
        found = device.packages.get(self.distribution)
        if found is None:
            return None
        if not self.accepts_version(found):
            return (f"needs {self}, found {found}",)
        on = device.build_flags.get(self.distribution, self.known_flags)
        return tuple(
            f"needs {need}, found {self.distribution} {found} built with {flag.name}"
            for flag in self.flags
            if flag.name in on and (need := flag.need(request))
        )


@functools.cache
def read_build_flags(config_module: str) -> frozenset[str] | None:
    """The flags that are on in `CONFIG["build_flags"]` of an installed data-only module; None if there is none.

    The file is parsed, not run: importing a kernel package to ask what it can do may fail, or load a GPU driver.
    """
    finder = importlib.machinery.PathFinder.find_spec(config_module)
    if finder is None or finder.origin is None:
        return None
    try:
        tree = ast.parse(Path(finder.origin).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "CONFIG" for t in node.targets
            ):
                return frozenset(
                    name for name, on in ast.literal_eval(node.value)["build_flags"].items() if on
                )
    except (OSError, SyntaxError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return None


def package_reasons(
    packages: tuple[PackageRequirement, ...],
    request: AttentionRequest,
    device: DeviceInfo,
    *,
    missing: bool = True,
) -> tuple[str, ...]:
    """Reasons of a list of alternatives: empty as soon as one installed distribution serves the request.

    Args:
        missing: that none is installed is a reason, too. It is none where the hardware refuses already: nobody should
            be sent to install what cannot run.
    """
    if not packages:
        return ()
    answers = {package: package.reasons(request, device) for package in packages}
    if any(reasons == () for reasons in answers.values()):
        return ()
    installed = [reasons for reasons in answers.values() if reasons is not None]
    if installed:
        return tuple(reason for reasons in installed for reason in reasons)
    if not missing:
        return ()
    commands = " or ".join(dict.fromkeys(f"`{package.install_command}`" for package in packages))
    return (f"needs {' or '.join(map(str, packages))}, found none installed ({commands})",)
