"""The configuration that constructors see. A ContextVar: threads and failed constructions leave no trace."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from omni_attn.config import AttentionConfig, load_config
from omni_attn.facts import AttentionRequest, DeviceInfo
from omni_attn.platforms import OmniPlatform, current_omni_platform

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CollectedLayer:
    """A layer that only stated its needs: the request, and the name the model gave it."""

    request: AttentionRequest
    prefix: str


@dataclass(frozen=True)
class AttentionScope:
    """What a constructor of a layer reads.

    Attributes:
        config: the choice of backends; None = an empty one, which a documented environment variable may fill.
        platform: the machine; None = this one.
        dtype: name of the dtype the model will run in, None if unknown.
        lengths: role -> (query tokens, key tokens) expected.
        collected: where layers leave their requests in place of selecting, None in ordinary use.
    """

    config: AttentionConfig | None = None
    platform: OmniPlatform | None = None
    dtype: str | None = None
    lengths: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    collected: list[CollectedLayer] | None = None

    def config_for(
        self, given: AttentionConfig | Mapping[str, object] | str | None = None
    ) -> AttentionConfig:
        """The config that a layer follows: its own, else the one in force, else an empty one."""
        if given is not None:
            return as_config(given)
        return AttentionConfig().with_environment(os.environ) if self.config is None else self.config

    def platform_or_current(self) -> OmniPlatform:
        """The platform in force, else this machine's."""
        return current_omni_platform() if self.platform is None else self.platform


_scope: ContextVar[AttentionScope | None] = ContextVar("omni_attn_scope", default=None)


def current_scope() -> AttentionScope:
    """The scope in force; outside of any, an empty one."""
    return _scope.get() or AttentionScope()


def as_config(config: AttentionConfig | Mapping[str, object] | str | None) -> AttentionConfig:
    """An AttentionConfig of anything that load_config takes; None = empty."""
    if config is None:
        return AttentionConfig()
    return config if isinstance(config, AttentionConfig) else load_config(config)


@contextmanager
def use_attention_config(
    config: AttentionConfig | Mapping[str, object] | str | None,
    *,
    platform: OmniPlatform | DeviceInfo | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    lengths: Mapping[str, tuple[int, int]] | None = None,
) -> Iterator[AttentionConfig]:
    """Attention layers constructed inside follow this config; nothing reads it in forward, nor what is around it.

    Args:
        config: an AttentionConfig, or anything that load_config takes; None = empty.
        platform: the machine to judge against, or facts of one; exclusive with device.
        device: a device of this machine; None = its best accelerator, else its CPU.
        dtype: dtype the model will run in; None = unknown.
        lengths: role -> (query tokens, key tokens) expected, for default orders that depend on them.

    Raises:
        ConfigError: the config is wrong.
        TypeError: platform and device are both given.
    """
    if platform is not None and device is not None:
        raise TypeError("use_attention_config: platform and device both name the machine; give one of them")
    used = AttentionScope().config_for(config)
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    chosen = current_omni_platform(platform if platform is not None else device)
    token = _scope.set(AttentionScope(used, chosen, name, dict(lengths or {})))
    try:
        yield used
    finally:
        _scope.reset(token)


@contextmanager
def collect_attention_requests() -> Iterator[list[CollectedLayer]]:
    """Attention layers constructed inside state their needs into the list, select nothing and cannot run.

    For asking which roles a model has, and what each would get, before any weight exists.
    """
    found: list[CollectedLayer] = []
    token = _scope.set(replace(current_scope(), collected=found))
    try:
        yield found
    finally:
        _scope.reset(token)
