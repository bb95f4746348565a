"""FlashInfer's paged wrappers and what was planned with them last.

Planning writes into the wrapper's pinned memory, from where the device copies it in its own time, and into buffers that
the planned launches read. So a wrapper is planned anew only when nobody holds what was planned with it before, and when
that copy is done; until then another one is taken, and the host waits for nothing. A CUDA graph knows its wrapper's
buffers by address: the steps that it replays are all planned with that one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class PagedPlan:
    """A wrapper, and the step that it is planned for.

    Attributes:
        run: (query [T, H, D], (keys, values) [N, P, G, D] each, *, out) -> out.
    """

    def __init__(self, wrapper: Any) -> None:
        self.run: Callable[..., Any] = wrapper.run
        self._wrapper = wrapper
        self._holder: weakref.ref[object] | None = None
        self._copied: Any = None

    def plan(self, device: torch.device, **step: Any) -> None:
        """Plans a step; the launches of the one before may still be under way."""
        self._wrapper.plan(**step)
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))

    def plan_again(self, device: torch.device, **step: Any) -> None:
        """Plans another step of a CUDA graph.

        The device is waited for where it has not even begun with the step before; there is no second wrapper to take.

        Raises:
            RuntimeError: the launch would have to look different, which a graph cannot follow.
        """
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        before = self._launch
        self.plan(device, **step)
        if self._launch != before:
            raise RuntimeError(
                f"FLASHINFER_ATTN planned this step as {self._launch}, and the CUDA graph was captured with "
                f"{before}: run such steps eagerly (cudagraph_mode NONE), or choose FLASH_ATTN or TRITON_ATTN"
            )

    @property
    def _launch(self) -> list[Any]:
        """What a launch gets from the plan beside buffers; empty where this version does not tell."""
        return list(getattr(self._wrapper, "_plan_info", None) or ())

    def belongs_to(self, holder: object) -> None:
        """Keeps the plan as long as that object lives."""
        self._holder = weakref.ref(holder)

    @property
    def is_free(self) -> bool:
        """Whether it may be planned anew."""
        held = self._holder is not None and self._holder() is not None
        return not held and (self._copied is None or self._copied.query())
