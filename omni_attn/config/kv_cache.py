"""How a model keeps keys and values of earlier tokens, for families that do."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from omni_attn.config.base import ConfigModel, PositiveInt, Text
from omni_attn.config.names import nearest

LAYOUTS = ("auto", "NHD", "HND")
CACHE_DTYPES = ("auto", "fp8_e4m3")
CUDAGRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def _one_of(names: tuple[str, ...], what: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            near = nearest(value, names)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ValueError(f"Unknown {what} {value!r}.{hint} Known: {', '.join(names)}")
        return value

    return AfterValidator(check)


CUDAGraphModeName = Annotated[
    Text,
    Field(json_schema_extra={"enum": list(CUDAGRAPH_MODES)}),
    _one_of(CUDAGRAPH_MODES, "CUDA graph mode"),
]


class KVCacheConfig(ConfigModel):
    """Layout, dtype and page size of the KV cache."""

    layout: Annotated[
        Text, Field(json_schema_extra={"enum": list(LAYOUTS)}), _one_of(LAYOUTS, "KV cache layout")
    ] = "auto"
    """Order in memory: `NHD`, a page's tokens one behind the other, `HND`, head by head, or what backends prefer."""
    dtype: Annotated[
        Text, Field(json_schema_extra={"enum": list(CACHE_DTYPES)}), _one_of(CACHE_DTYPES, "KV cache dtype")
    ] = "auto"
    """What is stored: `auto` for the model's own dtype, or `fp8_e4m3`."""
    block_size: PositiveInt | None = None
    """Tokens of a page; null leaves it to the model and the backends."""
