"""The named shapes: attention calls of diffusion transformers, and small ones that any machine runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omni_attn.config.names import nearest
from omni_attn.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention call of a model.

    Attributes:
        name: how the command line calls it.
        batch, queries, keys, heads, head_size: its sizes.
        role: the label of the call in the model.
        kept_keys: keys that a [B, K] padding mask leaves in sight; None = no mask.
        grid: the (T, H, W) token grid where the sequence is a whole video, else None.
    """

    name: str
    batch: int
    queries: int
    keys: int
    heads: int
    head_size: int
    role: str = "self"
    kept_keys: int | None = None
    grid: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        masked = "" if self.kept_keys is None else f", {self.kept_keys} keys kept"
        tokens = f"{self.queries} x {self.keys} tokens{masked}"
        return f"batch {self.batch}, {tokens}, {self.heads} heads of {self.head_size}"


def _video(
    name: str, grid: tuple[int, int, int], *, heads: int, text: int = 0, kept: int = 0, head_size: int = 128
) -> Shape:
    """Attention over a whole video; with text behind it, of which `kept` tokens are real, it is joint and masked."""
    tokens = grid[0] * grid[1] * grid[2]
    return Shape(
        name=name,
        batch=1,
        queries=tokens + text,
        keys=tokens + text,
        heads=heads,
        head_size=head_size,
        role="joint" if text else "self",
        kept_keys=tokens + kept if text else None,
        grid=None if text else grid,
    )


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(name="flux-1024", batch=1, queries=4608, keys=4608, head_size=128, role="joint", heads=24),
        Shape(name="sd3-1024", batch=2, queries=4250, keys=4250, head_size=64, role="joint", heads=24),
        _video("wan-1.3b-480p", (21, 30, 52), heads=12),
        Shape(
            name="wan-14b-480p-cross", batch=1, queries=32760, keys=512, heads=40, head_size=128, role="cross"
        ),
        _video("wan-14b-720p", (21, 45, 80), heads=40),
        _video("wan2.2-5b-720p", (31, 22, 40), heads=24),
        _video("hunyuanvideo-720p", (33, 45, 80), heads=24),
        _video("hunyuanvideo-720p-padded", (33, 45, 80), heads=24, text=256, kept=40),
        Shape(name="minimax-h3-5s", batch=1, queries=37740, keys=37740, heads=56, head_size=128),
        _video("ltx-512p", (13, 16, 24), heads=32, head_size=64),
        _video("tiny", (4, 8, 8), heads=4, head_size=64),
        Shape(name="tiny-cross", batch=1, queries=256, keys=64, heads=4, head_size=64, role="cross"),
        _video("tiny-padded", (4, 8, 8), heads=4, head_size=64, text=64, kept=10),
    )
}
"""By name, in the order in which they are measured."""

SMALL = tuple(name for name in SHAPES if name.startswith("tiny"))
"""What a machine without an accelerator measures unless it is told otherwise."""
LARGE = tuple(name for name in SHAPES if name not in SMALL)


def shapes_named(names: Iterable[str]) -> tuple[Shape, ...]:
    """The shapes of these names, in the order given.

    Raises:
        ConfigError: names that are none; all of them, each with the nearest.
    """
    problems, found = [], []
    for name in names:
        if name in SHAPES:
            found.append(SHAPES[name])
            continue
        near = nearest(name, SHAPES)
        hint = f" Did you mean {near}?" if near else ""
        problems.append(f"shape {name!r} is not a named shape.{hint} Shapes: {', '.join(SHAPES)}.")
    if problems:
        raise ConfigError(*problems)
    return tuple(found)
