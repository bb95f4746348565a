"""The built-in kernels of this machine's GPU, by name and variant, as recipes want them.

Every name and variant is collected on every machine; what the facts refuse here is skipped with their reasons.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from omni_attn import AttentionMetadata
from omni_attn.backends import registry
from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.registry import DiffusionAttentionBackendEnum
from omni_attn.facts import AttentionRequest
from omni_attn.ops.reference import reference_attention
from omni_attn.platforms import OmniPlatform, current_omni_platform
from tests.layer.stands import (
    HEAD_SIZE,
    Stand,
    assert_close,
    load,
    one_token_blocks,
    outcome_of,
    published_grid,
    tensors,
)

#: Marks of a module whose tests run on the GPU. Kernel packages warn about much that is not ours.
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an NVIDIA GPU, found none on this machine"
    ),
    pytest.mark.filterwarnings("default"),
]

Call = list[torch.Tensor]


@dataclass(frozen=True)
class Kernel(Stand):
    """A stand without stand-ins: the real kernel in bfloat16, on a device of this machine."""

    device: str = "cuda"

    @property
    def platform(self) -> OmniPlatform:  # type: ignore[override]
        """This machine's."""
        return current_omni_platform(self.device)

    @property
    def backend(self) -> type[AttentionBackend]:
        """The class that this machine has for the name."""
        return registry.load_backend(self.platform.class_path(self.name), self.name)

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16."""
        return torch.bfloat16

    def kernels(self, *, publishes_grid: bool = True) -> AbstractContextManager[Any]:
        """Nothing takes the place of anything; records state the grid that a backend needs."""
        if publishes_grid and self.facts.needs_video_grid:
            return published_grid(self.builder_cls)
        if publishes_grid and self.name == "BLOCK_SUMMARY_ATTN":
            return one_token_blocks(self.builder_cls)
        return nullcontext()

    def why_not(self, **more: Any) -> list[str]:
        """Reasons of the facts why a plain layer, or one with more needs, cannot run here; empty = it can."""
        needs: dict[str, Any] = {"num_heads": 4, "head_size": HEAD_SIZE, "dtype": "bfloat16", **more}
        request = AttentionRequest(role="self", video_grid=True, **needs)
        return self.backend.validate_configuration(request, self.platform.device, self.spec)

    def tensors(self, batch: int, queries: int, keys: int, **shape: int) -> Call:
        """Random bfloat16 query, key and value on the device."""
        return [x.to(self.device, self.dtype) for x in tensors(batch, queries, keys, **shape)]

    def served(self, *call: Any, **geometry: Any) -> list[torch.Tensor]:
        """What a layer gives, in a list; an empty one for a call that the facts do not claim, once it was refused."""
        return self._held_to_facts(
            [lambda: self.run_layer(*call, **geometry)], self.limits(*call, **geometry)
        )

    def close(self, output: torch.Tensor, expected: torch.Tensor) -> None:
        """Within bfloat16's tolerance of float64; kernels that are not exact within twice their documented error.

        One that selects blocks has them all selected here, or blocks of one token, and is exact then.
        """
        facts = self.backend.facts
        assert bool(output.isfinite().all()), "not a finite number"
        if facts.numerics == "exact" or facts.selects_blocks:
            assert_close(output, expected)
            return
        documented = re.match(r"[\d.]+(e-?\d+)?", facts.error or "")
        assert documented is not None, f"{self} is {facts.numerics}, and its facts document no error"
        error = (output.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)
        assert float(error) <= 2 * float(documented[0]), (
            f"relative error {error:.1e}, documented {facts.error}"
        )

    def forms(self) -> Iterator[tuple[str, Call, AttentionMetadata]]:
        """The kinds of call that a model makes, long enough for every kernel: name, tensors, record."""
        keep = torch.arange(256, device=self.device)[None] < torch.tensor([[200], [128]], device=self.device)
        yield "dense", self.tensors(2, 256, 256), AttentionMetadata()
        yield "padding", self.tensors(2, 256, 256), AttentionMetadata(attn_mask=keep)
        record = AttentionMetadata(attn_mask=keep, kv_lengths=(200, 128))
        yield "padding with lengths", self.tensors(2, 256, 256), record
        yield "packed", self.tensors(1, 512, 512), AttentionMetadata(cu_seqlens_q=PACKED)

    def form(self, name: str) -> tuple[Call, AttentionMetadata, torch.Tensor]:
        """Tensors, record and REF's answer of a form; skips the test where the facts do not claim it."""
        call, record = next((call, record) for known, call, record in self.forms() if known == name)
        limits = self.limits(*call, record)
        lengths = call[0].shape[1], call[1].shape[1]
        refusal = outcome_of(lambda: self.layer(4, HEAD_SIZE).prepare(record, lengths))
        if limits.must or (isinstance(refusal, str) and limits.told_by(refusal)):
            pytest.skip(f"{self} does not claim {name}: {refusal}")
        return call, record, reference(call, record)


#: Boundaries of the sequences in the packed form.
PACKED = (0, 128, 512)
FORMS = ("dense", "padding", "padding with lengths", "packed")


def reference(call: Call, record: AttentionMetadata) -> torch.Tensor:
    """REF's answer for a padding mask, or for boundaries that the host knows."""
    if record.cu_seqlens_q is None:
        return reference_attention(*call, attn_mask=record.attn_mask)[0]
    parts = (slice(*ends) for ends in pairwise(record.cu_seqlens_q))
    return torch.cat([reference_attention(*(x[:, part] for x in call))[0] for part in parts], dim=1)


def _kernels() -> list[Kernel]:
    found = []
    for name in DiffusionAttentionBackendEnum.__members__:
        facts = load(name).facts
        if not facts.stateless:
            continue
        variants = [variant.name for variant in facts.variants]
        found += [Kernel(name, variant) for variant in variants or [None]]
    return found


KERNELS = _kernels()
every_kernel = pytest.mark.parametrize("kernel", KERNELS, indirect=True, ids=str)
#: Plain torch on the CPU: shows, without a GPU, that a recipe itself is right.
ON_CPU = Kernel("TORCH_SDPA", device="cpu")
