"""`parallel`: strict, set from the command line, and refused where it cannot be before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from omni_attn.config import ParallelConfig, PipelineConfig, load_pipeline
from omni_attn.config.families import FAMILIES
from omni_attn.config.parallel import DEGREES
from omni_attn.errors import ConfigError

WITHOUT = [name for name, kind in FAMILIES.items() if not kind.splits_sequence]
TEXT = "pipeline: wan\nmodel: wan-tiny\n"


def test_a_file_without_the_section_is_one_process() -> None:
    for text in (TEXT, f"{TEXT}parallel:\n  # ulysses_degree: 2\n", f"{TEXT}parallel: {{}}\n"):
        config = load_pipeline(text, environ={})
        assert config.parallel == ParallelConfig()
        assert (config.parallel.size, config.parallel.mode) == (1, None)


def test_the_section_and_its_overrides() -> None:
    text = f"{TEXT}parallel: {{ulysses_degree: 2, ring_degree: 3}}\n"
    config = load_pipeline(text, environ={})
    assert (config.parallel.size, config.parallel.mode) == (6, "ulysses_ring")
    changed = load_pipeline(text, overrides=["parallel.ulysses_degree=1"], environ={}).parallel
    assert (changed.size, changed.mode) == (3, "ring")
    added = load_pipeline(TEXT, overrides=["parallel.allgather_degree=4"], environ={}).parallel
    assert (added.size, added.mode) == (4, "allgather_kv")
    assert load_pipeline(text, overrides=["parallel=null"], environ={}).parallel == ParallelConfig()


@pytest.mark.parametrize(
    ("section", "path", "text"),
    [
        ({"ulyses_degree": 2}, "parallel.ulyses_degree", "Did you mean 'ulysses_degree'?"),
        ({"ulysses_degree": 0}, "parallel.ulysses_degree", "greater than or equal to 1"),
        ({"ring_degree": True}, "parallel.ring_degree", "valid integer"),
        ({"ring_degree": "2"}, "parallel.ring_degree", "valid integer"),
        ({"uneven_heads": "pad"}, "parallel.uneven_heads", "'spread' or 'refuse'"),
        ({"allgather_degree": 2, "ring_degree": 2}, "parallel", "allgather_degree is 2 beside"),
        ({"symmetric_memory": True}, "parallel", "symmetric_memory is true with one process"),
        ({"symmetric_memory": True, "allgather_degree": 2}, "parallel", "with allgather_degree 2"),
        ({"symmetric_memory": "no", "ring_degree": 2}, "parallel.symmetric_memory", "valid boolean"),
        (2, "parallel", "valid dictionary"),
    ],
)
def test_problems_have_their_place(section: Any, path: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_pipeline({"pipeline": "wan", "model": "wan-tiny", "parallel": section}, environ={})
    (problem,) = refused.value.problems
    assert path in problem and text in problem


@pytest.mark.parametrize("family", WITHOUT)
def test_a_family_that_runs_in_one_process_says_so(family: str) -> None:
    asked = {"pipeline": family, "model": "m", "parallel": {"ring_degree": 2}}
    with pytest.raises(
        ConfigError, match=rf"ring_degree 2 was asked for, and models of pipeline {family} run in"
    ):
        load_pipeline(asked, environ={})
    single = {**asked, "parallel": {"ring_degree": 1, "timeout_seconds": 5}}
    assert load_pipeline(single, environ={}).parallel.timeout_seconds == 5
    rules = {
        rule["if"]["properties"]["pipeline"]["const"]: rule["then"]["properties"]
        for rule in PipelineConfig.model_json_schema()["allOf"]
    }
    assert rules[family]["parallel"] == {"properties": {degree: {"const": 1} for degree in DEGREES}}
    assert not any("parallel" in rules[name] for name in set(FAMILIES) - set(WITHOUT))


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1", "mps"])
def test_one_device_for_several_processes_is_refused(device: str) -> None:
    asked: dict[str, Any] = {"pipeline": "wan", "model": "wan-tiny", "device": device}
    with pytest.raises(ConfigError, match=rf"2 processes were asked for, and device: {device} is one place"):
        load_pipeline({**asked, "parallel": {"ulysses_degree": 2}}, environ={})
    assert load_pipeline({**asked, "parallel": {"ulysses_degree": 1}}, environ={}).device == device


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
def test_each_process_takes_its_own_device(device: str) -> None:
    asked = {"pipeline": "wan", "model": "wan-tiny", "device": device, "parallel": {"ulysses_degree": 2}}
    assert load_pipeline(asked, environ={}).parallel.size == 2
