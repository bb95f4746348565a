"""What a tuned pipeline file says about the machine it was measured on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, PlainSerializer

from omni_attn.config.base import SEQUENCE, ConfigModel, PositiveInt, Text
from omni_attn.config.names import nearest
from omni_attn.frozen import FrozenMapping

Lengths = Annotated[tuple[PositiveInt, PositiveInt], SEQUENCE]

# What models run in, and so what `omni-attn tune` can have measured; "auto" was resolved there.
DTYPES = ("bfloat16", "float16", "float32")


def _dtype_name(name: str) -> str:
    if name not in DTYPES:
        near = nearest(name, DTYPES)
        hint = f" Did you mean {near!r}?" if near else ""
        raise ValueError(f"{name!r} is not a dtype that models run in.{hint} Valid: {', '.join(DTYPES)}")
    return name


class TunedFor(ConfigModel):
    """Where `omni-attn tune` measured. It chooses nothing: wherever something differs, the commands say so."""

    device: Text | None = None
    """Product name of the device, such as `NVIDIA H200`."""
    capability: Text
    """Short label of its architecture, such as `sm_90`, `gfx942` or `cpu`."""
    torch: Text | None = None
    """Version of torch."""
    cudnn: Text | None = None
    """Version of cuDNN, null where there is none."""
    packages: Annotated[
        Mapping[str, Text], AfterValidator(FrozenMapping), PlainSerializer(dict, return_type=dict[str, str])
    ] = Field(default_factory=FrozenMapping)
    """Kernel packages that were installed, and their versions."""
    dtype: (
        Annotated[Text, Field(json_schema_extra={"enum": list(DTYPES)}), AfterValidator(_dtype_name)] | None
    ) = None
    """Type that was computed in."""
    lengths: Annotated[
        Mapping[str, Lengths],
        AfterValidator(FrozenMapping),
        PlainSerializer(dict, return_type=dict[str, tuple[int, int]]),
    ] = Field(default_factory=FrozenMapping)
    """Role to (query tokens, key tokens) that were measured."""

    def __str__(self) -> str:
        return self.capability if self.device is None else f"{self.device} ({self.capability})"

    def differences(self, here: TunedFor) -> tuple[str, ...]:
        """What is not as it was measured, each "X then, Y here"; what one side does not know is passed over."""
        return tuple(self._differences(here))

    def _differences(self, here: TunedFor) -> Iterator[str]:
        named = None not in (self.device, here.device)
        if self.capability != here.capability or (named and self.device != here.device):
            yield f"device {self} then, {here} here"
        for name in ("torch", "cudnn", "dtype"):
            then, now = getattr(self, name), getattr(here, name)
            if None not in (then, now) and then != now:
                yield f"{name} {then} then, {now} here"
        for package in sorted({*self.packages, *here.packages}):
            then, now = (side.packages.get(package, "not installed") for side in (self, here))
            if then != now:
                yield f"{package} {then} then, {now} here"
        for role, (queries, keys) in self.lengths.items():
            now = here.lengths.get(role)
            if now is not None and now != (queries, keys):
                yield f'role "{role}" {queries} x {keys} tokens then, {now[0]} x {now[1]} here'
