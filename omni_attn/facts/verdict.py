"""The answer for one candidate: accepted, or rejected with reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What was found for one candidate backend.

    Attributes:
        backend: public name.
        class_path: qualified path of the class that was judged.
        variant: the variant that would run, or the one that alone was judged; else None.
        reasons: why it cannot run, each "needs X, found Y"; empty = accepted.
        index: position in the person's own list (0 = the spec itself, 1 = its first fallback, ...), or in the
            platform's default order.
    """

    backend: str
    class_path: str
    variant: str | None = None
    reasons: tuple[str, ...] = ()
    index: int = 0

    @property
    def accepted(self) -> bool:
        return not self.reasons

    @property
    def label(self) -> str:
        """Backend and variant in one word: "FLASH_ATTN (fa3)"."""
        return f"{self.backend} ({self.variant})" if self.variant else self.backend

    def __str__(self) -> str:
        return f"{self.label}: " + ("accepted" if self.accepted else "; ".join(self.reasons))

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON: backend, accepted, reasons."""
        return {"backend": self.backend, "accepted": self.accepted, "reasons": list(self.reasons)}
