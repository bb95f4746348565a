"""The tuned file says what was chosen, keeps the rest as it was written, and reads back as the same pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from omni_attn.config import AttentionSpec, PipelineConfig, TunedFor, load_pipeline
from omni_attn.errors import ConfigError
from omni_attn.facts import Verdict
from omni_attn.tuning.candidates import Candidate
from omni_attn.tuning.document import check_output, tuned_document
from omni_attn.tuning.measure import Result, Status
from omni_attn.tuning.tune import CaseResults, RoleTuning, Tuning
from tests.tuning.stubs import tiny

FA3 = AttentionSpec(backend="FLASH_ATTN", variant="fa3")
SDPA = AttentionSpec(backend="TORCH_SDPA")
SAGE = AttentionSpec(backend="SAGE_ATTN")
HERE = TunedFor(
    device="NVIDIA H200",
    capability="sm_90",
    torch="2.11.0+cu130",
    cudnn="9.19.0",
    packages={"fa3-fwd": "0.0.3", "flash-attn": "2.10"},
    dtype="bfloat16",
    lengths={"self": (256, 256), "cross": (256, 64)},
)


def result(
    spec: AttentionSpec, milliseconds: float | None, status: Status = "measured", reason: str = ""
) -> Result:
    verdict = Verdict(spec.backend, "", spec.variant)
    candidate = Candidate(spec, verdict, "quantised" if spec is SAGE else "exact", 2.3e-3)
    if milliseconds is None:
        return Result(candidate=candidate, status=status, reason=reason)
    return Result(
        candidate=candidate,
        status=status,
        milliseconds=milliseconds,
        tflops=686.7,
        error=2.32e-3,
        peak_bytes=0,
    )


def tuning(**winners: AttentionSpec) -> Tuning:
    call = CaseResults(
        tiny(),
        30,
        (
            result(SDPA, 11.855),
            result(FA3, 9.602),
            result(SAGE, None, "past the error", "error 1.3e-02,\n allowed 5.0e-03"),
        ),
    )
    roles = tuple(RoleTuning(role, (call,), spec) for role, spec in winners.items())
    return Tuning(roles, {}, HERE, 5e-3)


TUNED = tuning(self=FA3, cross=SDPA)

COMMENTED = """\
# What it is for.
pipeline: wan
model: wan-tiny   # small

attention:  # by hand
  default: SDPA
  per_role:
    self: # the video
      backend: FLASH_ATTN
      fallback: [TORCH_SDPA]
    other.role: {backend: CUDNN_ATTN}

# Sizes, in pixels.
generation:
  height: 32
  width: 32   # not 48
  num_frames: 5
  prompt: "on: a #hill, 5e-3"
