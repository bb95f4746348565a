"""CUDA-graph modes, and their lowering to what backends support: the truth table row by row."""

from __future__ import annotations

import logging
from itertools import product

import pytest

from omni_attn.config.kv_cache import CUDAGRAPH_MODES
from omni_attn.errors import ConfigError
from omni_attn.kv_cache import AttentionCGSupport, CUDAGraphMode, resolve_cudagraph_mode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
NEVER, SINGLE = AttentionCGSupport.NEVER, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
UNIFORM, ALWAYS = AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.ALWAYS

#: Columns: whether attention is a splitting op, and the tokens of a query.
COLUMNS = ((True, 1), (True, 3), (False, 1), (False, 3))
#: (requested, support) -> per column the final mode and the number of warnings.
TABLE = {
    **{(NONE, support): [(NONE, 0)] * 4 for support in AttentionCGSupport},
    **{(PIECEWISE, support): [(PIECEWISE, 0)] * 4 for support in AttentionCGSupport},
    (FULL, ALWAYS): [(FULL, 0)] * 4,
    (FULL, UNIFORM): [(BOTH, 1), (BOTH, 1), (DECODE, 1), (DECODE, 1)],
    (FULL, SINGLE): [(BOTH, 1), (PIECEWISE, 2), (DECODE, 1), (NONE, 2)],
    (DECODE, ALWAYS): [(DECODE, 0)] * 4,
    (DECODE, UNIFORM): [(DECODE, 0)] * 4,
    (DECODE, SINGLE): [(DECODE, 0), (PIECEWISE, 1), (DECODE, 0), (NONE, 1)],
    (DECODE, NEVER): [(PIECEWISE, 1), (PIECEWISE, 1), (NONE, 1), (NONE, 1)],
    (BOTH, ALWAYS): [(BOTH, 0)] * 4,
    (BOTH, UNIFORM): [(BOTH, 0)] * 4,
    (BOTH, SINGLE): [(BOTH, 0), (PIECEWISE, 1), (BOTH, 0), (NONE, 1)],
    (BOTH, NEVER): [(PIECEWISE, 1), (PIECEWISE, 1), (NONE, 1), (NONE, 1)],
}
ROWS = [
    pytest.param(*row, *column, *result, id=f"{row[0].name}-{row[1].name}-{column}")
    for row, results in TABLE.items()
    for column, result in zip(COLUMNS, results, strict=True)
]


def test_the_table_holds_every_row_but_the_one_that_raises() -> None:
    assert set(product(CUDAGraphMode, AttentionCGSupport)) - set(TABLE) == {(FULL, NEVER)}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("piecewise", [True, False])
