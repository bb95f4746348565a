"""One captured call: a CUDA graph, or on other devices a plain call that keeps to the rules of one.

Both read their inputs where they lay at the capture, and write their outputs to where the first ones lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

#: Calls before the capture, which compile and tune kernels and make their scratch.
WARM_UPS = 2


class Graph(Protocol):
    """A captured call.

    Attributes:
        outputs: of the capture, overwritten by each replay.
    """

    outputs: Any

    def replay(self) -> None:
        """Runs it again on what lies in its inputs now."""


class HostGraph:
    """Calls the function again, over the inputs and the metadata objects of the capture."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        outputs = call()
        with torch.inference_mode(False):  # so that replays outside of that mode can write them
            self.outputs = map_tensors(torch.clone, outputs)

    def replay(self) -> None:
        """See Graph."""
        kept: list[torch.Tensor] = []
        map_tensors(kept.append, self.outputs)
        found = iter(kept)
        map_tensors(lambda new: next(found).copy_(new), self._call())


class DeviceGraph:
    """A CUDA graph.

    Args:
        call: runs a few times eagerly first, on a stream of its own.
        pool: memory that graphs share which never run at the same time.

    Raises:
        RuntimeError: the call does something that no graph can hold; CUDA's own error is chained.
    """

    def __init__(self, call: Callable[[], Any], device: torch.device, pool: Any) -> None:
        with torch.cuda.device(device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    call()
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(self._graph, pool=pool):
                    self.outputs = call()
            except RuntimeError as error:
                raise RuntimeError(
                    f"the step cannot be captured as a CUDA graph ({error}) -- it waits for the device, or allocates "
                    "outside torch -- move that in front of the step, or set cudagraph_mode to NONE"
                ) from error

    def replay(self) -> None:
        """See Graph."""
        self._graph.replay()


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same nest of tuples, lists and mappings with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(change, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        return {key: map_tensors(change, part) for key, part in value.items()}
    return value
