"""What the options of block_sparse say about a step and a layer, the same for every backend that owns them."""

from __future__ import annotations

from typing import Any, ClassVar

from omni_attn.backends.abstract import AttentionMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.config import AttentionSpec, BlockSparseSpec


def options_of(spec: AttentionSpec | None) -> BlockSparseSpec:
    """The options that hold; the block's defaults where nobody gave any."""
    found = None if spec is None else spec.block_sparse
    return BlockSparseSpec() if found is None else found


class BlockSparseBuilder(AttentionMetadataBuilder):
    """A builder of steps that block_sparse makes dense or leaves sparse.

    Attributes:
        sequence_fields: the record fields that `build` reads beside those of the schedule.
        options: the options that hold.
    """

    sequence_fields: ClassVar[frozenset[str]]

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.options = options_of(self.spec)
        gated = self.options.start_step > 0 or self.options.end_step > 0
        self.reads = self.sequence_fields | ({"step", "num_steps"} if gated else set())

    @property
    def group_key(self) -> object:
        """Layers that are skipped share a product, and so do those that are not."""
        return self.calibration, self._is_skipped

    @property
    def _is_skipped(self) -> bool | None:
        """Whether skip_layers names this layer; None where it should be asked for a number and has none.

        Without the option the number is not looked at: compiled code would be one frame for each layer.
        """
        if not self.options.skip_layers:
            return False
        return None if self.layer_index is None else self.layer_index in self.options.skip_layers

    def scheduled_dense_reason(self, record: AttentionMetadata) -> str | None:
        """The first option that asks for dense attention, None where none does. No step is named: it is told once."""
        options, step, steps = self.options, record.step, record.num_steps
        if options.sparsity == 0:
            return "block_sparse.sparsity is 0"
        if self._is_skipped:
            return f"the layer is one of block_sparse.skip_layers {', '.join(map(str, options.skip_layers))}"
        if step is not None and step < options.start_step:
            return f"steps before block_sparse.start_step {options.start_step} are dense"
        if step is not None and steps is not None and step >= steps - options.end_step:
            return f"the last {options.end_step} of {steps} steps are dense (block_sparse.end_step)"
        return None

    def unapplied(self, record: AttentionMetadata) -> tuple[str, ...]:
        """Options that record or layer say too little for, each with the reason."""
        reasons = {
            "skip_layers": self._is_skipped is None and "the layer's prefix holds no number",
            "start_step": self.options.start_step > 0 and record.step is None and "the record states no step",
            "end_step": self.options.end_step > 0
            and None in (record.step, record.num_steps)
            and "the record states no step of num_steps",
        }
        return tuple(f"{name} is not applied: {why}" for name, why in reasons.items() if why)
