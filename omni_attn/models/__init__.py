"""Video diffusion transformers. A family is looked up by the name that a pipeline YAML gives it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from omni_attn.config.names import nearest
from omni_attn.errors import ConfigError

if TYPE_CHECKING:  # it imports torch, which a model's configuration does not need
    from omni_attn.models.family import ModelFamily

_FAMILIES = {
    "wan": "omni_attn.models.wan.family",
    "wan_causal": "omni_attn.models.wan.causal.family",
    "minimax_h3": "omni_attn.models.minimax_h3.family",
}


def get_family(name: str) -> ModelFamily:
    """The module that builds and runs pipelines of this family, imported only now.

    Raises:
        ConfigError: no family has this name; the text holds the nearest one and the list.
    """
    if name not in _FAMILIES:
        guess = nearest(name, list(_FAMILIES))
        hint = f"Did you mean {guess!r}? " if guess else ""
        raise ConfigError(
            f"pipeline: {name!r} is not a model family. {hint}Families: {', '.join(_FAMILIES)}."
        )
    return cast("ModelFamily", importlib.import_module(_FAMILIES[name]))
