"""A pipeline among ranks: refused where others are in force, written by the first one alone, reported by each."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from omni_attn import Attention, attention_report, use_attention_config
from omni_attn.config import ParallelConfig, PipelineConfig
from omni_attn.errors import ConfigError
from omni_attn.models import get_family
from omni_attn.models.ranks import among_ranks, results_folder
from omni_attn.parallel import use_parallel
from omni_attn.testing import fake_ranks

TWO = {"ulysses_degree": 2}


def pipeline(family: str = "wan", model: str = "wan-tiny", **keys: object) -> PipelineConfig:
    return PipelineConfig.model_validate({"pipeline": family, "model": model, "parallel": TWO, **keys})


@pytest.mark.parametrize(("family", "model"), [("wan", "wan-tiny"), ("minimax_h3", "minimax-h3-tiny")])
def test_ranks_that_were_asked_for_and_are_not_there(family: str, model: str, tmp_path: Path) -> None:
    config = pipeline(family, model, output=str(tmp_path / "out"))
    with pytest.raises(
        ConfigError, match=r"ulysses_degree 2 was asked for, and no ranks are in force. Run it"
    ):
        get_family(family).prepare(config)
    assert not (tmp_path / "out").exists()


def test_other_ranks_than_asked_for() -> None:
    with (
        use_parallel(ParallelConfig(ring_degree=2)),
        pytest.raises(ConfigError, match="ulysses_degree 2 was asked for, and ring_degree 2 is in force"),
    ):
        among_ranks(pipeline())


def test_the_ranks_that_were_asked_for() -> None:
    with use_parallel(ParallelConfig.model_validate(TWO)):
        among_ranks(pipeline())
        among_ranks(
            pipeline(parallel={})
        )  # a program of one's own may choose the ranks of a file without any
    among_ranks(pipeline(parallel={}))


def test_one_rank_makes_the_folder(tmp_path: Path) -> None:
    config = pipeline(output=str(tmp_path / "out"))
    assert fake_ranks(TWO, lambda _: results_folder(config)) == [tmp_path / "out", None]
    assert results_folder(pipeline(output=str(tmp_path / "alone"))) == tmp_path / "alone"
    assert (tmp_path / "out").is_dir() and (tmp_path / "alone").is_dir()


def build() -> nn.Module:
    with use_attention_config("TORCH_SDPA", device="cpu"):
        return nn.ModuleList(
            [
                Attention(6, 8, role="self"),
                Attention(6, 8, role="cross", skip_sequence_parallel=True),
                Attention(
                    6, 8, role="own", skip_sequence_parallel=True, custom_attention=nn.Identity().forward
                ),
            ]
        )


def test_the_report_says_what_the_ranks_do() -> None:
    for report in fake_ranks(TWO, lambda _: attention_report(build())):
        told = {row.role: row.parallel for row in report}
        assert told["self"] == "2 ranks trade tokens for heads, 3 of 6 heads each"
        assert told["cross"] == told["own"] == "not split: runs on each rank's own tensors"
        assert "3 of 6 heads each" in str(report).splitlines()[0]
        assert [row["parallel"] for row in report.to_dict()["roles"]] == list(told.values())
    assert {row.parallel for row in attention_report(build())} == {None}
