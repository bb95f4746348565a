"""Families whose only default is torch's own attention. A family of an unknown name gets the CPU's policy."""

from __future__ import annotations

from omni_attn.platforms.interface import OmniPlatform


class CpuPlatform(OmniPlatform):
    """CPUs, and every device family that nobody wrote a policy for."""


class MpsPlatform(OmniPlatform):
    """Apple GPUs."""
