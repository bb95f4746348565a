"""Gates of video sparse attention in Wan checkpoints (FastWan): one per block, with a bias."""

from __future__ import annotations

from collections.abc import Collection

from omni_attn.models.gates import GATE, check_gate_names
from omni_attn.models.wan.config import WanConfig


def check_gates(config: WanConfig, names: Collection[str], source: str) -> None:
    """Nothing if there are gates in all blocks of this model, whole, or in none.

    Args:
        config: the model.
        names: of all weights, in the model's spelling.
        source: where they come from, for the error text.

    Raises:
        ConfigError: some are missing; the text names them.
    """
    wanted = [
        f"blocks.{block}.attn1.{GATE}.{kind}"
        for block in range(config.num_layers)
        for kind in ("weight", "bias")
    ]
    check_gate_names(wanted, names, config.num_layers, source)
