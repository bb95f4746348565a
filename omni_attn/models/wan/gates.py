"""Gates of video sparse attention in a checkpoint: in every block or in none; and runs that leave them out.

A gate is a Linear of each self-attention, `to_gate_compress`, which weighs the coarse output of video sparse attention.
Only weights tell whether a checkpoint has them: no config.json does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import first_names
from omni_attn.models.wan.block import WanSelfAttention
from omni_attn.models.wan.config import WanConfig


def is_gate(name: str) -> bool:
    """Whether a weight of this name, in any spelling, belongs to a gate."""
    return ".to_gate_compress." in name


def has_gates(names: Iterable[str]) -> bool:
    """Whether a checkpoint with weights of these names, in any spelling, has gates."""
    return any(map(is_gate, names))


def check_gates(config: WanConfig, names: Collection[str], source: str) -> None:
    """Nothing if there are gates in all blocks of this model, whole, or in none.

    Args:
        config: the model.
        names: of all weights, in the model's spelling.
        source: where they come from, for the error text.

    Raises:
        ConfigError: some are missing; the text names them.
    """
    if not has_gates(names):
        return
    wanted = [
        f"blocks.{block}.attn1.to_gate_compress.{kind}"
        for block in range(config.num_layers)
        for kind in ("weight", "bias")
    ]
    if missing := [name for name in wanted if name not in names]:
        raise ConfigError(
            f"{source}: gates of video sparse attention are there in part: of {len(wanted)} weights {len(missing)} are "
            f"missing: {first_names(missing)}. A model has gates in each of its {config.num_layers} "
            "blocks or in none; fetch or save the checkpoint again."
        )


def unread_gates_note(model: nn.Module) -> tuple[str, ...]:
    """A note if the model has gates that no backend of its self-attention reads, else nothing."""
    gated = [
        module
        for module in model.modules()
        if isinstance(module, WanSelfAttention) and module.to_gate_compress is not None
    ]
    idle = [layer.attention for layer in gated if not layer.attention.reads("gate_compress")]
    if not idle:
        return ()
    return (
        f"gates: {len(idle)} of {len(gated)} layers leave out to_gate_compress, which {idle[0].route} does not read, "
        "so the result is not what the model was made for; FASTVIDEO_VSA for role self reads them",
    )
