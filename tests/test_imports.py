"""What importing loads, seen from a fresh interpreter, and what optional packages can break: their own backend."""

from __future__ import annotations

import json

import pytest

from omni_attn.errors import BackendImportError
from omni_attn.layer import Attention
from omni_attn.report import attention_report
from omni_attn.selector import use_attention_config
from omni_attn.testing import fake_device, fake_kernels, fake_package
from tests.selection.fresh import run_fresh

KERNELS = (
    *("flash_attn", "flash_attn_interface", "fa3_fwd_interface", "flashinfer", "sageattention", "sageattn3"),
    *("fastvideo_kernel", "aiter", "mindiesd", "kernels", "xformers"),
)
EXTRAS = ("diffusers", "transformers", "accelerate", "safetensors", "matplotlib", "PIL")
HEAVY = ("torch", "triton", "pydantic", *KERNELS, *EXTRAS)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMNI_ATTN_BACKEND", "DIFFUSION_ATTENTION_BACKEND"):
        monkeypatch.delenv(variable, raising=False)


def loaded_by(program: str, modules: tuple[str, ...] = HEAVY) -> set[str]:
    return set(run_fresh(f"{program}\nimport sys\nprint(*(set({modules}) & set(sys.modules)))").split())


@pytest.mark.parametrize(
    ("program", "allowed"),
    [
        ("import omni_attn; assert omni_attn.__version__ and dir(omni_attn)", set()),
        ("import omni_attn.errors", set()),
        ("import omni_attn.facts; omni_attn.facts.DeviceInfo(kind='cpu', name='cpu')", set()),
        (
            "from omni_attn import AttentionConfig; AttentionConfig(default='SDPA').resolve('self')",
            {"pydantic"},
        ),
        ("from omni_attn import load_config; load_config('{default: SDPA}')", {"pydantic"}),
        (
            "from omni_attn.backends.registry import registered_names; registered_names()",
            {"pydantic", "torch"},
        ),
    ],
)
def test_an_import_loads_no_more_than_it_needs(program: str, allowed: set[str]) -> None:
    assert loaded_by(program) <= allowed


def test_a_layer_loads_no_collectives() -> None:
    """A torch that was built without torch.distributed runs models all the same."""
    assert not loaded_by("import omni_attn.layer", ("torch.distributed._functional_collectives",))
    assert loaded_by("import omni_attn.parallel.connection", ("torch.distributed._functional_collectives",))


def test_importing_all_of_it_imports_no_kernel_package_and_no_extra() -> None:
    program = """
import importlib, pkgutil, omni_attn
for module in pkgutil.walk_packages(omni_attn.__path__, "omni_attn."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    assert loaded_by(program, (*KERNELS, *EXTRAS)) == set()


def test_every_public_name_is_there() -> None:
    names = json.loads(
        run_fresh(
            "import json, omni_attn\n"
            "print(json.dumps([n for n in omni_attn.__all__ if getattr(omni_attn, n).__name__ == n]))"
        )
    )
    assert set(names) >= {
        *("Attention", "AttentionConfig", "AttentionSpec", "AttentionMetadata", "load_config"),
        *("use_attention_config", "prepare_attention", "get_attn_backend_for_role", "attention_report"),
        *("register_diffusion_backend", "DiffusionAttentionBackendEnum"),
    }


# --- packages that are missing or broken

ABSENT = "sys.modules.update(dict.fromkeys(NAMES))"
RAISING = """
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in NAMES:
            raise RuntimeError(f'{name} is broken')
sys.meta_path.insert(0, Broken())
"""
USE_IT = f"""
import sys
NAMES = {(*KERNELS, "triton")}
SPOIL
import torch
from omni_attn import Attention, AttentionMetadata, use_attention_config
from omni_attn.diagnosis import diagnose
from omni_attn.testing import fake_device
H100 = fake_device("sm_90", packages={{"flash-attn": "2.8.3", "fa3-fwd": "0.0.3"}})
query = torch.randn(1, 4, 2, 8)
for config, platform in ((None, fake_device("cpu")), ("TORCH_SDPA", H100), (None, H100)):
    with use_attention_config(config, platform=platform):
        layer = Attention(2, 8, role="self", mask_usage="never")
    layer(query, query, query, AttentionMetadata())
    print(layer.selection.backend)
for variant in ("fa2", "fa3"):
    with use_attention_config({{"default": {{"backend": "FLASH_ATTN", "variant": variant}}}}, platform=H100):
        try:
            Attention(2, 8, role="self")
        except ImportError as error:
            assert "FLASH_ATTN" in str(error) and "flash" in str(error), error
            print("refused")
"""


@pytest.mark.parametrize("spoil", [ABSENT, RAISING], ids=["set to None", "raising"])
def test_packages_that_cannot_be_imported_break_their_own_backend_only(spoil: str) -> None:
    printed = run_fresh(USE_IT.replace("SPOIL", spoil))
    assert printed.split() == ["TORCH_SDPA"] * 3 + ["refused"] * 2


@pytest.mark.parametrize(
    "error", [ImportError("undefined symbol: x"), OSError("no libcuda"), RuntimeError("old")]
)
def test_a_broken_package_that_a_default_would_take_is_passed_over_with_its_reason(error: Exception) -> None:
    device = fake_device("sm_90", packages={"fa3-fwd": "0.0.3"}, cudnn=91900)
    with fake_package("fa3_fwd_interface", raises=error), fake_kernels("CUDNN_ATTN"):
        with use_attention_config({}, platform=device, dtype="bfloat16"):
            layer = Attention(2, 64, role="self", mask_usage="never")
        with (
            use_attention_config("FLASH_ATTN", platform=device, dtype="bfloat16"),
            pytest.raises(BackendImportError, match=str(error)) as caught,
        ):
            Attention(2, 64, role="self", mask_usage="never")
    assert caught.value.__cause__ is not None
    selection = layer.selection
    assert selection is not None and (selection.backend, selection.source) == (
        "CUDNN_ATTN",
        "platform default",
    )
    rejected = selection.verdicts[0]
    assert rejected.backend == "FLASH_ATTN" and not rejected.accepted
    assert str(error) in selection.explain() and str(error) in attention_report(layer).rows[0].reason


def test_the_package_that_works_again_is_taken_again() -> None:
    """One layer's bad luck is no verdict on the next layer."""
    device = fake_device("sm_90", packages={"fa3-fwd": "0.0.3"}, cudnn=91900)
    names = []
    for kernels in (
        fake_package("fa3_fwd_interface", raises=OSError("x")),
        fake_kernels("FLASH_ATTN", "fa3"),
    ):
        with kernels, fake_kernels("CUDNN_ATTN"), use_attention_config({}, platform=device, dtype="bfloat16"):
            selection = Attention(2, 64, role="self", mask_usage="never").selection
            names.append(selection and selection.backend)
    assert names == ["CUDNN_ATTN", "FLASH_ATTN"]