output: out
# The end.
"""


def kept(config: PipelineConfig) -> dict[str, Any]:
    return config.model_dump(exclude={"attention", "tuned_for"})


def check(text: str, found: Tuning = TUNED) -> tuple[str, PipelineConfig]:
    """The tuned text, held against what must be in any."""
    tuned = tuned_document(text, found)
    before, after = load_pipeline(text, environ={}), load_pipeline(tuned, environ={})
    assert kept(after) == kept(before)
    assert after.tuned_for == HERE
    assert after.attention.default == before.attention.default
    expected = {**before.attention.per_role, **{role.role: role.winner for role in found.roles}}
    assert dict(after.attention.per_role) == expected
    return tuned, after


def test_comments_and_order_stay() -> None:
    tuned, _ = check(COMMENTED)
    head, tail = COMMENTED.split("attention:  # by hand")[0], COMMENTED[COMMENTED.index("# Sizes") :]
    assert tuned.startswith(head) and tuned.endswith(tail)
    for line in ("attention:  # by hand", "    self: # the video", "      fallback: [TORCH_SDPA]"):
        assert f"# {line}\n" in tuned  # the old section stays to be read


def test_numbers_stand_beside_the_choice() -> None:
    tuned, _ = check(COMMENTED)
    place = tuned.index("    self:\n      backend: FLASH_ATTN\n      variant: fa3\n")
    above = tuned[:place].splitlines()[-4:]
    assert above[0].startswith("    # 30 layers: 256 x 256 tokens, 4 heads of 64, bfloat16")
    assert "FLASH_ATTN (fa3)  9.602 ms, 686.7 TFLOP/s, error 2.3e-03  <- chosen" in above[1]
    assert "TORCH_SDPA        11.855 ms" in above[2] and "chosen" not in above[2]
    assert "SAGE_ATTN         past the error: error 1.3e-02, allowed 5.0e-03" in above[3]
    assert "on NVIDIA H200 (sm_90)" in tuned and "relative error of at most 0.005" in tuned


def test_tuning_again_replaces_what_was_tuned() -> None:
    once, _ = check(COMMENTED)
    twice, config = check(once, tuning(self=SDPA, cross=FA3))
    assert config.attention.per_role["self"] == SDPA
    assert twice.count("\nattention:") == twice.count("\ntuned_for:") == twice.count("# Chosen by") == 1
    assert twice.count("# Before:") == 1  # the hand-written one, from the first time
    assert len(twice.splitlines()) <= len(once.splitlines())


@pytest.mark.parametrize(
    "text",
    [
        "pipeline: wan\nmodel: wan-tiny\n",
        "pipeline: wan\nmodel: wan-tiny",
        "pipeline: wan\nmodel: wan-tiny\nattention:\n#  default: SDPA\n",
        "pipeline: wan\nattention: TORCH_SDPA\nmodel: wan-tiny\n",
        "attention: {per_role: {self: SDPA}}\npipeline: wan\nmodel: wan-tiny\n",
        "attention:\n  per_role:\n    self: SDPA\n    # indented to the end\npipeline: wan\nmodel: wan-tiny\n",
        "pipeline: wan\r\nmodel: wan-tiny\r\nattention:\r\n  default: SDPA\r\noutput: here\r\n",
        "---\npipeline: wan\nmodel: wan-tiny\nattention: null\n",
    ],
)
def test_forms_of_a_block_file(text: str) -> None:
    tuned, _ = check(text)
    assert "could not be kept" not in tuned


@pytest.mark.parametrize(
    "text",
    [
        '{"pipeline": "wan", "model": "wan-tiny", "generation": {"seed": 3, "prompt": "yes: no"}}',
        "{pipeline: wan, model: wan-tiny, attention: SDPA}",
        "  pipeline: wan\n  model: wan-tiny\n",
        "pipeline: wan\nmodel: wan-tiny\n...\n",
        "attention:\n  default: &word TORCH_SDPA\npipeline: wan\nmodel: wan-tiny\noutput: *word\n",
        'pipeline: wan\nmodel: wan-tiny\ngeneration: {guidance_scale: 5e-3, prompt: "5e-3"}\n...\n',
    ],
)
def test_what_cannot_be_edited_is_written_anew(text: str) -> None:
    tuned, _ = check(text)
    assert "whose comments could not be kept" in tuned


def test_dotted_roles_and_odd_names() -> None:
    found = tuning(self=FA3)
    role = RoleTuning("cross.image", found.roles[0].calls, SDPA)
    odd = RoleTuning("true", found.roles[0].calls, SDPA)
    both = Tuning((*found.roles, role, odd), {"gate": "no lengths"}, HERE, 5e-3)
    tuned, config = check(COMMENTED, both)
    assert config.attention.per_role["cross.image"] == config.attention.per_role["true"] == SDPA
    assert "# Role gate was not measured: no lengths." in tuned


def test_output_is_checked_first(tmp_path: Any) -> None:
    check_output(tmp_path / "new.yaml", force=False)
    old = tmp_path / "old.yaml"
    old.write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"old\.yaml: exists already\. .*--force"):
        check_output(old, force=False)
    check_output(old, force=True)
    with pytest.raises(ConfigError, match="is a folder"):
        check_output(tmp_path, force=True)
    with pytest.raises(ConfigError, match="does not exist"):
        check_output(tmp_path / "no" / "x.yaml", force=True)
