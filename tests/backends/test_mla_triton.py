"""TRITON_ATTN's kernels over latents under the conformance class: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.triton_attn import TritonAttentionBackend
from omni_attn.backends.triton_mla import TritonMLABuilder
from omni_attn.kv_cache.build import make_step
from omni_attn.kv_cache.groups import init_attention_groups
from omni_attn.ops.mla import write
from omni_attn.ops.mla.operators import attend_latents, attend_ragged
from omni_attn.ops.mla.plan import LatentPlan, MLATile
from omni_attn.ops.paged.write import FP8
from omni_attn.testing import MLABackendConformance, fake_device
from omni_attn.testing.mla_harness import MLAHarness
from tests.ops.triton_here import DEVICE as PLACE
from tests.ops.triton_here import INTERPRETED, in_another_process, interpret, needs_triton

DEVICE = PLACE.type


@in_another_process
def test_in_the_interpreter() -> None:
    interpret(__file__)


def everywhere(_: torch.Tensor) -> bool:
    """For a compiler, which traces no mock."""
    return True


@contextmanager
def written_by_triton() -> Iterator[None]:
    """The write kernel runs wherever tensors are, but for fp8 in the interpreter, which loses a rounding's carry."""
    kernels = import_module("omni_attn.ops.mla.triton_write")

    def found(_: torch.Tensor, kv_cache: torch.Tensor) -> object:
        return None if INTERPRETED and kv_cache.dtype == FP8 else kernels

    with (
        mock.patch.object(write, "latent_kernels", found),
        mock.patch.object(write, "may_have_kernels", everywhere),
    ):
        yield


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
class TestTritonAttention(MLABackendConformance):
    device = DEVICE
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    heads = 4 if DEVICE == "cuda" else 2
    block_sizes = (8, 24)
    machine = None if DEVICE == "cuda" else fake_device("sm_90", packages={"triton": "3.6.0"})

    def get_backend(self) -> type[AttentionBackend]:
        return TritonAttentionBackend

    def test_steps_of_other_lengths_compile_nothing_anew(self) -> None:
        """What a second step has otherwise becomes dynamic; a page table of one column would be a case of its own."""
        compiled = CompileCounterWithBackend("aot_eager")
        torch.compiler.reset()
        page = self.block_sizes[-1]
        layer = self.layer(self.scene(block_size=page))
        run = torch.compile(layer, fullgraph=True, backend=compiled)
        counts = []
        assert layer.impl is not None
        for lengths in (((1, 9), (1, 30), (4, 12)), ((1, 50),) * 3 + ((9, 20),), ((1, 140),) * 7 + ((5, 9),)):
            scene = self.scene(lengths, block_size=page)
            layer.impl.latent_scale = 1.5 + len(lengths)  # as layers of one model may have each its own
            groups = init_attention_groups([layer], {"self": scene.pages.spec}, scene.query.device)
            call = make_step(groups, {"self": scene.common}, {"layer": self.filled(scene, layer)})["layer"]
            tensors = (scene.query, scene.latent, scene.rope_key)
            with torch.no_grad():
                output = run(*tensors, call)
                self.close(output, layer(*tensors, call).double())
            counts.append(compiled.frame_count)
        assert counts == [1, 2, 2]

    def test_the_operators_are_sound(self) -> None:
        """Schemas say what is written, and fakes what comes back."""
        size = self.latent + self.rope
        rows = {"device": self.device, "dtype": torch.int32}
        query = torch.randn(2, self.heads, size, device=self.device, dtype=self.dtype)
        cache = torch.randn(3, 8, size, device=self.device, dtype=self.dtype)
        parts = query[..., : self.latent], query[..., self.latent :]
        tables = torch.arange(2, **rows), torch.tensor([9, 3], **rows), torch.ones(2, 2, **rows)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(attend_latents, (*parts, cache, *tables, 9, 0.1, None), test_utils=checks)
        key, value = query[..., : self.nope], query[..., : self.value]
        tables = torch.tensor([0, 2], **rows), torch.tensor([0, 2], **rows), torch.tensor([2], **rows)
        given = (query[..., : self.nope + self.rope].contiguous(), key, query[:, 0, : self.rope], value)
        output = torch.zeros(2, self.heads, self.value, device=self.device, dtype=self.dtype)
        torch.library.opcheck(attend_ragged, (output, *given, *tables, 2, True, 0.1), test_utils=checks)
        new = (
            query[:, 0, : self.latent],
            query[:, 0, : self.rope],
            cache,
            torch.tensor([5, -1]).to(self.device),
        )
        torch.library.opcheck(write._write_opaquely, (*new, None), test_utils=checks)

    @pytest.mark.parametrize("splits", [2, 5])
    def test_splits(self, splits: int) -> None:
        """However the keys are split: whole blocks, a ragged one at the end, and splits without any."""
        plan = dict.fromkeys((2, 4), LatentPlan(MLATile(16, 16, 4, 1), splits))
        scene = self.scene(((1, 49), (1, 16), (1, 1), (1, 70)))
        with mock.patch.object(TritonMLABuilder, "plan_decode", return_value=plan):
            self.close(self.attend(scene), scene.expected(scale=self.scale))


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
class TestTritonWrites(MLAHarness):
    """The kernel that writes, in tests of what is written; the interpreter writes in torch elsewhere."""

    device, dtype, heads = TestTritonAttention.device, TestTritonAttention.dtype, TestTritonAttention.heads
    machine = TestTritonAttention.machine

    def get_backend(self) -> type[AttentionBackend]:
        return TritonAttentionBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return written_by_triton()

    test_the_operators_are_sound = TestTritonAttention.test_the_operators_are_sound
    test_slots = MLABackendConformance.test_slots
    test_fp8 = MLABackendConformance.test_fp8
    test_scaled_cache = MLABackendConformance.test_scaled_cache
    test_strided_inputs = MLABackendConformance.test_strided_inputs
    test_padding = MLABackendConformance.test_padding_gives_zeros_and_changes_nothing


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
class TestManyHeads(MLAHarness):
    """More heads than a program takes, and no whole number of programs."""

    device = DEVICE
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    heads = 70
    machine = TestTritonAttention.machine

    def get_backend(self) -> type[AttentionBackend]:
        return TritonAttentionBackend

    def test_each_head_counts(self) -> None:
        scene = self.scene(((1, 9), (3, 20)))
        self.close(self.attend(scene), scene.expected(scale=self.scale))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
class TestTritonLarge(TestTritonAttention):
    """The channels of DeepSeek-V3, where tiles have 64 heads, or 16."""

    dtype = torch.bfloat16
    heads = 128
    latent, rope, nope, value = 512, 64, 128, 128
    block_sizes = (64, 16)
    tolerance: float | None = 4e-2  # absorbed queries and what they attend to are rounded as well


class TestTritonFewHeads(TestTritonLarge):
    heads = 16


class TestTritonSingle(TestTritonLarge):
    dtype = torch.float32
    heads = 4
    tolerance = None
