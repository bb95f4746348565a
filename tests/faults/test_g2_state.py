"""Public faults, group G2: configuration, precedence and state.

B11 (validators) lives in tests/config/test_bad_specs.py. B10 reads the documented variables; B13 puts every
registered backend beside an unconfigured model; B14 waits for FASTVIDEO_VSA and stands a sparse backend in for it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch

from omni_attn.backends.registry import registered_names
from omni_attn.config import load_config
from omni_attn.errors import BackendRejectedError, ConfigError
from omni_attn.layer import Attention
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.presets import WAN_PRESETS
from omni_attn.selector import select, use_attention_config
from omni_attn.testing import fake_device, fake_kernels
from tests.layer.stands import STANDS, Stand
from tests.selection.stubs import SparseBackend, ask, choose, registered

DOCUMENTED = ("OMNI_ATTN_BACKEND", "DIFFUSION_ATTENTION_BACKEND")
H100 = fake_device(
    "sm_90", packages={"fa3-fwd": "0.0.3", "triton": "3.6.0", "flashinfer-python": "0.6.18"}, cudnn=91900
)
CPU = fake_device("cpu")


# --- B10 a documented variable that nobody reads


@pytest.mark.parametrize("variable", DOCUMENTED)
def test_b10_the_variable_chooses_and_the_record_says_so(variable: str) -> None:
    config = load_config({"per_role": {"cross": "CUDNN_ATTN"}}, environ={variable: "torch_sdpa"})
    selection = select(ask("self"), config, H100)
    assert (selection.backend, selection.source) == ("TORCH_SDPA", f"env {variable}")
    assert f"env {variable}" in selection.explain()
    assert select(ask("cross"), config, H100).source == "per_role['cross']"


@pytest.mark.parametrize("variable", DOCUMENTED)
def test_b10_it_also_reaches_a_layer_without_any_config(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "TORCH_SDPA")
    selection = Attention(2, 128, role="self").selection
    assert selection is not None and selection.source == f"env {variable}"


@pytest.mark.parametrize("variable", DOCUMENTED)
def test_b10_an_unknown_name_in_it_is_an_error_with_the_valid_ones(variable: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select(ask(), load_config({}, environ={variable: "nope"}), H100)
    assert "NOPE" in str(caught.value) and all(name in str(caught.value) for name in registered_names())


@pytest.mark.parametrize("variable", DOCUMENTED)
@pytest.mark.parametrize("value", ["TORCH_SDPA", "nope", "not a name"])
def test_b10_an_explicit_default_wins_and_the_record_says_so(variable: str, value: str) -> None:
    config = load_config({"default": {"backend": "FLASH_ATTN"}}, environ={variable: value})
    selection = select(ask(), config, H100)
    assert (selection.backend, selection.source) == ("FLASH_ATTN", "default")


@pytest.mark.parametrize("variable", ["VLLM_ATTENTION_BACKEND", "FASTVIDEO_ATTENTION_BACKEND"])
def test_b10_a_variable_of_another_project_is_named_in_a_warning(variable: str) -> None:
    with pytest.warns(UserWarning, match=variable):
        config = load_config({}, environ={variable: "FLASH_ATTN"})
    assert select(ask(), config, CPU).source == "platform default"


# --- B13 the choice for one model changes another

# A head size and token counts that every kernel takes: 128 latent tokens, as many of text.
TINY = replace(
    WAN_PRESETS["wan-tiny"].transformer, num_layers=1, num_attention_heads=1, attention_head_dim=128
)
INPUTS = (torch.randn(1, 16, 2, 16, 16), torch.tensor([500]), torch.randn(1, 128, 64))


def build_wan(config: object, device: object) -> WanModel:
    torch.manual_seed(0)
    with use_attention_config(config, platform=device):  # type: ignore[arg-type]
        return WanModel(TINY).bfloat16()


def explanations(model: WanModel) -> list[str]:
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    return [layer.selection.explain() for layer in layers if layer.selection]


def in_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("stand", [s for s in STANDS if s.name in registered_names()], ids=str)
@pytest.mark.parametrize("threaded", [False, True], ids=["one thread", "two threads"])
def test_b13_models_keep_their_own_choice(stand: Stand, threaded: bool) -> None:
    name = stand.name
    fresh = {
        role: select(ask(role, role_category=role, num_heads=1, dtype=None), None, CPU).label
        for role in ("self", "cross")
    }
    with stand.kernels(publishes_grid=False) as kernel, torch.no_grad():
        run = in_thread if threaded else lambda work: work()
        # A kernel for self-attention alone is chosen for it alone. This video's four tiles are all kept, and its 128
        # tokens are too few to select among: torch's dense attention runs in its place.
        sparse = stand.facts.needs_video_grid or stand.facts.self_attention_only
        choice = {"default": "TORCH_SDPA", "per_role": {"self": stand.spec}} if sparse else stand.config
        chosen = run(lambda: build_wan(choice, stand.platform))
        unset = build_wan(None, CPU)
        first, calls = unset(*INPUTS), len(kernel)
        assert calls == 0
        run(lambda: chosen(*INPUTS))
        assert len(kernel) == (0 if sparse or name == "TORCH_SDPA" else 2)
        calls = len(kernel)
        later = build_wan(None, CPU)
        for model in (unset, later):
            assert torch.equal(model(*INPUTS), first)
            assert all("platform default" in text for text in explanations(model))
            assert {text.split(":")[1].split(",")[0].strip() for text in explanations(model)} == set(
                fresh.values()
            )
        assert len(kernel) == calls
    told = explanations(chosen)
    if sparse:
        assert name in told[0] and "from per_role['self']" in told[0] and "TORCH_SDPA" in told[1]
        return
    assert all(f"{name}" in text and "from default" in text for text in told)


def test_b13_a_failed_construction_leaves_no_trace() -> None:
    before = explanations(build_wan(None, CPU))
    with pytest.raises(BackendRejectedError, match="FLASH_ATTN"):
        build_wan({"per_role": {"cross": "FLASH_ATTN"}}, CPU)
    assert explanations(build_wan(None, CPU)) == before
    with pytest.raises(RuntimeError, match="midway"), use_attention_config("CUDNN_ATTN", platform=H100):
        raise RuntimeError("midway")
    layer = Attention(2, 128, role="self")
    assert layer.selection is not None and layer.selection.source == "platform default"


def test_b13_nested_scopes_end_where_they_end() -> None:
    with use_attention_config("TORCH_SDPA", platform=H100):
        with use_attention_config("CUDNN_ATTN", platform=H100), fake_kernels("CUDNN_ATTN"):
            inner = Attention(2, 128, role="self", dtype="bfloat16")
        outer = Attention(2, 128, role="self", dtype="bfloat16")
        own = Attention(2, 128, role="self", config=choose({"per_role": {"self": "SDPA"}}))
    sources = [(layer.selection.backend, layer.selection.source) for layer in (inner, outer, own)]  # type: ignore[union-attr]
    assert sources == [
        ("CUDNN_ATTN", "default"),
        ("TORCH_SDPA", "default"),
        ("TORCH_SDPA", "per_role['self']"),
    ]


def test_b13_order_of_models_has_no_effect() -> None:
    choices: dict[str, tuple[object, object]] = {
        "a": ({"per_role": {"self": "SDPA"}}, CPU),
        "b": (None, CPU),
        "c": ("TORCH_SDPA", H100),
    }
    seen = set()
    for order in permutations(choices):
        built = {name: tuple(explanations(build_wan(*choices[name]))) for name in order}
        seen.add(tuple(built[name] for name in sorted(choices)))
    assert len(seen) == 1


# --- B14 one global choice breaks components that it was never meant for

GLOBAL = {"default": {"backend": "SPARSE_TEST"}}
LAYERS: dict[str, dict[str, Any]] = {
    "self": {"role_category": "self", "head_size": 128, "video_grid": True},
    "cross": {"role_category": "cross", "head_size": 128, "max_seqlen_q": 32760, "max_seqlen_k": 512},
    "image_encoder": {"head_size": 80, "mask_usage": "padding"},
}


@pytest.mark.parametrize(("role", "reason"), [("cross", "video grid"), ("image_encoder", "head_size=80")])
@pytest.mark.parametrize("explicit", [False, True], ids=["default", "per_role"])
def test_b14_the_error_names_the_component_and_its_line_mends_it(
    role: str, reason: str, explicit: bool
) -> None:
    config = {"default": "TORCH_SDPA", "per_role": {role: "SPARSE_TEST"}} if explicit else GLOBAL
    request = ask(role, **LAYERS[role])
    with registered(("SPARSE_TEST", SparseBackend)):
        assert select(ask("self", **LAYERS["self"]), choose(GLOBAL), CPU).backend == "SPARSE_TEST"
        with pytest.raises(BackendRejectedError) as caught:
            select(request, choose(config), CPU)
        text = str(caught.value)
        source = f"per_role['{role}']" if explicit else "default"
        assert all(part in text for part in (f'"{role}"', "SPARSE_TEST", source, reason))
        line = re.search(r"`per_role: (.*?)`", text)
        assert line, text
        mended = load_config(f"default: SPARSE_TEST\nper_role: {line[1]}", environ={})
        assert select(request, mended, CPU).source == f"per_role['{role}']"
        assert select(ask("self", **LAYERS["self"]), mended, CPU).backend == "SPARSE_TEST"


def test_b14_cross_attention_is_refused_for_its_lengths_too() -> None:
    request = ask("cross", **LAYERS["cross"], video_grid=True)
    with registered(("SPARSE_TEST", SparseBackend)), pytest.raises(BackendRejectedError) as caught:
        select(request, choose(GLOBAL), CPU)
    assert "32760" in str(caught.value) and "512" in str(caught.value)


def test_b14_a_written_fallback_is_the_one_soft_way() -> None:
    config = choose({"default": {"backend": "SPARSE_TEST", "fallback": ["TORCH_SDPA"]}})
    with registered(("SPARSE_TEST", SparseBackend)):
        taken = {role: select(ask(role, **needs), config, CPU) for role, needs in LAYERS.items()}
    assert {role: selection.backend for role, selection in taken.items()} == {
        "self": "SPARSE_TEST",
        "cross": "TORCH_SDPA",
        "image_encoder": "TORCH_SDPA",
    }
    assert all(selection.is_fallback == (role != "self") for role, selection in taken.items())


def test_b14_no_default_is_ever_sparse() -> None:
    """A name that a default order lists does not become sparse by being replaced."""

    class Sparse(SparseBackend):
        @staticmethod
        def get_name() -> str:
            return "CUDNN_ATTN"

    with registered(("CUDNN_ATTN", Sparse)):
        selection = select(ask("self", **LAYERS["self"]), None, fake_device("sm_100", cudnn=91900))
    assert selection.backend == "TORCH_SDPA" and "exact" in selection.explain()
