"""Each role gets the fastest backend within the bound, measured on the role's own shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from omni_attn.config import PipelineConfig
from omni_attn.errors import ConfigError
from omni_attn.platforms import current_omni_platform
from omni_attn.tuning.tune import Tuning, tune
from tests.selection.stubs import PlainBackend, registered
from tests.tuning.stubs import CPU, CoarseBackend, QuickBackend, SlowBackend, WrongBackend, cpu, pair

# 32 x 32 pixels and 5 frames are 8 tokens.
SMALL = {"height": 32, "width": 32, "num_frames": 5}


def tuned(attention: Any = None, **options: Any) -> Tuning:
    config = PipelineConfig.model_validate(
        {"pipeline": "wan", "model": "wan-tiny", "generation": SMALL, "attention": attention}
    )
    return tune(config, cpu(), CPU, **{"rounds": 3, **options})


def winners(found: Tuning) -> dict[str, Any]:
    return {role.role: role.winner.model_dump(exclude_unset=True, exclude_none=True) for role in found.roles}


def test_real_shapes_of_each_role() -> None:
    found = tuned()
    cases = {role.role: role.calls[0].case for role in found.roles}
    assert {name: case.lengths for name, case in cases.items()} == {"self": (8, 8), "cross": (8, 512)}
    for case in cases.values():
        assert (case.request.mask_usage, case.kept_keys, case.dtype.itemsize) == ("never", None, 4)
    assert cases["self"].request.video_grid
    assert {role.role: role.calls[0].layers for role in found.roles} == {"self": 4, "cross": 4}
    assert found.tuned_for.lengths == {"self": (8, 8), "cross": (8, 512)}
    assert (found.tuned_for.capability, found.tuned_for.dtype) == ("cpu", "float32")
    assert found.tuned_for.torch == current_omni_platform("cpu").device.torch_version


def test_the_fastest_wins_and_the_slow_loses() -> None:
    with registered(pair(SlowBackend)):
        assert winners(tuned()) == {"self": {"backend": "TORCH_SDPA"}, "cross": {"backend": "TORCH_SDPA"}}
        with registered(pair(QuickBackend)):
            assert winners(tuned()) == {"self": {"backend": "QUICK_TEST"}, "cross": {"backend": "QUICK_TEST"}}


def test_the_bound_refuses_what_is_coarse() -> None:
    with registered(pair(CoarseBackend), pair(WrongBackend)):
        assert {w["backend"] for w in winners(tuned()).values()} == {"TORCH_SDPA"}
        loose = tuned(max_error=3e-2)
        assert {w["backend"] for w in winners(loose).values()} == {"COARSE_TEST"}
        # An exact backend with wrong numbers wins under no bound.
        assert {w["backend"] for w in winners(tuned(max_error=1.0)).values()} == {"COARSE_TEST"}


def test_nothing_within_the_bound_names_every_role() -> None:
    with pytest.raises(ConfigError) as error:
        tuned(max_error=1e-12)
    assert len(error.value.problems) == 2
    for role, problem in zip(("self", "cross"), error.value.problems, strict=True):
        assert f'role "{role}": no backend here runs it within --max-error 1e-12' in problem
        assert "TORCH_SDPA past the error" in problem and "FLASH_ATTN (fa3) refused: needs a cuda" in problem


def test_fallbacks_of_the_file_stay() -> None:
    with registered(pair(SlowBackend)):
        found = tuned(
            {"per_role": {"self": {"backend": "FLASH_ATTN", "fallback": ["TORCH_SDPA", "SLOW_TEST"]}}}
        )
    # TORCH_SDPA is what was chosen, so it is no fallback of itself.
    assert winners(found)["self"] == {"backend": "TORCH_SDPA", "fallback": ({"backend": "SLOW_TEST"},)}
    assert winners(found)["cross"] == {"backend": "TORCH_SDPA"}


def test_a_choice_with_options_is_a_candidate_of_its_own() -> None:
    found = tuned({"default": {"backend": "MINE_TEST", "options": {"strength": 2}}})
    labels = [result.label for result in found.roles[0].calls[0].results]
    assert labels[-1] == "MINE_TEST, configured"
    assert found.roles[0].calls[0].results[-1].status == "refused"


def test_a_sparse_choice_is_kept() -> None:
    """Nothing here can tell what it loses, so nothing replaces it; roles that it cannot serve are measured."""
    found = tuned({"default": {"backend": "FASTVIDEO_VSA", "fastvideo_vsa": {"sparsity": 0.9}}})
    assert set(winners(found)) == {"cross"}
    assert set(found.unmeasured) == {"self"} and "the file chooses FASTVIDEO_VSA" in found.unmeasured["self"]


class _Sparse(PlainBackend):
    """Selects blocks, of sequences of any kind."""

    facts = replace(PlainBackend.facts, selects_blocks=True, unequal_lengths=False)

    @staticmethod
    def get_name() -> str:
        return "SPARSE_TEST"


def test_a_sparse_choice_that_needs_no_grid_is_kept_as_well() -> None:
    with registered(("SPARSE_TEST", _Sparse)):
        found = tuned({"default": {"backend": "SPARSE_TEST"}})
    assert set(winners(found)) == {"cross"}
    assert set(found.unmeasured) == {"self"} and "the file chooses SPARSE_TEST" in found.unmeasured["self"]


def test_what_selects_blocks_is_no_candidate() -> None:
    """Eight tokens are one block: such a backend would run dense attention here, and might win by a hair."""
    (self_attention,) = (role for role in tuned().roles if role.role == "self")
    (call,) = self_attention.calls
    found = {result.label: result for result in call.results}
    for label in ("FASTVIDEO_VSA (torch)", "RAINFUSION_ATTN (torch)", "BLOCK_SUMMARY_ATTN (torch)"):
        assert found[label].status == "refused"
        assert found[label].reason.startswith("selects blocks, and what that loses is to be judged")


def test_a_large_pipeline_is_refused_on_a_cpu() -> None:
    config = PipelineConfig.model_validate({"pipeline": "wan", "model": "wan2.1-t2v-14b"})
    with pytest.raises(ConfigError, match=r"self: 32760 x 32760 .* on a CPU: about"):
        tune(config, cpu(), CPU)
