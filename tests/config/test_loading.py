"""Every source loads, and whatever is wrong comes out at once with file, line, key path and the nearest key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_attn.config import AttentionConfig, PipelineConfig, load_config, load_pipeline
from omni_attn.errors import ConfigError

SECTION = {"default": "SDPA", "per_role": {"self": {"backend": "VSA", "fastvideo_vsa_topk": 8}}}
YAML = "default: SDPA\nper_role:\n  self: {backend: VSA, fastvideo_vsa_topk: 8}\n"
PIPELINE = {"pipeline": "wan", "model": "wan-tiny", "attention": SECTION}


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str, name: str = "wan.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return name


def pipeline_problems(folder: Path, text: str, **arguments: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_pipeline(write(folder, text), environ={}, **arguments)
    return list(error.value.problems)


def test_every_source_of_a_section_agrees(cwd: Path) -> None:
    expected = AttentionConfig.model_validate(SECTION)
    name = write(cwd, YAML)
    for source in (SECTION, YAML, expected.model_dump_json(), name, Path(name), cwd / name, expected):
        assert load_config(source, environ={}) == expected


@pytest.mark.parametrize("name", ["sdpa", "TORCH_SDPA"])
def test_a_bare_name_is_a_default(cwd: Path, name: str) -> None:
    assert load_config(name, environ={}) == AttentionConfig.model_validate({"default": "TORCH_SDPA"})


def test_a_text_that_names_an_existing_file_is_a_path(cwd: Path) -> None:
    write(cwd, "default: CUDNN", name="SDPA")
    assert load_config("SDPA", environ={}) == AttentionConfig.model_validate({"default": "CUDNN"})


@pytest.mark.parametrize("text", ["{}", "auto", "# nothing chosen\n", "default:\nper_role:\n"])
def test_what_chooses_nothing(text: str) -> None:
    assert load_config(text, environ={}) == AttentionConfig()


def test_an_empty_file_chooses_nothing(cwd: Path) -> None:
    assert load_config(write(cwd, ""), environ={}) == AttentionConfig()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("absent.yaml", "absent.yaml: there is no such file"),
        ("folder/absent", "folder/absent: there is no such file"),
        ("ABSENT.JSON", "there is no such file"),
        (Path("absent"), "absent: there is no such file"),
        ("", "empty text"),
        ("  \n", "empty text"),
        ("FLASH ATTN", "line 1: default.backend: a backend name is one word"),
        ("3", "valid dictionary"),
        ("[SDPA]", "valid dictionary"),
        (3, "found int"),
        (None, "found NoneType"),
        ("x" * 5000, None),
        ("SDPA\x00", "special characters"),
        (PIPELINE, "use load_pipeline, or pass its `attention` section"),
        ("pipeline: wan\nmodel: wan-tiny\n", "line 1: this is a whole pipeline: use load_pipeline"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_sources_of_a_section_that_are_none(cwd: Path, source: Any, words: str | None) -> None:
    if words is None:  # too long for a path, but a legal name
        assert load_config(source, environ={}).default is not None
        return
    with pytest.raises(ConfigError) as error:
        load_config(source, environ={})
    assert words in str(error.value)


def test_the_error_text_of_the_issue(cwd: Path) -> None:
    text = "pipeline: wan\nmodel: wan-tiny\nattention:\n  per_role:\n    self:\n      backnd: FLASH_ATTN\n"
    assert pipeline_problems(cwd, text) == [
        "wan.yaml:6: attention.per_role.self.backnd: unknown key. Did you mean 'backend'?"
    ]


def test_all_problems_of_a_file_come_together(cwd: Path) -> None:
    text = """\
pipeline: wam
modle: wan-tiny
attention:
  default: {backend: FLASH_ATTN, skip_softmax: {threshold: 1}}
  per_role:
    self:
      backend: VSA
      fastvideo_vsa_topk: "64"
    ltx2:
      audio.self: {backend: TRTLLM, quant: {dtype_qk: int4}}
    cross: {backend: SDPA, fallback: [CUDNN, {backend: 3}]}
generation:
  height: 481
  num_frames: 80
  seed: -1
