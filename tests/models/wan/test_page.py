"""docs/wan.md names every preset and shows what the example says."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from omni_attn.models.wan.presets import WAN_PRESETS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "wan.md").read_text(encoding="utf-8")


def test_every_preset_is_on_the_page() -> None:
    rows = "".join(line for line in PAGE.splitlines() if line.startswith("|"))
    assert set(re.findall(r"`((?:fast)?wan[^`]*)`", rows)) == WAN_PRESETS.keys()


def test_the_shown_choice_is_that_of_the_example() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    example = yaml.safe_load((ROOT / "examples" / "fastwan_vsa.yaml").read_text(encoding="utf-8"))
    assert yaml.safe_load(shown)["attention"] == example["attention"]
