"""Tensors that keep their address from step to step, as a captured CUDA graph needs them."""

from __future__ import annotations

import torch


class BufferPool:
    """Persistent buffers, by name and by the form of a row. A frozen pool lets none of them grow.

    A graph reads the addresses that it was captured with. What is computed for a step is staged here, so that the next
    step's values lie at the same place; they hold until the next stage of the same name.

    Args:
        device: of the buffers.

    Attributes:
        changes: how often a step was prepared in here. Whoever finds the same number again finds its own step.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.frozen, self.changes = False, 0
        self._buffers: dict[tuple[str, torch.dtype, torch.Size], torch.Tensor] = {}

    def freeze(self) -> None:
        """From now on a buffer that would have to grow is an error: a graph holds its address. New ones are free."""
        self.frozen = True

    def stage(
        self, name: str, values: torch.Tensor, *, rows: int | None = None, fill: float = 0
    ) -> torch.Tensor:
        """Copies values to the front of a buffer, fills all that lies behind them, and gives back its first rows.

        Does not wait for the device. Values in the host's pinned memory may not be overwritten before the copy is done.

        Args:
            name: of the buffer; values of another dtype, or whose rows have another shape, have another buffer.
            values: [n, ...] on any device, or a single number; what is staged already is not copied again.
            rows: of the result, for values that are more or fewer from step to step; None = n.
            fill: nothing of an earlier step is left behind the values, but this.

        Raises:
            RuntimeError: the buffer would have to grow, and the pool is frozen.
            ValueError: the values are more than `rows`.
        """
        held = values if values.dim() else values[None]
        count = held.shape[0] if rows is None else rows
        if held.shape[0] > count:
            raise ValueError(
                f'buffer "{name}": {held.shape[0]} rows of values, and {count} are to hold them -- state the most that '
                "a step can have"
            )
        self.changes += 1
        buffer = self._buffer(name, count, held)
        view = buffer[: held.shape[0]]
        if buffer.shape[0] > held.shape[0]:
            buffer[held.shape[0] :].fill_(fill)
        if held.device != view.device or held.data_ptr() != view.data_ptr():
            view.copy_(held, non_blocking=True)
        return buffer[:count] if values.dim() else buffer[0]

    def _buffer(self, name: str, rows: int, values: torch.Tensor) -> torch.Tensor:
        key = name, values.dtype, values.shape[1:]
        buffer = self._buffers.get(key)
        if buffer is not None and buffer.shape[0] >= rows:
            return buffer
        if buffer is not None and self.frozen:
            raise RuntimeError(
                f'buffer "{name}" should hold {rows} rows and holds {buffer.shape[0]} -- it cannot grow, since a CUDA '
                "graph was captured with its address -- capture all sizes in one call, and state the most rows that a "
                "step can have"
            )
        with torch.inference_mode(False):  # so that it can be written from inside and outside of that mode
            self._buffers[key] = values.new_empty((rows, *values.shape[1:]), device=self.device)
        return self._buffers[key]
