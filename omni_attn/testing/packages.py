"""Stand-in modules for optional packages. A stand-in does not count as installed: name it in fake_device too."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _RaisingImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `import name` fail the way a broken installation does."""

    def __init__(self, name: str, error: BaseException) -> None:
        self.name, self.error = name, error

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self.name else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        raise self.error


@contextmanager
def fake_package(
    name: str, *, raises: BaseException | None = None, **symbols: Any
) -> Iterator[ModuleType | None]:
    """Puts a stand-in in place of a module, and takes it away again.

    Args:
        name: module name, dotted if need be; missing parents become empty packages.
        raises: importing the module raises this instead.
        symbols: attributes of the module.

    Yields:
        The stand-in module; None where importing raises.
    """
    parents = [name.rsplit(".", depth)[0] for depth in range(name.count("."), 0, -1)]
    touched = [*parents, name]
    before = {module: sys.modules.get(module) for module in touched}
    absent = {module for module in touched if module not in sys.modules}
    importer = None if raises is None else _RaisingImporter(name, raises)
    try:
        for parent in parents:
            if sys.modules.get(parent) is None:  # None is how a module is made to look absent
                sys.modules[parent] = _module(parent)
        if importer is not None:
            sys.modules.pop(name, None)
            sys.meta_path.insert(0, importer)
            yield None
        else:
            stand_in = _module(name, **symbols)
            sys.modules[name] = stand_in
            yield stand_in
    finally:
        if importer is not None:
            sys.meta_path.remove(importer)
        for module in touched:
            if module in absent:
                sys.modules.pop(module, None)
            else:
                sys.modules[module] = before[module]  # type: ignore[assignment]


def _module(name: str, **symbols: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    for symbol, value in symbols.items():
        setattr(module, symbol, value)
    return module
