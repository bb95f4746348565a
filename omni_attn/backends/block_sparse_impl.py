"""What the impls of block-sparse attention have in common: a dense impl beside them, and kernels of this process."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from omni_attn.backends.abstract import AttentionImpl
from omni_attn.backends.torch_sdpa_impl import TorchSDPAImpl


class BlockSparseImpl(AttentionImpl):
    """One layer on block-sparse kernels, with a dense impl for the steps, layers and sizes that stay dense.

    Attributes:
        kernels: names of the attributes that `load_kernels` sets; a copy or pickle of the layer leaves them out.
    """

    kernels: ClassVar[frozenset[str]]

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.dense = TorchSDPAImpl(**geometry)
        self.load_kernels()

    def __getstate__(self) -> dict[str, Any]:
        """Kernels belong to this process."""
        return {name: value for name, value in self.__dict__.items() if name not in self.kernels}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """They are looked up again where a copy is loaded."""
        self.__dict__.update(state)
        self.load_kernels()

    @abstractmethod
    def load_kernels(self) -> None:
        """Sets what runs the sparse route.

        Raises:
            BackendImportError: a package is missing, broken, or lacks what is called.
        """
