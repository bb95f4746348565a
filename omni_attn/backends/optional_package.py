"""Imports what a kernel package must have, or says which of three things is wrong: missing, broken, or too little."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from omni_attn.errors import BackendImportError
from omni_attn.facts import PackageRequirement


def import_symbols(label: str, package: PackageRequirement, *more: str) -> dict[str, Any]:
    """The package's `symbols`, and those named beside them, by name.

    Args:
        label: the backend, and its variant, for the error text.

    Raises:
        BackendImportError: the module is not installed, importing it fails, or a symbol is missing.
    """
    top = package.module.partition(".")[0]
    try:
        module = importlib.import_module(package.module)
        # Some packages import what a name stands for only when it is asked for.
        symbols = {name: getattr(module, name, None) for name in (*package.symbols, *more)}
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package.module}.".startswith(f"{error.name}."):
            raise broken(label, package, error) from error  # something else that it imports is missing
        if sys.modules.get(top) is None:
            raise BackendImportError(
                f"{label}: module {package.module} is not installed; install {package.distribution}: "
                f"`{package.install_command}`"
            ) from error
        raise BackendImportError(
            f"{label}: {top} is installed without module {package.module}, which this backend calls; needs another "
            f"version of {package.distribution}: `{package.install_command}`"
        ) from error
    except Exception as error:
        raise broken(label, package, error) from error
    lacking = [name for name, symbol in symbols.items() if symbol is None]
    if lacking:
        raise BackendImportError(
            f"{label}: module {package.module} has no {', '.join(lacking)}; needs another version of "
            f"{package.distribution}: `{package.install_command}`"
        )
    return symbols


def check_keywords(
    label: str, package: PackageRequirement, function: Callable[..., Any], *keywords: str
) -> None:
    """Makes sure that a function takes the keywords it will be called with; one without a signature passes.

    Raises:
        BackendImportError: it takes others.
    """
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    lacking = [keyword for keyword in keywords if keyword not in parameters]
    if lacking:
        name = getattr(function, "__qualname__", "its function")
        raise BackendImportError(
            f"{label}: {package.module}.{name} takes no {', '.join(lacking)} (it takes {', '.join(parameters)}); "
            f"needs another version of {package.distribution}: `{package.install_command}`"
        )


def broken(label: str, package: PackageRequirement, error: Exception) -> BackendImportError:
    """The error for a package that is there and does not work."""
    return BackendImportError(
        f"{label}: {package.module} is installed but broken: {type(error).__name__}: {error}; reinstall "
        f"{package.distribution} for this torch: `{package.install_command}`"
    )


def import_first(
    label: str, packages: Sequence[PackageRequirement], head_size: int
) -> tuple[PackageRequirement, dict[str, Any]]:
    """What is imported from the first installed of several packages whose build has the head size.

    Args:
        label: backend and variant, for error texts.

    Returns:
        The requirement of that package, with the commands of all that ship its module, and its symbols by name.

    Raises:
        BackendImportError: none of them is installed, or importing one fails, or a symbol is missing.
    """
    by_module: dict[str, list[PackageRequirement]] = {}
    for package in packages:
        if not package.lacks_head_size(head_size):
            by_module.setdefault(package.module, []).append(package)
    for shipped_by in by_module.values():
        # Several distributions ship one module: which of them this is, its own error text cannot tell.
        commands = "` or `".join(dict.fromkeys(package.install_command for package in shipped_by))
        wanted = replace(shipped_by[0], install=commands)
        try:
            return wanted, import_symbols(label, wanted)
        except BackendImportError as error:
            if not (isinstance(error.__cause__, ModuleNotFoundError) and "not installed" in str(error)):
                raise
    modules = " or ".join(by_module or dict.fromkeys(package.module for package in packages))
    commands = " or ".join(f"`{package.install_command}`" for package in packages)
    raise BackendImportError(f"{label}: module {modules} is not installed; install it: {commands}")
