"""The words of a configuration: backend names, their aliases, and which backend owns which option.

The table is complete from the start; a name enters `DiffusionAttentionBackendEnum` together with its backend.
A name that is not here is legal in a configuration, because a plugin may register it later.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from omni_attn.errors import ConfigError

KNOWN_NAMES: tuple[str, ...] = (
    "TORCH_SDPA",
    "CUDNN_ATTN",
    "FLASH_ATTN",
    "FLASHINFER_ATTN",
    "TRTLLM_ATTN",
    "FLEX_ATTN",
    "SAGE_ATTN",
    "SAGE_ATTN_3",
    "AITER_QUANT_ATTN",
    "FASTVIDEO_VSA",
    "RAINFUSION_ATTN",
    "BLOCK_SUMMARY_ATTN",
    "TRITON_ATTN",
)

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "SDPA": "TORCH_SDPA",
        "CUDNN": "CUDNN_ATTN",
        "FLASHINFER": "FLASHINFER_ATTN",
        "TRTLLM": "TRTLLM_ATTN",
        "SAGE": "SAGE_ATTN",
        "VSA": "FASTVIDEO_VSA",
    }
)

OPTION_OWNERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "quant": ("TRTLLM_ATTN", "FLASHINFER_ATTN"),
        "skip_softmax": ("TRTLLM_ATTN",),
        "block_sparse": ("RAINFUSION_ATTN", "BLOCK_SUMMARY_ATTN"),
        "fastvideo_vsa": ("FASTVIDEO_VSA",),
        "fastvideo_vsa_topk": ("FASTVIDEO_VSA",),
        "aiter_quant": ("AITER_QUANT_ATTN",),
    }
)
"""Fields of a spec that belong to some backends only. `options` is the reverse: it belongs to all others."""


def is_auto(value: object) -> bool:
    """Says whether `value` is the text `auto` in any case, which everywhere means "not set here"."""
    return isinstance(value, str) and value.lower() == "auto"


def canonical_name(text: object) -> str:
    """The one spelling of a backend name: upper case, aliases resolved. Unknown names pass.

    Raises:
        ConfigError: `text` is not text, is empty, or holds white space.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a backend is named by text, found {text!r}")
    if not text or any(character.isspace() for character in text):
        raise ConfigError(f"a backend name is one word without spaces, found {text!r}")
    name = text.upper()
    return ALIASES.get(name, name)


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice most like `word` in any case, or None when nothing is alike enough to be suggested."""
    spelled = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(word.casefold(), spelled, n=1, cutoff=cutoff)
    return spelled[close[0]] if close else None


def foreign_option(option: str, backend: str) -> str | None:
    """Why `backend` (a canonical name) may not carry `option`, or None when it may."""
    if option == "options":
        if backend not in KNOWN_NAMES:
            return None
        own = [name for name, owners in OPTION_OWNERS.items() if backend in owners]
        typed = f"its own fields are {', '.join(own)}" if own else "it has no options"
        return f"options is only for backends that are not built in; {backend} is built in and {typed}"
    owners = OPTION_OWNERS[option]
    if backend in owners:
        return None
    noun = "backend" if len(owners) == 1 else "backends"
    return f"{option} is only supported by the {' and '.join(owners)} {noun}, not by {backend}"
