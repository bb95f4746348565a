"""Public names of backends and the classes behind them. Reads no provider module until one is asked for.

A name's class comes from, first hit wins: a runtime registration, the platform's own table (see platforms), an
entry point of the group `omni_attn.backends`, the enum.
"""

from __future__ import annotations

import functools
import importlib
import sys
from enum import Enum, EnumMeta
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from omni_attn.config.names import canonical_name, nearest
from omni_attn.errors import BackendImportError, ConfigError

if TYPE_CHECKING:
    from omni_attn.backends.abstract import AttentionBackend

ENTRY_POINT_GROUP = "omni_attn.backends"


class _ByName(EnumMeta):
    """Looks members up by name in any case, or by alias; an unknown name is a ConfigError with the nearest."""

    def __getitem__(cls, name: str) -> Any:
        key = canonical_name(name)
        if key not in cls.__members__:
            raise ConfigError(unknown_name_text(key))
        return cls.__members__[key]


class DiffusionAttentionBackendEnum(Enum, metaclass=_ByName):
    """The backends that come with omni_attn; the value is the default class path."""

    TORCH_SDPA = "omni_attn.backends.torch_sdpa.TorchSDPABackend"
    CUDNN_ATTN = "omni_attn.backends.cudnn_attn.CuDNNAttentionBackend"
    FLASH_ATTN = "omni_attn.backends.flash_attn.FlashAttentionBackend"
    FLEX_ATTN = "omni_attn.backends.flex_attn.FlexAttentionBackend"
    FLASHINFER_ATTN = "omni_attn.backends.flashinfer_attn.FlashInferBackend"
    SAGE_ATTN = "omni_attn.backends.sage_attn.SageAttentionBackend"
    SAGE_ATTN_3 = "omni_attn.backends.sage_attn_3.SageAttention3Backend"
    AITER_QUANT_ATTN = "omni_attn.backends.aiter_quant_attn.AiterQuantBackend"
    TRTLLM_ATTN = "omni_attn.backends.trtllm_attn.TrtllmAttentionBackend"
    FASTVIDEO_VSA = "omni_attn.backends.fastvideo_vsa.FastVideoVSABackend"
    RAINFUSION_ATTN = "omni_attn.backends.rainfusion_attn.RainFusionBackend"
    BLOCK_SUMMARY_ATTN = "omni_attn.backends.block_summary_attn.BlockSummaryBackend"
    TRITON_ATTN = "omni_attn.backends.triton_attn.TritonAttentionBackend"


_registered: dict[str, str] = {}
_classes: dict[str, type[AttentionBackend]] = {}
_generation = 0


def register_diffusion_backend(
    name: str | DiffusionAttentionBackendEnum, target: str | type[AttentionBackend]
) -> None:
    """Adds a backend name, or replaces the class of an existing one, at once.

    Args:
        name: public name in any case; equal to what the class's get_name() answers.
        target: "module:Class" or "module.Class" (imported when first selected), or the class itself.

    Raises:
        ConfigError: the name is empty or holds spaces, or the class answers another name.
    """
    global _generation
    key = name.name if isinstance(name, DiffusionAttentionBackendEnum) else canonical_name(name)
    if isinstance(target, str):
        path = _dotted(target)
        _classes.pop(path, None)
    else:
        path = f"{target.__module__}.{target.__qualname__}"
        # A class that no path leads to, made in a function say, is told apart by its name.
        if not _leads_to(target):
            path = f"{path}#{key}"
        _classes[path] = _checked(target, path, key)
    _registered[key] = path
    _generation += 1


def _dotted(path: str) -> str:
    """ "module:Class" as "module.Class"; the colon stays where a class lies inside another one."""
    module, colon, name = path.partition(":")
    return f"{module}.{name}" if colon and "." not in name else path


def _leads_to(target: type[AttentionBackend]) -> bool:
    found: object = sys.modules.get(target.__module__)
    for part in target.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is target


def unregister_diffusion_backend(name: str) -> None:
    """Takes a runtime registration back; the name falls back to its built-in class, or is gone."""
    global _generation
    path = _registered.pop(canonical_name(name), None)
    if path is not None:
        _classes.pop(path, None)
        _generation += 1


def refresh() -> None:
    """Reads the entry points anew, and makes everything that depends on the registry be asked again."""
    global _generation
    _entry_point_paths.cache_clear()
    _generation += 1


def generation() -> int:
    """Grows with every change of the registry; part of each cache key that depends on it."""
    return _generation


def runtime_path(name: str) -> str | None:
    """The class path that was registered at run time for a canonical name."""
    return _registered.get(name)


def default_path(name: str) -> str:
    """The class path of a canonical name where nothing was registered at run time.

    Raises:
        ConfigError: no backend has this name; the text gives the nearest and all names.
    """
    if name in _entry_point_paths():
        return _entry_point_paths()[name]
    if name in DiffusionAttentionBackendEnum.__members__:
        return DiffusionAttentionBackendEnum[name].value
    raise ConfigError(unknown_name_text(name))


def registered_names() -> tuple[str, ...]:
    """All names that can be selected: built in, from entry points, and registered at run time."""
    return tuple(
        dict.fromkeys([*DiffusionAttentionBackendEnum.__members__, *_entry_point_paths(), *_registered])
    )


def unknown_name_text(name: str) -> str:
    """The error text for a name that nobody registered."""
    names = registered_names()
    near = nearest(name, names)
    hint = f" Did you mean {near}?" if near else ""
    return f"unknown attention backend {name!r}.{hint} Registered here: {', '.join(names)}."


def load_backend(class_path: str, name: str) -> type[AttentionBackend]:
    """The class at a path, checked to be a backend of that name.

    Raises:
        BackendImportError: the module cannot be imported; its own error is chained.
        ConfigError: the module has no such class, or it is no backend, or it answers another name.
    """
    if class_path not in _classes:
        colon = ":" in class_path
        module_name, _, class_name = class_path.partition(":") if colon else class_path.rpartition(".")
        try:
            found: Any = importlib.import_module(module_name)
        except Exception as error:
            raise BackendImportError(f"{name}: module {module_name} cannot be imported: {error}") from error
        for part in class_name.split("."):
            if not hasattr(found, part):
                raise ConfigError(
                    f"{name}: class {class_name} not found in module {module_name}; correct its class path"
                )
            found = getattr(found, part)
        _classes[class_path] = found
    return _checked(_classes[class_path], class_path, name)


def _checked(backend: type[AttentionBackend], class_path: str, name: str) -> type[AttentionBackend]:
    from omni_attn.backends.abstract import AttentionBackend

    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise ConfigError(
            f"{name}: {class_path} is no AttentionBackend; derive it from omni_attn.backends.abstract"
        )
    if canonical_name(backend.get_name()) != name:
        raise ConfigError(
            f"{name}: {class_path}.get_name() answers {backend.get_name()!r}; registry key and name must be equal"
        )
    return backend


@functools.cache
def _entry_point_paths() -> dict[str, str]:
    return {canonical_name(p.name): _dotted(p.value) for p in entry_points(group=ENTRY_POINT_GROUP)}
