"""The learned gate of video sparse attention's coarse output, and whether it is known to be shut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from omni_attn.layer import Attention
from omni_attn.models.minimax_h3.attention.fastvideo_h3 import MiniMaxH3VSAImpl
from omni_attn.ops.operators import is_traced


class CompressionGate(nn.Linear):
    """A projection without bias that a base checkpoint leaves entirely zero, until it is trained.

    A shut gate costs a projection and the coarse output and adds exact zeros. `look` finds out whether it is shut:
    once, since that waits for the device. What it found is forgotten when the weight may have changed: by loading, in
    place, or in a call that asks for its gradient (`forget_if_changed`, which the model asks before its blocks). Torch
    does not count what is written through `weight.data`, as averaged weights are, nor in inference mode, so the model
    also looks at shut gates again with each `attention_records`.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self._is_shut = False
        self._looked_at: tuple[int, int] | None = None

    @torch.no_grad()
    def look(self) -> None:
        """Looks whether the weight is entirely zero; waits for its device. While tracing there is nothing to see."""
        is_open = self.weight.any()
        self._is_shut = not (is_open.is_meta or is_traced(is_open)) and not bool(is_open)
        self._looked_at = self._state() if self._is_shut else None

    def forget_if_changed(self) -> None:
        """Holds the gate for open from now on if its weight may have changed since the look; costs no wait.

        Traced as part of a compiled model it cannot tell: later calls of that model would not ask again.
        """
        if self._is_shut and (
            torch.compiler.is_compiling() or self._wants_gradient() or self._state() != self._looked_at
        ):
            self._is_shut = False

    def look_if_shut(self) -> None:
        """Looks again if the gate is held for shut; an open one stays open and costs no wait."""
        if self._is_shut:
            self.look()

    def adds_nothing(self, attention: Attention) -> bool:
        """Whether this layer gives the same output without the gate: it is shut, and no gradient is asked for.

        Where the options give a coarse output without gate the weight one, the gate has to be there to shut it.
        """
        impl = attention.impl
        return (
            self._is_shut
            and not self._wants_gradient()
            and isinstance(impl, MiniMaxH3VSAImpl)
            and not impl.adds_coarse
        )

    def _wants_gradient(self) -> bool:
        return torch.is_grad_enabled() and self.weight.requires_grad

    def _state(self) -> tuple[int, int]:
        """Where the weight lies, and how often it was changed in place, as far as torch counts."""
        return self.weight.data_ptr(), 0 if self.weight.is_inference() else self.weight._version

    def _load_from_state_dict(self, *args: Any) -> None:
        self._is_shut = False
        super()._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompressionGate:
        """See nn.Module; a shut gate is looked at again in its new place."""
        was_shut = self._is_shut
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_shut:
            self.look()
        return self


def look_at_gates(model: nn.Module) -> None:
    """Looks at each gate of a model; once after its weights are there."""
    for module in model.modules():
        if isinstance(module, CompressionGate):
            module.look()
