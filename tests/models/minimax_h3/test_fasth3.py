"""Adapters of FastH3: products by hand, and everything that does not fit refused before a weight is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import assign_weights
from omni_attn.models.minimax_h3.contract import FASTH3_PREVIEW, contract_of_student
from omni_attn.models.minimax_h3.fasth3 import fuse_adapter, open_adapter
from omni_attn.models.minimax_h3.loading import check_gates, convert_state_dict, read_weights
from tests.models.minimax_h3.tiny_weights import (
    CONFIG,
    assert_same_weights,
    build_reference,
    gates,
    to_native,
)

STUDENT = "FastVideo/FastVideo-FastH3-4-step-v1"
NOTES = {"format": "fastvideo-lora-v2", "finetuned_model": STUDENT}
# In bfloat16, whose spacing is 2**-7 from 1 to 2: W + B @ A needs one rounding, at the end.
BASE = {
    "a.weight": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).bfloat16(),
    "a.bias": torch.tensor([1.0, -1.0]).bfloat16(),
    "norm.weight": torch.tensor([1.0, 1.0, 1.0]).bfloat16(),
    "untouched.weight": torch.tensor([[7.0]]).bfloat16(),
}
ADAPTER = {
    "a.lora_A.weight": torch.tensor([[1.0, 0.0, -1.0], [0.5, 2.0, 0.0]]),  # rank 2
    "a.lora_B.weight": torch.tensor([[2.0, 1.0], [0.0, -4.0]]),
    "a.diff": torch.tensor([[0.25, 0.0, 0.0], [0.0, 0.0, -0.5]]),
    "a.diff_b": torch.tensor([0.5, 0.5]),
    "norm.diff": torch.tensor([0.0, 0.25, -2.0]),
}
# B @ A = [[2.5, 2, -2], [-2, -8, 0]]
FUSED = {
    "a.weight": torch.tensor([[3.75, 4.0, 1.0], [2.0, -3.0, 5.5]]).bfloat16(),
    "a.bias": torch.tensor([1.5, -0.5]).bfloat16(),
    "norm.weight": torch.tensor([1.0, 1.25, -1.0]).bfloat16(),
    "untouched.weight": torch.tensor([[7.0]]).bfloat16(),
}


# What gates are projected beside.
QUERIES = {name.replace("to_gate_compress", "to_q"): torch.zeros_like(gate) for name, gate in gates().items()}


def save(folder: Path, tensors: dict[str, Tensor], notes: dict[str, str] = NOTES) -> Path:
    path = folder / "adapter_model.safetensors"
    save_file(tensors, path, metadata=notes)
    return path


def test_products_and_differences_by_hand(tmp_path: Path) -> None:
    base = {name: tensor.clone() for name, tensor in BASE.items()}
    assert_same_weights(fuse_adapter(base, save(tmp_path, ADAPTER)), FUSED)
    assert_same_weights(base, BASE)


def test_the_sum_is_rounded_once(tmp_path: Path) -> None:
    """Two halves of a step of bfloat16 are a step; rounded one by one they vanish (ties go to even)."""
    half = torch.tensor([[2.0**-8]])
    adapter = {"a.lora_A.weight": half, "a.lora_B.weight": torch.ones(1, 1), "a.diff": half.clone()}
    fused = fuse_adapter({"a.weight": torch.ones(1, 1).bfloat16()}, save(tmp_path, adapter))
    assert fused["a.weight"].item() == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_fused_weight_keeps_the_dtype_of_the_base(dtype: torch.dtype, tmp_path: Path) -> None:
    base = {name: tensor.to(dtype) for name, tensor in BASE.items()}
    assert_same_weights(
        fuse_adapter(base, save(tmp_path, ADAPTER)),
        {name: tensor.to(dtype) for name, tensor in FUSED.items()},
    )


def test_gates_are_added_and_other_weights_replaced(tmp_path: Path) -> None:
    added = {name.replace(".weight", ".set_weight"): gate for name, gate in gates().items()}
    path = save(tmp_path, {**added, "norm.set_weight": torch.tensor([9.0, 8.0, 7.0])})
    base = BASE | QUERIES
    fused = fuse_adapter(base, path)
    assert_same_weights(fused, {**base, **gates(), "norm.weight": torch.tensor([9.0, 8.0, 7.0]).bfloat16()})
    check_gates(CONFIG, fused, "here")
    adapter = open_adapter(path)
    assert adapter.has_gates and adapter.student == STUDENT
    assert contract_of_student(adapter.student) is FASTH3_PREVIEW
    assert not open_adapter(save(tmp_path, ADAPTER)).has_gates


@pytest.mark.parametrize(
    "student", ["", "somebody/FastH3-4-step", "FastVideo/Other-4-step", "FastVideo/FastH3-16"]
)
def test_other_adapters_keep_the_schedule_of_the_base(student: str, tmp_path: Path) -> None:
    adapter = open_adapter(save(tmp_path, ADAPTER, NOTES | {"finetuned_model": student}))
    assert contract_of_student(adapter.student) is None


def test_new_gates_have_the_dtype_of_the_base(tmp_path: Path) -> None:
    """Else a model in the dtypes of its files could not multiply its rows with them."""
    added = {name.replace(".weight", ".set_weight"): gate.float() for name, gate in gates().items()}
    assert_same_weights(fuse_adapter(QUERIES, save(tmp_path, added)), {**QUERIES, **gates()})


@pytest.mark.parametrize(
    ("block", "gate", "text"),
    [
        (
            1,
            torch.ones(5, 48),
            r"1\.attn\.to_gate_compress\.weight is \[64, 48\] and its set_weight \[5, 48\]",
        ),
        (
            7,
            torch.ones(64, 48),
            r"7\.attn\.to_gate_compress\.weight is not in the base checkpoint, and only gates",
        ),
    ],
)
def test_gates_of_another_model_are_refused(block: int, gate: Tensor, text: str, tmp_path: Path) -> None:
    path = save(tmp_path, {f"transformer_blocks.{block}.attn.to_gate_compress.set_weight": gate})
    with pytest.raises(ConfigError, match=text):
        fuse_adapter(QUERIES, path)


def without(*keys: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: [tensors.pop(key) for key in keys] and None


def with_(**more: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({key.replace("__", "."): tensor for key, tensor in more.items()})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_(other__diff=torch.ones(2)), r"other\.weight is not in the base checkpoint\."),
        (with_(untouched__diff_b=torch.ones(2)), r"untouched\.bias is not in the base checkpoint"),
        (
            with_(other__set_weight=torch.ones(2)),
            r"other\.weight is not in the base checkpoint, and only gates of its blocks may be new",
        ),
        (without("a.lora_B.weight"), r"a\.weight has one of lora_A and lora_B, and needs both"),
        (with_(norm__diff=torch.ones(2)), r"norm\.weight is \[3\] and its diff \[2\]"),
        (
            with_(untouched__set_weight=torch.ones(1)),
            r"untouched\.weight is \[1, 1\] and its set_weight \[1\]",
        ),
        (with_(norm__set_weight=torch.ones(3)), r"norm\.weight is both replaced and changed"),
        (
            with_(a__lora_A__weight=torch.ones(2, 4)),
            r"a\.weight is \[2, 3\] and its lora_B @ lora_A \[2, 2\] @ \[2, 4\]",
        ),
        (with_(a__lora_A__weight=torch.ones(())), r"lora_B @ lora_A \[2, 2\] @ \[\]"),
        (with_(a__lora_A__weight=torch.ones(3, 3)), r"lora_B @ lora_A \[2, 2\] @ \[3, 3\]"),
        (
            with_(norm__lora_A__weight=torch.ones(1, 3), norm__lora_B__weight=torch.ones(3, 1)),
            r"norm\.weight is \[3\] and its lora_B @ lora_A",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Callable[[dict[str, Tensor]], None], text: str, tmp_path: Path
) -> None:
    tensors = dict(ADAPTER)
    change(tensors)
    path = save(tmp_path, tensors)
    with pytest.raises(ConfigError, match=text) as caught:
        fuse_adapter(BASE, path)
    assert str(path) in str(caught.value) and "Nothing was changed" in str(caught.value)


def test_a_factorised_base_is_refused(tmp_path: Path) -> None:
    """Its modulation has columns of another meaning, which only look like a number that does not fit."""
    name = "norm_out.linear"
    path = save(
        tmp_path, {f"{name}.lora_A.weight": torch.ones(2, 32), f"{name}.lora_B.weight": torch.ones(4, 2)}
    )
    with pytest.raises(ConfigError, match=r"is \[4, 3\] and .* \(without adaln_rank\)"):
        fuse_adapter({f"{name}.weight": torch.ones(4, 3)}, path)


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("a.diff_m", torch.ones(2)),
        ("a.alpha", torch.ones(())),
        ("a.weight", torch.ones(2)),
        ("untouched.diff", torch.ones(1, 1, dtype=torch.int8)),
    ],
)
def test_unknown_tensors_are_refused(key: str, tensor: Tensor, tmp_path: Path) -> None:
    path = save(tmp_path, {**ADAPTER, key: tensor})
    with pytest.raises(ConfigError, match=rf"1 tensors of no known kind: {key} \((float32|int8)\)\. Known"):
        open_adapter(path)


@pytest.mark.parametrize("found", [{}, {"format": "pt"}, {"format": "fastvideo-lora-v3"}])
def test_another_container_is_refused(found: dict[str, str], tmp_path: Path) -> None:
    path = save(tmp_path, ADAPTER, found)
    with pytest.raises(
        ConfigError, match=f"format is {found.get('format')!r}, and must be 'fastvideo-lora-v2'"
    ):
        open_adapter(path)


@pytest.mark.parametrize(
    ("note", "found"), [("low_rank_tensors", 2), ("diff_tensors", 3), ("set_weight_tensors", 0)]
)
def test_a_file_that_is_not_whole_is_refused(note: str, found: int, tmp_path: Path) -> None:
    open_adapter(save(tmp_path, ADAPTER, NOTES | {note: str(found)}))
    path = save(tmp_path, ADAPTER, NOTES | {note: "9"})
    with pytest.raises(ConfigError, match=f"{note} = 9 and holds {found}: it is not whole"):
        open_adapter(path)


def test_a_folder_with_one_adapter_is_enough(tmp_path: Path) -> None:
    path = save(tmp_path, ADAPTER)
    assert open_adapter(tmp_path).source == path
    renamed = path.rename(tmp_path / "rank.64.safetensors")
    assert open_adapter(tmp_path).source == renamed
    save(tmp_path, ADAPTER)
    assert open_adapter(tmp_path).source == path


def test_several_adapters_are_a_question(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not one adapter; safetensors files found: none"):
        open_adapter(tmp_path / "absent.safetensors")
    for variant in ("dense-datafree", "vsa-datafree"):
        (tmp_path / variant).mkdir()
        save(tmp_path / variant, ADAPTER)
    with pytest.raises(ConfigError, match=r"found: dense-datafree/adapter_model\.safetensors, vsa-datafree/"):
        open_adapter(tmp_path)


def test_weights_are_fused_one_by_one_while_they_are_loaded(tmp_path: Path) -> None:
    """Then cast: a student is rounded as its base is stored, whatever dtype is asked for."""
    model = nn.Module()
    model.a, model.norm = nn.Linear(3, 2, device="meta"), nn.RMSNorm(3, device="meta")
    adapter = open_adapter(save(tmp_path, ADAPTER))
    base = {name: tensor for name, tensor in BASE.items() if not name.startswith("untouched")}
    calls: list[str] = []

    def finish(name: str, weight: Tensor) -> Tensor:
        calls.append(name)
        return adapter.fuse(name, weight)

    assign_weights(
        model,
        adapter.fit(base),
        device=None,
        dtype=torch.float32,
        keeps_float32=lambda name: False,
        source="here",
        finish=finish,
    )
    assert calls == ["a.weight", "a.bias", "norm.weight"]
    assert_same_weights(dict(model.state_dict()), {name: FUSED[name].float() for name in base})


@pytest.mark.parametrize("is_native", [False, True])
def test_an_adapter_in_diffusers_names_fits_bases_of_both_spellings(is_native: bool, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in build_reference().state_dict().items()}
    stored = to_native(state) if is_native else state
    base = tmp_path / "base"
    base.mkdir()
    stem = "model" if is_native else "diffusion_pytorch_model"
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, base / f"{stem}.safetensors")
    generator = torch.Generator().manual_seed(2)
    adapter: dict[str, Tensor] = {}
    expected = convert_state_dict(stored, CONFIG)
    for name, weight in state.items():
        if weight.ndim == 2:
            low, high = (
                torch.randn(3, weight.shape[1], generator=generator),
                torch.randn(len(weight), 3, generator=generator),
            )
            module = name.removesuffix(".weight")
            adapter |= {f"{module}.lora_A.weight": low, f"{module}.lora_B.weight": high}
            expected[name] = (weight.double() + high.double() @ low.double()).to(weight.dtype)
    adapter |= {name.replace(".weight", ".set_weight"): gate for name, gate in gates().items()}
    found, finish = read_weights(base, CONFIG, adapter=save(tmp_path, adapter))
    assert finish is not None and found.keys() == (expected | gates()).keys()
    for name, weight in (expected | gates()).items():
        torch.testing.assert_close(finish(name, found[name]), weight, atol=1e-5, rtol=2**-7)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_an_adapter_with_gates_in_part_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    build_reference().save_pretrained(base)
    name = "transformer_blocks.1.attn.to_gate_compress.set_weight"
    with pytest.raises(ConfigError, match=r"base with .*adapter_model.*of 2 weights 1 are missing"):
        read_weights(base, CONFIG, adapter=save(tmp_path, {name: torch.ones(64, 48)}))


def test_an_adapter_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no tensor"):
        open_adapter(save(tmp_path, {}))
