"""How the sequence of a model is split over processes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import StrictBool, model_validator

from omni_attn.config.base import ConfigModel, PositiveInt

Mode = Literal["ulysses", "ring", "ulysses_ring", "allgather_kv"]

DEGREES = ("ulysses_degree", "ring_degree", "allgather_degree")


class ParallelConfig(ConfigModel):
    """Degrees of sequence parallelism; their product is the number of processes."""

    ulysses_degree: PositiveInt = 1
    """Ranks that trade tokens for heads: each attends to the whole sequence with its share of the heads."""
    ring_degree: PositiveInt = 1
    """Ranks that hand keys and values round: each attends from its own tokens to all others, in turn."""
    allgather_degree: PositiveInt = 1
    """Ranks that gather all keys and values before attention; alone, without the two others."""
    uneven_heads: Literal["spread", "refuse"] = "spread"
    """Heads that ulysses_degree does not divide: some ranks get one more (`spread`), or an error (`refuse`)."""
    head_pieces: PositiveInt = 1
    """At most so many pieces of a rank's heads: one piece is exchanged while another attends; with Ulysses alone."""
    symmetric_memory: StrictBool | None = None
    """Whether Ulysses and rings exchange through one another's GPU memory; left out = where the GPUs allow it."""
    timeout_seconds: PositiveInt = 600
    """How long a rank waits for the others before it gives up."""

    @model_validator(mode="after")
    def _allgather_alone(self) -> Self:
        if self.allgather_degree > 1 and self.ulysses_degree * self.ring_degree > 1:
            raise ValueError(
                f"allgather_degree is {self.allgather_degree} beside ulysses_degree {self.ulysses_degree} and "
                f"ring_degree {self.ring_degree}: keys and values are gathered, or traded, or handed round. Set "
                "allgather_degree or the two others to 1"
            )
        return self

    @model_validator(mode="after")
    def _pieces_with_ulysses(self) -> Self:
        if self.head_pieces > 1 and (self.ulysses_degree == 1 or self.ring_degree > 1):
            raise ValueError(
                f"head_pieces is {self.head_pieces} with ulysses_degree {self.ulysses_degree} and ring_degree "
                f"{self.ring_degree}: heads are exchanged in pieces under Ulysses alone. Set ulysses_degree above "
                "1 and ring_degree to 1, or leave head_pieces out"
            )
        return self

    @model_validator(mode="after")
    def _memory_for_an_exchange(self) -> Self:
        if self.symmetric_memory and self.ulysses_degree * self.ring_degree == 1:
            raise ValueError(
                f"symmetric_memory is true with {self.describe()}: Ulysses and rings exchange through memory, and "
                "nothing else does. Set ulysses_degree or ring_degree above 1, or leave symmetric_memory out"
            )
        return self

    @property
    def size(self) -> int:
        """Processes that share one sequence."""
        return self.ulysses_degree * self.ring_degree * self.allgather_degree

    @property
    def mode(self) -> Mode | None:
        """What a layer's request states; None where nothing is split."""
        if self.allgather_degree > 1:
            return "allgather_kv"
        if self.ring_degree > 1:
            return "ring" if self.ulysses_degree == 1 else "ulysses_ring"
        return "ulysses" if self.ulysses_degree > 1 else None

    def describe(self) -> str:
        """The degrees above 1 in words: "ulysses_degree 2 x ring_degree 2"."""
        degrees = {name: getattr(self, name) for name in DEGREES}
        return (
            " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one process"
        )
