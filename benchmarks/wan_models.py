"""One forward of a Wan preset, ours and diffusers', with the same seeded weights, for the scripts that time it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.rounds import shuffled_rounds
from omni_attn import attention_report, use_attention_config
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.presets import WAN_PRESETS
from omni_attn.tuning.clocks import clock_for

ROUNDS = 7
TEXT_TOKENS = 512
PEER_BACKENDS = ("native", "_native_cudnn", "_flash_3")
_WEIGHTS = "diffusion_pytorch_model"

Forward = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One candidate: median milliseconds, and how far its output is from diffusers' native eager one."""

    name: str
    compiled: bool
    milliseconds: float
    difference: float


@dataclass(frozen=True)
class Workload:
    """A forward with batch 1.

    Attributes:
        folder: where the transformer's weights are.
        latents: frames, height and width; 81 frames of 480 x 832 unless told otherwise.
        backend: of torch.compile.
    """

    preset: str
    folder: Path
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    latents: tuple[int, int, int] = (21, 60, 104)
    text_tokens: int = TEXT_TOKENS
    backend: str = "inductor"

    @property
    def config(self) -> WanConfig:
        return WAN_PRESETS[self.preset].transformer

    @property
    def tokens(self) -> int:
        """Of self-attention."""
        frames, height, width = self.config.token_grid(*self.latents)
        return frames * height * width

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Seeded latents, timestep and text."""
        generator = torch.Generator(self.device).manual_seed(0)
        latents, text = (
            torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator)
            for shape in (
                (1, self.config.in_channels, *self.latents),
                (1, self.text_tokens, self.config.text_dim),
            )
        )
        return latents, torch.tensor([500.0], device=self.device), text


def save_weights(work: Workload) -> None:
    """Writes seeded weights into the workload's folder as diffusers does."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    with torch.device(work.device):
        peer = WanTransformer3DModel(**work.config.to_diffusers())
    peer.save_pretrained(work.folder)


def save_gates(work: Workload, folder: Path) -> None:
    """Writes a second checkpoint: the workload's weights, and a small seeded gate for each block's coarse branch."""
    width, generator = work.config.dim, torch.Generator().manual_seed(1)
    gates = {}
    for block in range(work.config.num_layers):
        name = f"blocks.{block}.to_gate_compress"
        gates[f"{name}.weight"] = torch.randn(width, width, generator=generator) / width
        gates[f"{name}.bias"] = torch.randn(width, generator=generator) / 10
    add_weights(work.folder, folder, gates)


def add_weights(whole: Path, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Writes a second checkpoint of a transformer: the files of the first one, and more weights beside them."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_bytes((whole / "config.json").read_bytes())
    shards = dict.fromkeys(weights, "more.safetensors")
    for path in whole.glob(f"{_WEIGHTS}*.safetensors"):
        (folder / f"whole-{path.name}").symlink_to(path.resolve())
        with safe_open(path, framework="pt") as stored:
            shards.update(dict.fromkeys(stored.keys(), f"whole-{path.name}"))
    save_file(weights, folder / "more.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": shards})
    (folder / f"{_WEIGHTS}.safetensors.index.json").write_text(index, encoding="utf-8")


def peer_forwards(work: Workload, *, compiled: bool) -> dict[str, Forward]:
    """diffusers with each of its own backends that works here; the others are named with the reason."""
    return each_backend(lambda backend: peer_forward(work, backend, compile_blocks=compiled))


def each_backend(make: Callable[[str], Forward]) -> dict[str, Forward]:
    """Forwards by name, made for each of diffusers' backends that works here; the others are named with the reason."""
    found = {}
    for backend in PEER_BACKENDS:
        try:
            forward = make(backend)
            forward()
        except Exception as error:
            print(f"diffusers {backend}: {type(error).__name__}: {str(error).partition(chr(10))[0][:120]}")
        else:
            found[f"diffusers {backend}"] = forward
    return found


def peer_forward(
    work: Workload, backend: str, *, compile_blocks: bool = False, compile_whole: bool = False
) -> Forward:
    """diffusers' model with one of its attention backends."""
    from diffusers import WanTransformer3DModel

    model = load_peer(WanTransformer3DModel, work.folder, work.device, work.dtype, backend)
    if compile_blocks:
        for block in model.blocks:
            block.compile(backend=work.backend)
    call = torch.compile(model, backend=work.backend) if compile_whole else model
    latents, timestep, text = work.inputs()
    return lambda: call(latents, timestep, text, return_dict=False)[0]


def load_peer(model_cls: Any, folder: Path, device: torch.device, dtype: torch.dtype, backend: str) -> Any:
    """A model of diffusers with one of its attention backends."""
    from diffusers.models.attention_dispatch import attention_backend

    model = model_cls.from_pretrained(folder, torch_dtype=dtype).to(device).eval()
    with attention_backend():  # each model keeps its own choice; the process's, which is set too, is put back
        model.set_attention_backend(backend)
    return model


def our_forward(
    work: Workload, attention: dict[str, Any], *, compiled: bool, folder: Path | None = None
) -> Forward:
    """Our model with an attention section, from the workload's folder or another one with its weights."""
    lengths = {"self": (work.tokens, work.tokens), "cross": (work.tokens, work.text_tokens)}
    with use_attention_config(attention, device=work.device, dtype=work.dtype, lengths=lengths):
        model = WanModel.from_pretrained(folder or work.folder, device=work.device, dtype=work.dtype).eval()
    print(attention_report(model))
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True, backend=work.backend)
    inputs = work.inputs()
    return lambda: model(*inputs)


def measure(
    forwards: dict[str, Forward], expected: torch.Tensor, *, compiled: bool, rounds: int = ROUNDS
) -> list[Row]:
    """Shuffled rounds of all candidates, after two calls each."""
    differences = {}
    for name, forward in forwards.items():
        start = time.perf_counter()
        output = forward().float()
        differences[name] = ((output - expected).norm() / expected.norm()).item()
        if compiled:
            print(f"{name}: first compiled call took {time.perf_counter() - start:.0f} s")
        forward()
    clock = clock_for(expected.device)
    times: dict[str, list[float]] = {name: [] for name in forwards}
    for _, name in shuffled_rounds(forwards, rounds, seed=0):
        times[name].append(clock.milliseconds(forwards[name]))
    return [
        Row(name, compiled, statistics.median(values), differences[name]) for name, values in times.items()
    ]


def fastest_of_diffusers(rows: list[Row]) -> float:
    """Milliseconds of its fastest backend."""
    return min(row.milliseconds for row in rows if row.name.startswith("diffusers"))
