"""`omni-attn doctor --verify`: 0 where every kernel is right, 1 where one is wrong."""

from __future__ import annotations

import json

from tests.cli.conftest import Cli
from tests.selection.stubs import PlainBackend, registered
from tests.tuning.stubs import CrashingBackend, WrongBackend, pair


def test_right_kernels_exit_0(cli: Cli) -> None:
    with registered(pair(PlainBackend)):
        result = cli("doctor", "--verify")
    assert result.exit_code == 0, result.stderr
    health, verified = result.stdout.split("\n\n")[:2]
    assert "not usable" in health and "needs a cuda device, found cpu" in health
    rows = {tuple(line.split()[:2]): line for line in verified.splitlines()}
    assert "right" in rows["TORCH_SDPA", "-"] and "float32" in rows["TORCH_SDPA", "-"]
    assert "right" in rows["PLAIN_TEST", "-"]
    assert "not verified" in rows["FLASH_ATTN", "fa3"]
    assert "needs a cuda device, found cpu" in rows["FLASH_ATTN", "fa3"]
    assert "TORCH_SDPA" in result.stderr  # the bar


def test_wrong_kernels_exit_1(cli: Cli) -> None:
    with registered(pair(WrongBackend)):
        table = cli("doctor", "--verify")
        result = cli("doctor", "--verify", "--json")
    assert table.exit_code == result.exit_code == 1
    (row,) = (line for line in table.stdout.splitlines() if line.startswith("WRONG_TEST") and "wrong" in line)
    assert "test_" in row and "against float64" in row
    found = {entry["backend"]: entry for entry in json.loads(result.stdout)["verification"]}
    assert found["WRONG_TEST"]["failed"] and not found["TORCH_SDPA"]["failed"]
    assert (found["WRONG_TEST"]["result"], found["TORCH_SDPA"]["result"]) == ("wrong", "right")
    assert found["CUDNN_ATTN"]["reasons"] and not found["CUDNN_ATTN"]["passed"]


def test_kernels_that_raise_failed(cli: Cli) -> None:
    with registered(pair(CrashingBackend)):
        result = cli("doctor", "--verify")
    assert result.exit_code == 1
    (row,) = (
        line for line in result.stdout.split("\n\n")[1].splitlines() if line.startswith("CRASHING_TEST")
    )
    assert row.split()[:3] == ["CRASHING_TEST", "-", "failed"]
    assert "RuntimeError: illegal memory access" in row


def test_plain_doctor_verifies_nothing(cli: Cli) -> None:
    with registered(pair(WrongBackend)):
        result = cli("doctor", "--json")
    assert result.exit_code == 0
    assert "verification" not in json.loads(result.stdout)
