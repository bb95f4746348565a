"""How the Wan model uses attention: under which roles, with which records, and through the layer only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import omni_attn.models
from omni_attn import Attention, prepare_attention
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.models.wan import model as wan_model
from omni_attn.models.wan.model import WanModel
from omni_attn.ops.reference import reference_attention
from omni_attn.selector import use_attention_config
from tests.models.wan.tiny_models import build_inputs, build_model


@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        ("t2v", {"attn1.attention": ("self", "self"), "attn2.attention": ("cross", "cross")}),
        (
            "i2v",
            {
                "attn1.attention": ("self", "self"),
                "attn2.attention": ("cross", "cross"),
                "attn2.image_attention": ("cross.image", "cross"),
            },
        ),
    ],
)
def test_every_attention_layer_declares_its_role(kind: str, roles: dict[str, tuple[str, str]]) -> None:
    layers = {
        name: (layer.role, layer.role_category)
        for name, layer in build_model(kind).named_modules()
        if isinstance(layer, Attention)
    }
    assert layers == {f"blocks.{i}.{name}": role for i in range(2) for name, role in roles.items()}


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_the_grid_is_published_and_prepared_once_per_forward(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(
        model: WanModel, records: dict[str, AttentionMetadata], *, lengths: dict[str, tuple[int, int]]
    ) -> None:
        calls.append((records, lengths))
        prepare_attention(model, records, lengths=lengths)

    monkeypatch.setattr(wan_model, "prepare_attention", counted)
    with torch.no_grad():
        build_model(kind)(*build_inputs(kind))
    [(records, lengths)] = calls
    assert records["self"].vsa_dit_seq_shape == (3, 2, 3)
    expected = {"self": (18, 18), "cross": (18, 512)} | ({"cross.image": (18, 7)} if kind == "i2v" else {})
    assert lengths == expected
    assert records.keys() == expected.keys()


def test_records_of_the_caller_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build_model("i2v"), build_inputs("i2v")
    records = model.attention_records((3, 2, 3))
    lengths = model.config.attention_lengths((3, 2, 3), image_tokens=7)
    with torch.no_grad():
        expected = model(*inputs)
        monkeypatch.setattr(wan_model, "prepare_attention", _must_not_run)
        for step in range(2):
            records = {role: record.at_step(step, num_steps=2) for role, record in records.items()}
            prepare_attention(model, records, lengths=lengths)
            assert torch.equal(model(*inputs, attention_records=records), expected)


def _must_not_run(*args: object, **kwargs: object) -> None:
    raise AssertionError("records were handed in")


def test_each_role_takes_what_its_own_line_says() -> None:
    with use_attention_config({"per_role": {"cross": {"backend": "TORCH_SDPA"}}}, device="cpu"):
        model = build_model("i2v")
    sources = {
        layer.role: layer.selection.source for layer in model.modules() if isinstance(layer, Attention)
    }
    assert sources == {
        "self": "platform default",
        "cross": "per_role['cross']",
        "cross.image": "per_role['cross'] (role_category)",
    }


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_equals_the_same_model_with_attention_in_float64(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build_model(kind), build_inputs(kind)

    def exact(
        layer: Attention, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata | None = None
    ) -> Tensor:
        return reference_attention(query, key, value)[0].to(query.dtype)

    with torch.no_grad():
        ours = model(*inputs)
        monkeypatch.setattr(Attention, "forward", exact)
        torch.testing.assert_close(ours, model(*inputs), atol=1e-5, rtol=1e-5)


def test_equal_blocks_compile_into_one_frame_and_a_second_length_into_one_more() -> None:
    model, inputs = build_model("i2v"), build_inputs("i2v")
    longer = (torch.cat([inputs[0], inputs[0]], dim=2), *inputs[1:])
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        expected = [model(*inputs), model(*longer)]
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(fullgraph=True, backend=counter)
        torch.testing.assert_close(model(*inputs), expected[0], atol=1e-5, rtol=1e-5)
        assert counter.frame_count == 1
        torch.testing.assert_close(model(*longer), expected[1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model(*inputs), expected[0], atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def _sources() -> list[Path]:
    return sorted(Path(omni_attn.models.__file__).parent.rglob("*.py"))


KERNELS = frozenset(
    {
        "flash_attn",
        "flash_attn_interface",
        "fa3_fwd_interface",
        "flashinfer",
        "sageattention",
        "fastvideo_kernel",
    }
)


@pytest.mark.parametrize("path", _sources(), ids=lambda path: path.stem)
def test_models_reach_attention_through_the_layer_only(path: Path) -> None:
    assert not {name.partition(".")[0] for name in _imports(path)} & (
        KERNELS | {"triton", "aiter", "xformers"}
    )
    assert "scaled_dot_product_attention" not in path.read_text(encoding="utf-8")


def test_runs_where_no_kernel_package_can_be_imported() -> None:
    program = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(KERNELS)}))
sys.modules["triton"] = None
import importlib, pkgutil
import torch
import omni_attn.models
for module in pkgutil.walk_packages(omni_attn.models.__path__, "omni_attn.models."):
    importlib.import_module(module.name)
from omni_attn.models.wan.presets import WAN_PRESETS
from omni_attn.models.wan.model import WanModel
from omni_attn.selector import use_attention_config
with use_attention_config("TORCH_SDPA", device="cpu"):
    model = WanModel(WAN_PRESETS["wan-tiny"].transformer)
with torch.no_grad():
    output = model(torch.randn(1, 16, 2, 4, 4), torch.tensor([500]), torch.randn(1, 512, 64))
assert output.isfinite().all() and output.shape == (1, 16, 2, 4, 4)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