@pytest.mark.parametrize(("requested", "support", "splits", "length", "final", "warnings"), ROWS)
def test_each_row(
    requested: CUDAGraphMode,
    support: AttentionCGSupport,
    splits: bool,
    length: int,
    final: CUDAGraphMode,
    warnings: int,
    compiled: bool,
    piecewise: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not compiled and support is NEVER and requested in (DECODE, BOTH):
        final = NONE  # the only rows that look at it
    if not piecewise and final in (PIECEWISE, BOTH):
        final, warnings = {PIECEWISE: NONE, BOTH: DECODE}[final], warnings + 1
    with caplog.at_level(logging.WARNING, "omni_attn"):
        decision = resolve_cudagraph_mode(
            requested.name,
            {"STRONG": ALWAYS, "WEAK": support, "LATER": support},
            attention_is_splitting_op=splits,
            compiled=compiled,
            uniform_query_len=length,
            piecewise_available=piecewise,
        )
    assert (decision.requested, decision.final) == (requested, final)
    assert len(decision.steps) == len(caplog.messages) == warnings
    assert all("is not supported with" in text and "WEAK" in text for text in caplog.messages)
    modes = [requested, *(step.after for step in decision.steps)]
    assert [step.before for step in decision.steps] == modes[:-1] and modes[-1] is final
    blamed = any(step.by_backend for step in decision.steps)
    assert (decision.culprit, decision.culprit_support) == (("WEAK", support) if blamed else (None, None))
    assert decision.lowered == (requested is not final)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("compiled", [True, False])
def test_full_of_a_backend_without_graphs_raises_with_advice(
    splits: bool, length: int, compiled: bool
) -> None:
    with pytest.raises(
        ValueError, match=r"FULL is not supported with WEAK backend \(support: NEVER"
    ) as caught:
        resolve_cudagraph_mode(
            FULL,
            {"STRONG": ALWAYS, "WEAK": NEVER},
            attention_is_splitting_op=splits,
            compiled=compiled,
            uniform_query_len=length,
        )
    assert isinstance(caught.value, ConfigError)
    assert "PIECEWISE" in str(caught.value) and "compile" in str(caught.value)


def test_strict_allows_no_lowering_and_says_what_would_hold() -> None:
    options = {"attention_is_splitting_op": False, "strict": True}
    with pytest.raises(ConfigError, match="is not supported with WEAK") as caught:
        resolve_cudagraph_mode(FULL, {"WEAK": UNIFORM}, **options)
    assert "FULL_DECODE_ONLY" in str(caught.value)
    with pytest.raises(ConfigError, match="is not supported with STRONG"):
        resolve_cudagraph_mode(BOTH, {"STRONG": ALWAYS}, **options, piecewise_available=False)
    assert resolve_cudagraph_mode(FULL, {"STRONG": ALWAYS}, **options).final is FULL


def test_the_record_names_the_culprit_and_its_layers() -> None:
    decision = resolve_cudagraph_mode(
        FULL,
        {"STRONG": ALWAYS, "WEAK": UNIFORM},
        attention_is_splitting_op=False,
        layers={"WEAK": [f"blocks.{i}" for i in range(5)], "STRONG": ["first"]},
    )
    assert decision.culprit_layers == tuple(f"blocks.{i}" for i in range(5))
    assert "5 layer(s): blocks.0, blocks.1, blocks.2, ..." in str(decision)
    assert "FULL became FULL_DECODE_ONLY" in str(decision)


def test_nothing_limits_a_model_without_paged_layers() -> None:
    assert resolve_cudagraph_mode(FULL, {}, attention_is_splitting_op=False).final is FULL


@pytest.mark.parametrize("name", ["FULL_AND_PIECWISE", "full decode only", "1"])
def test_unknown_names_are_refused_with_the_list(name: str) -> None:
    with pytest.raises(ConfigError, match="is none of NONE, PIECEWISE, FULL, FULL_DECODE_ONLY"):
        resolve_cudagraph_mode(name, {}, attention_is_splitting_op=True)


def test_the_configuration_knows_the_same_names() -> None:
    assert set(CUDAGRAPH_MODES) == set(CUDAGraphMode.__members__)


def test_names_are_taken_in_any_case_and_none_is_none() -> None:
    assert CUDAGraphMode.of("full_and_piecewise") is BOTH
    assert CUDAGraphMode.of("none") is CUDAGraphMode.of(None) is NONE and not CUDAGraphMode.of(None)
    with pytest.raises(ValueError, match="cudagraph_mode 2 is none of NONE"):
        CUDAGraphMode.of(2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="uniform_query_len=0"):
        resolve_cudagraph_mode(FULL, {}, attention_is_splitting_op=True, uniform_query_len=0)


@pytest.mark.parametrize(
    ("mode", "decode", "mixed", "largest", "without"),
    [
        (NONE, NONE, NONE, NONE, NONE),
        (PIECEWISE, PIECEWISE, PIECEWISE, PIECEWISE, NONE),
        (FULL, FULL, FULL, FULL, FULL),
        (DECODE, FULL, NONE, FULL, DECODE),
        (BOTH, FULL, PIECEWISE, FULL, DECODE),
    ],
)
def test_what_a_mode_is_made_of(
    mode: CUDAGraphMode,
    decode: CUDAGraphMode,
    mixed: CUDAGraphMode,
    largest: CUDAGraphMode,
    without: CUDAGraphMode,
) -> None:
    assert (mode.decode_mode(), mode.mixed_mode()) == (decode, mixed)
    assert mode.max_cudagraph_mode() is largest and mode.without_piecewise() is without
    assert mode.valid_runtime_modes() == {decode, mixed}
    assert [m for m in (NONE, PIECEWISE, FULL) if mode.has_mode(m)] == sorted(
        {decode, mixed}, key=lambda m: m.value
    )
    assert mode.has_full_cudagraphs() == (decode is FULL)
    assert mode.requires_piecewise_compilation() == (mixed is PIECEWISE)
    assert mode.separate_routine() == (mode in (DECODE, BOTH)) and bool(mode) == (mode is not NONE)
    with pytest.raises(ValueError, match="holds two modes"):
        mode.has_mode(BOTH)
