"""What docs/sequence_parallel.md says in words, and what it advises, is what the cost model says."""

from __future__ import annotations

import re

import pytest

from omni_attn.config import ParallelConfig
from omni_attn.parallel.cost import AttentionCall, Prediction, predict
from omni_attn.parallel.machines import H200
from tools.docs import DOCS
from tools.parallel_plan import CALLS, PLANS

PAGE = (DOCS / "sequence_parallel.md").read_text(encoding="utf-8")
ADVICE = re.findall(
    r"^\| ([^|]+) \| (\d+) \|[^\n]*\| ([^|\n]*`ulysses_degree: \d`[^|\n]*) \|$", PAGE, re.MULTILINE
)
WAN = next(call for name, call in CALLS.items() if name.startswith("Wan 14B"))
TI2V = AttentionCall(tokens=27280, heads=24, head_size=128)  # 704 x 1280, 121 frames, which has no plan


def cost(call: AttentionCall, **degrees: int) -> Prediction:
    return predict(call, ParallelConfig.model_validate(degrees), H200)


def test_there_is_advice_for_each_model() -> None:
    assert [int(heads) for _, heads, _ in ADVICE] == [40, 24, 12, 56]


@pytest.mark.parametrize(("name", "heads", "words"), ADVICE)
def test_the_degrees_for_eight_gpus_are_the_fastest(name: str, heads: str, words: str) -> None:
    advised = {key: int(value) for key, value in re.findall(r"`(\w+): (\d+)`", words)}
    call = {call.heads: call for call in (TI2V, *CALLS.values())}[int(heads)]
    assert advised == min(PLANS[8], key=lambda degrees: cost(call, **degrees).seconds), name


def test_figures_in_the_text() -> None:
    said = " ".join(PAGE.split())
    assert "a call of 177 ms becomes one of 7 ms, of which exchanges are a quarter to a half" in said
    plans = [cost(WAN, ulysses_degree=64), cost(WAN, ulysses_degree=16, ring_degree=4)]
    assert [round(1e3 * found.seconds) for found in plans] == [7, 7]
    assert round(1e3 * plans[0].one_rank_seconds) == 177
    assert all(0.24 < found.exposed_seconds / found.seconds < 0.5 for found in plans)
    assert "An efficiency of 0.4 is what to expect" in said
    assert all(found.efficiency == pytest.approx(0.4, abs=0.03) for found in plans)
    assert "On two GPUs a call of Wan 14B is 1.92 to 1.98 times as fast with every strategy" in said
    speedups = [cost(WAN, **degrees).speedup for degrees in PLANS[2]]
    assert min(speedups) >= 1.92 and max(speedups) <= 1.98
    assert max(speedups) == cost(WAN, ring_degree=2).speedup, "whose exchange is hidden"
    assert "Twelve heads over eight ranks lose a quarter" in said
    few = next(call for call in CALLS.values() if call.heads == 12)
    lost = (
        1
        - cost(few, ulysses_degree=4, ring_degree=2).compute_seconds
        / cost(few, ulysses_degree=8).compute_seconds
    )
    assert lost == pytest.approx(0.25, abs=0.01)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (example,) = (code for code in examples if "AttentionCall(" in code)
    exec(compile(example, "docs/sequence_parallel.md", "exec"), {})
    said = capsys.readouterr().out
    assert re.fullmatch(r"ulysses_degree 4 x ring_degree 2: 456 MB sent, 7\.\d\d times one rank\n", said)
