"""One denoising step of thirty blocks: nothing waits for the device, and each kind of call is prepared once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from omni_attn import AttentionMetadata, prepare_attention
from omni_attn.errors import MetadataError
from tests.gpu.machine import ON_CPU, Call, Kernel, every_kernel, on_gpu
from tests.layer.stands import HEAD_SIZE

BLOCKS = 30
TOKENS, TEXT = 256, 256
#: Host functions that wait for the device, and operators that read a value from it.
WAITING = {
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
    *("cuStreamSynchronize", "cuCtxSynchronize", "aten::item", "aten::_local_scalar_dense"),
}
Records = dict[str, AttentionMetadata]


class Stack(nn.Module):
    """Blocks of a self and a cross layer."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        roles = ("self", "cross") * BLOCKS
        self.layers = nn.ModuleList(kernel.layer(4, HEAD_SIZE, role=role) for role in roles)

    def forward(self, video: torch.Tensor, text: torch.Tensor, records: Records) -> torch.Tensor:
        for layer in self.layers:
            seen = video if layer.role == "self" else text
            video = video + layer(video, seen, seen, records[layer.role])
        return video


def lengths_of(video: torch.Tensor, text: torch.Tensor) -> dict[str, tuple[int, int]]:
    return {"self": (video.shape[1], video.shape[1]), "cross": (video.shape[1], text.shape[1])}


def inputs(kernel: Kernel, batch: int = 2) -> Call:
    return kernel.tensors(batch, TOKENS, TEXT)[:2]


def dense(kernel: Kernel) -> Records:
    return {"self": AttentionMetadata(), "cross": AttentionMetadata()}


def padded(kernel: Kernel) -> Records:
    """A prompt's mask, which only the device knows."""
    mask = torch.arange(TEXT, device=kernel.device)[None] < torch.tensor(
        [[TEXT], [140]], device=kernel.device
    )
    return {"self": AttentionMetadata(), "cross": AttentionMetadata(attn_mask=mask)}


def packed(kernel: Kernel) -> Records:
    return {
        "self": AttentionMetadata(cu_seqlens_q=(0, 128, TOKENS)),
        "cross": AttentionMetadata(cu_seqlens_q=(0, 128, TOKENS), cu_seqlens_k=(0, 128, TEXT)),
    }


def step(model: Stack, call: Call, records: Records) -> torch.Tensor:
    prepare_attention(model, records, lengths_of(*call))
    output: torch.Tensor = model(*call, records)
    return output


def warmed(kernel: Kernel, make: Callable[[Kernel], Records]) -> tuple[Stack, Call]:
    """A model that ran a step before, for kernels that compile or allocate with their first call."""
    model, call = Stack(kernel), inputs(kernel, batch=1 if make is packed else 2)
    try:
        step(model, call, make(kernel))
    except MetadataError as refusal:
        if not any(
            kernel.limits(*call, call[1], record).told_by(str(refusal)) for record in make(kernel).values()
        ):
            raise
        pytest.skip(f"{kernel} does not claim these records: {refusal}")
    return model, call


def builds_once(kernel: Kernel, make: Callable[[Kernel], Records]) -> None:
    """Each record is prepared by one build, whatever the number of layers, and forward prepares nothing."""
    model, call = warmed(kernel, make)
    builders = {type(layer.active_route.builder) for layer in model.layers}
    assert len(builders) == 1
    builder, built = builders.pop(), list[Any]()
    original = builder.build

    def counted(self: Any, record: AttentionMetadata, lengths: tuple[int, int]) -> Any:
        built.append(record)
        return original(self, record, lengths)

    records = make(kernel)
    with patch.object(builder, "build", counted):
        prepare_attention(model, records, lengths_of(*call))
        assert built == list(records.values())
        model(*call, records)
        model(*call, records)
    assert built == list(records.values())
    assert all(len(record.memo) + len(record.step_memo) == 1 for record in records.values())


def waiting(call: Callable[[], object]) -> list[str]:
    """Names of what waited for the device while something ran; skips where the profiler sees no device."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function("one step"):
            call()
        torch.cuda.synchronize()
    events = list(profiler.events())
    if not any("LaunchKernel" in event.name for event in events):
        pytest.skip("the profiler sees no kernels on this machine")
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    span = next(event.time_range for event in on_host if event.name == "one step")
    inside = (e for e in on_host if span.start <= e.time_range.start <= span.end)  # profilers wait too, later
    found = [event.name for event in inside if event.name in WAITING]
    return found + [event.name for event in events if event.name.startswith("Memcpy DtoH")]


@pytest.mark.parametrize("make", [dense, padded, packed])
def test_each_record_is_built_once_on_the_cpu(make: Callable[[Kernel], Records]) -> None:
    builds_once(ON_CPU, make)


class TestOnGPU:
    pytestmark = on_gpu

    @every_kernel
    @pytest.mark.parametrize("make", [dense, padded, packed])
    def test_each_record_is_built_once(self, kernel: Kernel, make: Callable[[Kernel], Records]) -> None:
        with torch.no_grad():
            builds_once(kernel, make)

    @every_kernel
    @pytest.mark.parametrize("make", [dense, padded, packed])
    def test_torch_sees_no_synchronisation(self, kernel: Kernel, make: Callable[[Kernel], Records]) -> None:
        with torch.no_grad():
            model, call = warmed(kernel, make)
            records = make(kernel)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                step(model, call, records)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    @every_kernel
    @pytest.mark.parametrize("make", [dense, padded, packed])
    def test_the_profiler_sees_no_synchronisation(
        self, kernel: Kernel, make: Callable[[Kernel], Records]
    ) -> None:
        with torch.no_grad():
            model, call = warmed(kernel, make)
            records = make(kernel)
            assert waiting(lambda: step(model, call, records)) == []
