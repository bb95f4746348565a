"""The record of what stand-in kernels were called for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CallLog:
    """Names of the kernel functions that were called, in order, and of those that only planned such calls."""

    calls: list[str] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.calls)
