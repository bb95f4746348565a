"""`omni-attn check`: every problem of every file at once, each with its place; no hardware needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.facts.kv_cache import AttentionCGSupport
from tests.cli.conftest import EXAMPLES, Cli

Write = Callable[..., Path]


def test_examples_are_good(cli: Cli) -> None:
    files = sorted(EXAMPLES.glob("*.yaml"))
    assert {file.stem for file in files} >= {"wan_tiny", "wan_480p", "two_roles", "fastwan_vsa"}
    result = cli("check", "--model", *files)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [f"{file}: good" for file in files]


def test_all_problems_of_all_files(cli: Cli, pipeline: Write) -> None:
    first = pipeline("{per_role: {self: {backnd: X}}, defualt: TORCH_SDPA}", "first.yaml")
    second = pipeline("{default: {backend: TORCH_SDPA, topk: 3}}", "second.yaml")
    good = pipeline("{}", "good.yaml")
    result = cli("check", first, second, good)
    assert result.exit_code == 2
    assert result.stdout == f"{good}: good\n"
    assert f"{first}:5: attention.per_role.self.backnd: " in result.stderr
    assert "'backend'" in result.stderr
    assert f"{first}:5: attention.defualt: " in result.stderr
    assert f"{second}:5: attention.default.topk: " in result.stderr


def test_unregistered_backends_are_named_with_the_nearest(cli: Cli, pipeline: Write) -> None:
    file = pipeline("{default: FLASH_ATN, per_role: {self: {backend: SDPA, fallback: [MINE]}}}")
    result = cli("check", file)
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert first.startswith(f"{file}:5: attention.default.backend: ")
    assert "'FLASH_ATN'" in first
    assert "Did you mean FLASH_ATTN?" in first
    assert second.startswith(f"{file}:5: attention.per_role.self.fallback.0.backend: ")
    assert "'MINE'" in second


def test_a_folder_is_one_problem_of_several(cli: Cli, pipeline: Write, tmp_path: Path) -> None:
    good = pipeline()
    result = cli("check", tmp_path, good, "none.yaml")
    assert (result.exit_code, result.stdout) == (2, f"{good}: good\n")
    assert result.stderr.splitlines() == [
        f"{tmp_path}: is a folder; name a file",
        "none.yaml: there is no such file",
    ]


def test_dtype_of_tuned_for_is_checked(cli: Cli, pipeline: Write) -> None:
    file = pipeline()
    section = "tuned_for:\n  capability: cpu\n  dtype: flot32\n"
    file.write_text(file.read_text(encoding="utf-8") + section, encoding="utf-8")
    result = cli("check", file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{file}:8: tuned_for.dtype: 'flot32' is not a dtype")
    assert "Did you mean 'float32'?" in result.stderr


def test_overrides_are_checked_too(cli: Cli, pipeline: Write) -> None:
    result = cli("check", pipeline(), "--set", "attention.default=NOPE")
    assert result.exit_code == 2
    assert "--set attention.default=NOPE: " in result.stderr


def test_model_names_the_roles_that_exist(cli: Cli, pipeline: Write) -> None:
    file = pipeline("{per_role: {crss: TORCH_SDPA}}")
    assert cli("check", file).exit_code == 0
    result = cli("check", "--model", file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{file}:5: attention.per_role.crss: ")
    assert "Did you mean 'cross'?" in result.stderr
    assert "Roles: self, cross." in result.stderr


def test_model_lists_every_refused_role(cli: Cli, pipeline: Write) -> None:
    file = pipeline("{per_role: {self: FLASH_ATTN, cross: CUDNN_ATTN}}")
    result = cli("check", "--model", file, "--assume", "cpu")
    assert result.exit_code == 2
    assert 'role "self": FLASH_ATTN' in result.stderr
    assert 'role "cross": CUDNN_ATTN' in result.stderr
    assert "needs a cuda device" in result.stderr


def test_model_for_a_machine_that_is_not_here(cli: Cli, pipeline: Write) -> None:
    file = pipeline("{per_role: {self: FLASH_ATTN}}")
    result = cli("check", "--model", file, "--assume", "sm_90", "--packages", "fa3-fwd=0.0.3")
    assert (result.exit_code, result.stdout) == (0, f"{file}: good\n")


@pytest.mark.parametrize("option", [("--assume", "sm_90"), ("--packages", "a=1"), ("--cudnn", "91900")])
def test_a_device_without_model_is_a_mistake(cli: Cli, pipeline: Write, option: tuple[str, str]) -> None:
    result = cli("check", pipeline(), *option)
    assert result.exit_code == 2
    assert "Add --model." in result.stderr


def test_the_environment_has_no_part_in_a_file(
    cli: Cli, pipeline: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_ATTN_BACKEND", "NOPE")
    assert cli("check", pipeline()).exit_code == 0


def test_model_refuses_what_a_distilled_checkpoint_cannot_be_asked_for(cli: Cli) -> None:
    file = EXAMPLES / "fastwan_vsa.yaml"
    asked = {"generation.num_inference_steps=50": "50", "generation.guidance_scale=5": "guidance_scale is 5"}
    for override, text in asked.items():
        result = cli("check", "--model", file, "--set", override)
        assert result.exit_code == 2
        assert text in result.stderr and "fastwan-tiny" in result.stderr


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "generation.num_frames=4097",
            "1025 latent frames, and rope_max_seq_len is 1024. Ask for at most 4093.",
        ),
        (
            "generation.prompt=a fox",
            "generation.prompt: causal-wan-tiny is a preset, and presets have no text",
        ),
        ("kv_cache.layout=HND", "kv_cache.layout HND does not satisfy every backend"),
        ("cudagraph_mode=FULL", "CUDAGraphMode.FULL is not supported with TORCH_SDPA"),
    ],
)
def test_model_refuses_what_a_stream_cannot_be_run_with(
    cli: Cli, override: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = TorchSDPABackend.get_cache_facts()
    narrow = replace(facts, layouts=("NHD",), cudagraph=AttentionCGSupport.NEVER)
    monkeypatch.setattr(TorchSDPABackend, "get_cache_facts", lambda *_: narrow)
    file = EXAMPLES / "causal_wan_tiny.yaml"
    result = cli("check", "--model", file, "--set", override)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{file}: ") and text in result.stderr, result.stderr
