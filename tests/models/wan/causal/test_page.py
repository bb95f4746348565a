"""docs/causal_wan.md: its file loads, its code runs, and it names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import yaml

from omni_attn.config import PipelineConfig, WanCausalGenerationConfig, WanRequest
from omni_attn.models.wan.causal.source import CAUSAL_PRESETS, CAUSAL_TIMESTEPS
from omni_attn.models.wan.presets import WAN_PRESETS

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "causal_wan.md").read_text(encoding="utf-8")


def test_the_shown_file_is_a_part_of_the_example() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    example = yaml.safe_load((ROOT / "examples" / "causal_wan_tiny.yaml").read_text(encoding="utf-8"))
    file = yaml.safe_load(shown)
    assert file["generation"].items() <= example["generation"].items()
    assert PipelineConfig.model_validate(file) == PipelineConfig.model_validate(
        {key: example[key] for key in file}
    )


def test_the_shown_code_runs() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(shown, names)
    chunk = names["chunk"]
    assert isinstance(chunk, torch.Tensor) and chunk.shape == (1, 16, 3, 16, 24)


def test_what_the_page_names() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", PAGE, flags=re.MULTILINE))
    fields = WanCausalGenerationConfig.model_fields
    own = {"num_inference_steps", "guidance_scale"} | (set(fields) - set(WanRequest.model_fields))
    assert rows.keys() == own
    for name, default in rows.items():
        assert yaml.safe_load(default) == fields[name].default
    assert set(re.findall(r"`(causal-wan[^`]*)`", PAGE)) == CAUSAL_PRESETS.keys() - WAN_PRESETS.keys()
    assert ", ".join(f"{timestep:g}" for timestep in CAUSAL_TIMESTEPS) in PAGE
