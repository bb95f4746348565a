"""Commands and ranks: what `explain` and `check` tell of them without any, and who may speak among several."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from omni_attn.cli.ranks import number_of_processes, one_voice, says_first
from omni_attn.errors import ParallelError
from tests.cli.conftest import EXAMPLES, Cli

Write = Callable[..., Path]
ULYSSES = ("--set", "parallel.ulysses_degree=2")
NOT_SPLIT = "not split: runs on each rank's own tensors"


@pytest.fixture
def two_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchrun had started another process beside this one."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)


def test_explain_tells_what_ranks_would_do(cli: Cli, pipeline: Write) -> None:
    shown = cli("explain", pipeline(), *ULYSSES)
    assert shown.exit_code == 0, shown.stderr
    rows = {line.split()[0]: line for line in shown.stdout.splitlines() if "platform default" in line}
    assert "2 ranks trade tokens for heads, 2 of 4 heads each" in rows["self"]
    assert NOT_SPLIT in rows["cross"]
    command = f"torchrun --nproc-per-node=2 -m omni_attn run {pipeline()} --set parallel.ulysses_degree=2"
    assert f"ulysses_degree 2: 2 processes, started by `{command}`" in shown.stdout
    assert "parallel" not in cli("explain", pipeline()).stdout


def test_explain_tells_it_in_json(cli: Cli, pipeline: Write) -> None:
    answer = json.loads(cli("explain", pipeline(), *ULYSSES, "--json").stdout)
    ranks = answer["parallel"]
    assert (ranks["processes"], ranks["mode"], ranks["ulysses_degree"]) == (2, "ulysses", 2)
    told = {role["role"]: role["parallel"] for role in answer["roles"]}
    assert told == {"self": "2 ranks trade tokens for heads, 2 of 4 heads each", "cross": NOT_SPLIT}
    alone = json.loads(cli("explain", pipeline(), "--json").stdout)
    assert alone["parallel"] is None and {role["parallel"] for role in alone["roles"]} == {None}


def test_the_example_for_two_processes_is_explained(cli: Cli) -> None:
    shown = cli("explain", EXAMPLES / "wan_tiny_parallel.yaml")
    assert shown.exit_code == 0, shown.stderr
    assert "2 of 4 heads each" in shown.stdout and "torchrun --nproc-per-node=2" in shown.stdout


def test_heads_that_cannot_be_shared_are_a_refusal(cli: Cli, pipeline: Write) -> None:
    uneven = ("--set", "parallel.ulysses_degree=3", "--set", "parallel.uneven_heads=refuse")
    shown = cli("explain", pipeline("{per_role: {self: FLASH_ATTN}}"), *uneven, "--assume", "cpu")
    assert shown.exit_code == 2
    assert "4 query heads and 4 key-value heads, which 3 ranks do not share evenly" in shown.stderr
    assert 'role "self": FLASH_ATTN' in shown.stderr  # both that speaks against it
    default = cli("explain", pipeline(), *uneven)
    (row,) = (line for line in default.stdout.splitlines() if line.startswith("self"))
    assert "accepted" in row and "selected" not in row and "refused" in row
    answer = json.loads(cli("explain", pipeline(), *uneven, "--json").stdout)
    assert {role["role"]: role["backend"] for role in answer["roles"]} == {
        "self": None,
        "cross": "TORCH_SDPA",
    }


def test_a_backend_that_does_not_serve_the_mode_is_refused_by_explain_and_check(
    cli: Cli, pipeline: Write
) -> None:
    file = pipeline("{per_role: {self: {backend: FASTVIDEO_VSA, variant: torch}}}")
    ring = ("--set", "parallel.ring_degree=2")
    for arguments in (("explain", file, *ring), ("check", "--model", file, *ring)):
        refused = cli(*arguments)
        assert refused.exit_code == 2
        assert "FASTVIDEO_VSA" in refused.stderr and "ring" in refused.stderr
    assert cli("check", "--model", file, *ULYSSES).exit_code == 0
    assert cli("check", file, *ring).exit_code == 0  # it looks at the file alone


def test_doctor_says_what_processes_can_exchange_through(cli: Cli) -> None:
    (line,) = (line for line in cli("doctor").stdout.splitlines() if line.startswith("parallel"))
    assert "gloo on the CPU" in line
    assert "gloo" in json.loads(cli("doctor", "--json").stdout)["versions"]["parallel"]


def test_run_without_torchrun_tells_the_command(cli: Cli, pipeline: Write, tmp_path: Path) -> None:
    refused = cli("run", pipeline(), *ULYSSES, "--set", "device=cpu")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "torchrun --nproc-per-node=2" in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "degrees",
    ["ulysses_degree: 2", "ring_degree: 3", "ulysses_degree: 2, ring_degree: 2", "allgather_degree: 4"],
)
def test_explain_and_check_need_no_processes(cli: Cli, pipeline: Write, degrees: str) -> None:
    options = ("--set", f"parallel={{{degrees}}}")
    shown = cli("explain", pipeline(), *options)
    assert shown.exit_code == 0, shown.stderr
    (row,) = (line for line in shown.stdout.splitlines() if line.startswith("self"))
    assert " ranks " in row
    assert cli("check", "--model", pipeline(), *options).exit_code == 0


@pytest.mark.usefixtures("two_started")
def test_processes_that_the_file_does_not_ask_for(cli: Cli, pipeline: Write, tmp_path: Path) -> None:
    refused = cli("run", pipeline(), "--set", "device=cpu")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "torchrun started 2 processes, and the pipeline runs in one" in refused.stderr
    assert "Write `parallel: {ulysses_degree: 2}` into the file" in refused.stderr
    assert not (tmp_path / "out").exists()
    causal = cli("run", EXAMPLES / "causal_wan_tiny.yaml", "--set", "device=cpu")
    assert causal.exit_code == 2
    assert "pipeline wan_causal do not split their sequence: start it without torchrun" in causal.stderr


@pytest.mark.usefixtures("two_started")
@pytest.mark.parametrize(
    "command", ["explain", "check", "doctor", "backends", "schema", "bench", "tune", "inspect"]
)
def test_commands_that_one_process_answers(cli: Cli, pipeline: Write, command: str) -> None:
    arguments = {"tune": ("-o", "tuned.yaml"), "inspect": ("--step", 0, "--layer", 0)}.get(command, ())
    file = () if command in ("doctor", "backends", "schema", "bench") else (pipeline(),)
    refused = cli(command, *file, *arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"omni-attn {command}: torchrun started 2 processes, and one answers" in refused.stderr


def test_a_cluster_that_numbers_its_machines_is_not_torchrun(
    cli: Cli, pipeline: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli("explain", pipeline()).exit_code == 0


def test_commands_that_look_at_one_process_say_what_to_do(cli: Cli, pipeline: Write, tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(pipeline().read_text() + "parallel: {ulysses_degree: 2}\n")
    tuned = cli("tune", file, "-o", "tuned.yaml")
    assert tuned.exit_code == 2 and "omni-attn tune looks at one. Remove the section" in tuned.stderr
    seen = cli("inspect", file, "--step", 0, "--layer", 0)
    assert seen.exit_code == 2 and "omni-attn inspect looks at one. Add --set parallel=null" in seen.stderr
    dense = cli("inspect", file, "--step", 0, "--layer", 0, "--set", "parallel=null")
    assert "looks at one" not in dense.stderr
    assert not (tmp_path / "tuned.yaml").exists()


@pytest.mark.parametrize("exit_code", [1, 2])
def test_a_process_ends_as_the_one_that_failed(
    cli: Cli, pipeline: Write, monkeypatch: pytest.MonkeyPatch, exit_code: int
) -> None:
    def run(config: object, progress: object) -> None:
        raise ParallelError("Process 1 failed", rank=1, exit_code=exit_code, first="why")

    monkeypatch.setattr("omni_attn.models.wan.family.run", run)
    failed = cli("run", pipeline(), "--set", "device=cpu")
    assert (failed.exit_code, failed.stderr) == (exit_code, "Process 1 failed\n")


def test_one_process_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("omni_attn")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, heard in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        caplog.clear()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with one_voice():
                warnings.warn("told by all", stacklevel=1)
                log.warning("told by all")
                log.error("an error is heard from everywhere")
        assert (len(told), len(caplog.records)) == (heard, heard + 1)
    log.warning("afterwards all speak")
    assert len(caplog.records) == 2


def test_a_process_alone_speaks_whatever_its_number(
    cli: Cli, pipeline: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert "Written into out:" in cli("run", pipeline(), "--set", "device=cpu").stdout


def test_an_error_that_all_processes_meet_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert says_first("alone") and says_first("alone")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    assert number_of_processes() == 2
    assert [says_first("of all"), says_first("of all"), says_first("of one")] == [True, False, True]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert says_first("of all")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert says_first("of all") and says_first("of all")
