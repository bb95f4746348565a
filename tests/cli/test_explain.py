"""`omni-attn explain`: verdicts for every role, here or on an assumed machine, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_attn.cli.target import parse_cudnn
from tests.cli.conftest import EXAMPLES, Cli

Write = Callable[..., Path]
HOPPER = ("--assume", "sm_90", "--packages", "fa3-fwd=0.0.3", "--cudnn", "91900")


def explained(cli: Cli, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    result = cli("explain", *arguments, "--json")
    assert result.exit_code == exit_code, result.stderr
    return json.loads(result.stdout)


def by_role(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {role["role"]: role for role in answer["roles"]}


def test_json_has_the_documented_shape(cli: Cli) -> None:
    answer = explained(cli, EXAMPLES / "wan_480p.yaml", *HOPPER)
    assert answer["device"]["kind"] == "cuda"
    assert answer["device"]["name"] == "sm_90"
    assert answer["device"]["packages"] == {"fa3-fwd": "0.0.3"}
    assert answer["dtype"] == "bfloat16"
    assert list(by_role(answer)) == ["self", "cross"]
    for role in answer["roles"]:
        assert role["role_category"] == role["role"]
        assert role["layers"] == 30
        assert role["source"] == "platform default"
        assert role["spec"] is None
        for verdict in role["verdicts"]:
            assert set(verdict) >= {"backend", "accepted", "reasons"}
            assert verdict["accepted"] == (not verdict["reasons"])


def test_hopper_chooses_by_length(cli: Cli) -> None:
    """FlashAttention 3 leads at every length, version 4 only where there are many keys."""
    version_3, version_4, cudnn = ("FLASH_ATTN", "fa3"), ("FLASH_ATTN", "fa4"), ("CUDNN_ATTN", None)
    for package, expected in (
        ("fa3-fwd=0.0.3", (version_3, version_3)),
        ("flash-attn-4=4.0.0b36", (version_4, cudnn)),
    ):
        arguments = ("--assume", "sm_90", "--packages", package, "--cudnn", "91900")
        roles = by_role(explained(cli, EXAMPLES / "wan_480p.yaml", *arguments))
        found = tuple((roles[role]["backend"], roles[role]["variant"]) for role in ("self", "cross"))
        assert found == expected


@pytest.mark.parametrize("packages", [(), ("--packages", "")])
def test_no_packages_means_none(cli: Cli, packages: tuple[str, ...]) -> None:
    roles = by_role(explained(cli, EXAMPLES / "wan_480p.yaml", "--assume", "sm_90", *packages))
    assert roles["self"]["backend"] == "TORCH_SDPA"
    flash, cudnn = (
        next(v for v in roles["self"]["verdicts"] if v["backend"] == name)
        for name in ("FLASH_ATTN", "CUDNN_ATTN")
    )
    assert "fa3-fwd" in " ".join(flash["reasons"])
    assert "cuDNN" in " ".join(cudnn["reasons"])


def test_dtype_and_device_follow_the_assumed_device(cli: Cli, pipeline: Write) -> None:
    assert explained(cli, pipeline(), "--assume", "cpu")["dtype"] == "float32"
    for device, kind in (("sm_90", "cuda"), ("gfx942", "rocm"), ("mps", "mps"), ("npu", "npu")):
        answer = explained(cli, pipeline(), "--assume", device)
        assert (answer["device"]["kind"], answer["dtype"]) == (kind, "bfloat16")
    assert explained(cli, pipeline(), "--assume", "sm_90", "--set", "dtype=float16")["dtype"] == "float16"


def test_a_device_of_another_kind_is_a_contradiction(cli: Cli, pipeline: Write) -> None:
    result = cli("explain", pipeline(), "--assume", "sm_90", "--set", "device=cpu")
    assert result.exit_code == 2
    assert "device: cpu" in result.stderr
    assert cli("explain", pipeline(), "--assume", "sm_90", "--set", "device=cuda:3").exit_code == 0


def test_overrides(cli: Cli, pipeline: Write) -> None:
    answer = explained(
        cli,
        pipeline("{default: TORCH_SDPA}"),
        *HOPPER,
        *("--set", "attention.per_role.cross.backend=CUDNN_ATTN"),
        *("--set", "attention.default=null"),
    )
    roles = by_role(answer)
    assert (roles["cross"]["backend"], roles["cross"]["source"]) == ("CUDNN_ATTN", "per_role['cross']")
    assert roles["cross"]["spec"] == {"backend": "CUDNN_ATTN", "fallback": []}
    assert roles["self"]["source"] == "platform default"


def test_every_refused_role_at_once(cli: Cli, pipeline: Write) -> None:
    file = pipeline(
        "{per_role: {self: {backend: FLASH_ATTN, fallback: [CUDNN_ATTN]}, cross: {backend: MINE}}}"
    )
    answer = explained(cli, file, "--assume", "cpu", exit_code=2)
    roles = by_role(answer)
    assert (roles["self"]["backend"], roles["cross"]["backend"]) == (None, None)
    assert [verdict["backend"] for verdict in roles["self"]["verdicts"]] == ["FLASH_ATTN", "CUDNN_ATTN"]
    assert not any(verdict["accepted"] for role in answer["roles"] for verdict in role["verdicts"])
    result = cli("explain", file, "--assume", "cpu")
    assert result.exit_code == 2
    assert 'role "self": FLASH_ATTN' in result.stderr
    assert "role \"cross\": unknown attention backend 'MINE'" in result.stderr
    assert "rejected" in result.stdout


def test_a_fallback_that_is_taken_shows_both_verdicts(cli: Cli, pipeline: Write) -> None:
    file = pipeline("{per_role: {self: {backend: FLASH_ATTN, fallback: [TORCH_SDPA]}}}")
    role = by_role(explained(cli, file, "--assume", "cpu"))["self"]
    assert role["backend"] == "TORCH_SDPA"
    assert [verdict["accepted"] for verdict in role["verdicts"]] == [False, True]


def test_the_environment_is_a_source(cli: Cli, pipeline: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_ATTN_BACKEND", "sdpa")
    roles = by_role(explained(cli, pipeline(), *HOPPER))
    assert {role["source"] for role in roles.values()} == {"env OMNI_ATTN_BACKEND"}


def test_a_piped_table_keeps_every_cell_on_its_line(cli: Cli) -> None:
    arguments = (EXAMPLES / "wan_480p.yaml", "--assume", "sm_100")
    result = cli("explain", *arguments)
    lines = result.stdout.splitlines()
    for role in explained(cli, *arguments)["roles"]:
        for verdict in role["verdicts"]:
            reasons = "; ".join(verdict["reasons"])
            assert any(verdict["backend"] in line and reasons in line for line in lines)
    assert any("self" in line and "platform default" in line and "per_role" not in line for line in lines)


def test_brackets_in_a_source_are_text(cli: Cli, pipeline: Write) -> None:
    result = cli("explain", pipeline("{per_role: {self: TORCH_SDPA}}"))
    assert "per_role['self']" in result.stdout


def test_a_role_without_a_layer_is_a_warning(cli: Cli, pipeline: Write) -> None:
    result = cli("explain", pipeline("{per_role: {slef: TORCH_SDPA}}"))
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: attention.per_role.slef: ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--assume", "sm90"), "Did you mean 'sm_90'?"),
        (("--packages", "fa3-fwd=0.0.3"), "Add --assume"),
        (("--cudnn", "91900"), "Add --assume"),
        (("--assume", "sm_90", "--packages", "fa3-fwd"), "'fa3-fwd' names no version. Write NAME=VERSION"),
        (("--assume", "sm_90", "--packages", "fa3-fwd="), "'fa3-fwd=' names no version. Write NAME=VERSION"),
        (
            ("--assume", "sm_90", "--packages", "fa3-fwd=abc"),
            "'fa3-fwd=abc': 'abc' is not a version. Write NAME=",
        ),
        (("--assume", "sm_90", "--packages", "=1"), "NAME=VERSION"),
        (("--assume", "sm_90", "--packages", "fa3-fwd=new"), "NAME=VERSION"),
        (
            ("--assume", "sm_90", "--cudnn", "new"),
            "--cudnn 'new': is not a cuDNN version. Write 9.19.0, or 91900",
        ),
        (("--assume", "sm_90", "--cudnn", "919"), "is not a cuDNN version"),
        (("--assume", "sm_90", "--cudnn", ""), "is not a cuDNN version"),
    ],
)
def test_mistakes_in_the_device(cli: Cli, pipeline: Write, arguments: tuple[str, ...], text: str) -> None:
    result = cli("explain", pipeline(), *arguments, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr


@pytest.mark.parametrize("version", ["91900", "9.19.0", "9.19"])
def test_cudnn_as_people_and_as_torch_write_it(cli: Cli, pipeline: Write, version: str) -> None:
    answer = explained(cli, pipeline(), "--assume", "sm_90", "--cudnn", version)
    assert answer["device"]["cudnn"] == 91900


def test_cudnn_before_version_9() -> None:
    assert (parse_cudnn("8.9.2"), parse_cudnn("8902")) == (8902, 8902)


def test_help_says_that_there_is_no_cudnn_unless_named(cli: Cli) -> None:
    text = " ".join(cli("explain", "--help").stdout.replace("│", " ").split())
    assert "9.19.0 or as torch writes it (91900). Without it: none." in text


@pytest.mark.parametrize("command", ["explain", "run"])
def test_a_folder_is_no_pipeline(cli: Cli, tmp_path: Path, command: str) -> None:
    result = cli(command, tmp_path)
    assert (result.exit_code, result.stderr) == (2, f"{tmp_path}: is a folder; name a file\n")


def test_package_names_are_spelled_as_the_index_does(cli: Cli, pipeline: Write) -> None:
    answer = explained(
        cli, pipeline(), "--assume", "sm_90", "--packages", " FA3_fwd=0.0.3 , flash.attn=2.8.3,"
    )
    assert answer["device"]["packages"] == {"fa3-fwd": "0.0.3", "flash-attn": "2.8.3"}


def test_a_package_that_no_backend_asks_for_is_a_warning(cli: Cli, pipeline: Write) -> None:
    result = cli("explain", pipeline(), "--assume", "sm_90", "--packages", "fa3=0.0.3", "--json")
    assert result.exit_code == 0
    assert "Did you mean fa3-fwd?" in result.stderr
    assert json.loads(result.stdout)["device"]["packages"] == {"fa3": "0.0.3"}
