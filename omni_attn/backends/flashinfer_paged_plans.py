"""FlashInfer's paged wrappers and what was planned with them last.

Planning writes into the wrapper's pinned memory, from where the device copies it in its own time, and into buffers that
the planned launches read. So a wrapper is planned anew only when nobody holds what was planned with it before, and when
that copy is done; until then another one is taken, and the host waits for nothing. A CUDA graph knows its wrapper's
buffers by address: the steps that it replays are all planned with that one.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from omni_attn.backends.flashinfer_shapes import check_offsets
from omni_attn.ops.layout import unit_stride

_numbers = itertools.count()


class PagedPlan:
    """A wrapper, and the step that it is planned for.

    Args:
        narrow: whether the kernels count rows of queries and outputs in 32 bits.

    Attributes:
        number: int64 [] on the CPU, by which the operator below finds this plan.
    """

    def __init__(self, wrapper: Any, *, narrow: bool) -> None:
        self._wrapper, self._narrow = wrapper, narrow
        self._holder: weakref.ref[object] | None = None
        self._copied: Any = None
        number = next(_numbers)
        self.number = torch.tensor(number, device="cpu")
        _plans[number] = self

    def attend(self, query_THD: torch.Tensor, kv_cache: torch.Tensor, output_THD: torch.Tensor) -> None:
        """Attention of the planned step over pages [N, 2, P, G, D] of any strides that leave D dense, into output."""
        query = unit_stride(query_THD)
        dense = output_THD.is_contiguous()
        written = output_THD if dense else query.new_empty(output_THD.shape)
        if self._narrow:
            check_offsets(query, written)
        self._wrapper.run(query, kv_cache.unbind(1), out=written)
        if not dense:
            output_THD.copy_(written)

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


# Plans by number, for the operator below: an operator's arguments are tensors, numbers and text.
_plans: weakref.WeakValueDictionary[int, PagedPlan] = weakref.WeakValueDictionary()


@torch.library.custom_op("omni_attn::flashinfer_paged", mutates_args=("output",))
def attend_planned(
    query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, number: torch.Tensor
) -> None:
    """PagedPlan.attend as one opaque operator, for torch.compile.

    Args:
        number: of the plan, which differs from step to step: an int would be a constant of the compiled code.
    """
    _plans[int(number)].attend(query, kv_cache, output)


@attend_planned.register_fake
def _(query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, *_: object) -> None:
    return None
