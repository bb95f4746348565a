"""Scales of a cache of fewer bits: numbers that a loader sets on an impl, and a tensor that compiled code reads."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class CacheScales:
    """Keeps a tensor of an impl's scales, as a loader sets one after the other.

    Compiled code takes a float for a constant: equal layers with scales of their own would each be compiled anew. It
    reads this tensor instead, which lies on the host, where an operator waits for nothing.

    Attributes:
        scale_names: of the attributes, which are 1.0 unless set.
        host_scales: float64 [names] on the CPU; None = all are 1.
    """

    scale_names: ClassVar[tuple[str, ...]] = ()
    host_scales: torch.Tensor | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.scale_names:
            scales = [float(getattr(self, each)) for each in self.scale_names]
            ones = all(scale == 1.0 for scale in scales)
            self.host_scales = None if ones else torch.tensor(scales, dtype=torch.float64, device="cpu")