dtype: bf16
"""
    assert pipeline_problems(cwd, text, overrides=["generation.sede=3", "nonsense"]) == [
        "--set nonsense: write KEY=VALUE, for example generation.seed=3",
        "--set generation.sede=3: generation.sede: unknown key. Did you mean 'seed'?",
        "wan.yaml:1: pipeline: unknown pipeline 'wam'. Did you mean 'wan'? Known: wan, wan_causal, minimax_h3",
        "wan.yaml:1: model: this key is required",
        "wan.yaml:2: modle: unknown key. Did you mean 'model'?",
        "wan.yaml:4: attention.default.skip_softmax: skip_softmax is only supported by the TRTLLM_ATTN backend, "
        "not by FLASH_ATTN",
        "wan.yaml:8: attention.per_role.self.fastvideo_vsa_topk: input should be a valid integer, found '64'",
        "wan.yaml:10: attention.per_role.ltx2.audio.self.quant.dtype_qk: input should be 'float16', 'bfloat16', "
        "'int8' or 'fp8_e4m3', found 'int4'",
        "wan.yaml:11: attention.per_role.cross.fallback.1.backend: a backend is named by text, found 3",
        "wan.yaml:13: generation.height: must be a positive multiple of 16, found 481. Nearest: 480 or 496",
        "wan.yaml:14: generation.num_frames: must be 1 more than a multiple of 4, found 80. Nearest: 77 or 81",
        "wan.yaml:15: generation.seed: input should be greater than or equal to 0, found -1",
        "wan.yaml:16: dtype: input should be 'auto', 'bfloat16', 'float16' or 'float32', found 'bf16'",
    ]


def test_text_and_mappings_have_no_file_but_paths() -> None:
    with pytest.raises(ConfigError) as error:
        load_config("default: SDPA\nper_role:\n  self: {backend: SDPA, varient: x}\n", environ={})
    assert str(error.value) == "line 3: per_role.self.varient: unknown key. Did you mean 'variant'?"
    with pytest.raises(ConfigError) as error:
        load_config({"per_role": {"a.b": {"backend": "SDPA", "varient": "x"}}}, environ={})
    assert str(error.value) == "per_role.a.b.varient: unknown key. Did you mean 'variant'?"


def test_a_key_given_twice_names_its_line(cwd: Path) -> None:
    text = "pipeline: wan\nmodel: wan-tiny\nattention:\n  per_role:\n    self: SDPA\n    self: CUDNN\n"
    assert pipeline_problems(cwd, text) == ["wan.yaml:6: attention.per_role.self: the key is given twice"]


def test_a_role_given_twice_names_the_second_line(cwd: Path) -> None:
    text = "per_role:\n  a.b: SDPA\n  a:\n    b: {backend: CUDNN}\n"
    with pytest.raises(ConfigError, match=r"^wan.yaml:4: per_role.a.b: role 'a.b' is given twice"):
        load_config(write(cwd, text), environ={})


def test_long_values_are_cut(cwd: Path) -> None:
    (problem,) = pipeline_problems(cwd, f"pipeline: wan\nmodel: wan-tiny\ndtype: {'x' * 300}\n")
    assert len(problem) < 200
    assert problem.endswith("...")


def test_every_source_of_a_pipeline_agrees(cwd: Path) -> None:
    expected = PipelineConfig.model_validate(PIPELINE)
    text = "pipeline: wan\nmodel: wan-tiny\nattention:\n" + "".join(
        f"  {line}\n" for line in YAML.splitlines()
    )
    name = write(cwd, text)
    for source in (PIPELINE, text, expected.model_dump_json(), name, Path(name), expected.model_dump()):
        assert load_pipeline(source, environ={}) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("absent.yaml", "there is no such file"),
        ("wan-tiny", "a pipeline is a mapping of keys, found 'wan-tiny'"),
        ("[1]", "a pipeline is a mapping of keys"),
        ("{}", "pipeline: this key is required"),
        ("# empty", "model: this key is required"),
    ],
)
def test_sources_of_a_pipeline_that_are_none(cwd: Path, source: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_pipeline(source, environ={})
    assert words in str(error.value)
