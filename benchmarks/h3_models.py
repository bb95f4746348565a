"""One MiniMax-H3 block with seeded weights, ours and diffusers', caught with what a whole model calls it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.vsa_inputs import DTYPE, SparseCase
from benchmarks.wan_models import Forward, add_weights, each_backend, load_peer
from omni_attn import attention_report, prepare_attention, use_attention_config
from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.models.minimax_h3.packing import pack_t2va
from omni_attn.models.minimax_h3.presets import MINIMAX_H3_PRESETS
from omni_attn.models.minimax_h3.sequence import PackedSequence

TIMES = (0.5, 0.8)  # of video and audio, somewhere in the middle


@dataclass(frozen=True)
class BlockWork:
    """A model with a single block on one packed sequence, batch 1.

    Attributes:
        folder: where the weights are; those with a gate lie beside it.
        backend: of torch.compile.
    """

    preset: str
    case: SparseCase
    folder: Path
    device: torch.device
    backend: str = "inductor"

    @property
    def gated_folder(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}-gated")

    @property
    def config(self) -> MiniMaxH3Config:
        whole = MINIMAX_H3_PRESETS[self.preset].transformer
        return replace(whole, num_layers=1, num_refiner_layers=1)

    @property
    def sequence(self) -> PackedSequence:
        """Text, audio and video of the case."""
        text, audio = self.case.segments
        size, patch = self.case.grid, self.config.patch_size
        frames, height, width = (tokens * extent for tokens, extent in zip(size, patch, strict=True))
        return pack_t2va(text, (frames, height, width), audio // 2, patch_size=patch)

    def inputs(self) -> dict[str, torch.Tensor]:
        """Arguments of a forward, which both models name alike; rows are seeded."""
        config, sequence = self.config, self.sequence.to(self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        rows = {
            "hidden_states": (sequence.video_indices, config.patch_dim),
            "audio_hidden_states": (sequence.audio_indices, config.audio_in_channels),
            "encoder_hidden_states": (sequence.text_indices, config.text_dim),
        }
        timestep, indices = sequence.timesteps(*TIMES)
        return {
            name: torch.randn(1, len(places), width, device=self.device, generator=generator)
            for name, (places, width) in rows.items()
        } | {
            "timestep": timestep,
            "timestep_indices": indices,
            "token_tags": sequence.token_tags,
            "position_ids": sequence.position_ids,
            "video_indices": sequence.video_indices,
            "audio_indices": sequence.audio_indices,
            "text_indices": sequence.text_indices,
        }


def save_block(work: BlockWork) -> None:
    """Writes seeded weights as diffusers does, and the same with a small seeded gate beside them."""
    from diffusers import MiniMaxH3Transformer3DModel

    torch.manual_seed(0)
    with torch.device(work.device):
        peer = MiniMaxH3Transformer3DModel(**work.config.to_diffusers())
    nn.Module.to(peer, DTYPE)  # its own one warns of modules that loading makes float32 again
    peer.save_pretrained(work.folder)
    width, inner = work.config.hidden_size, work.config.inner_dim
    gate = torch.randn(inner, width, generator=torch.Generator().manual_seed(1)) / width
    name = "transformer_blocks.0.attn.to_gate_compress.weight"
    add_weights(work.folder, work.gated_folder, {name: gate.to(DTYPE)})


def our_block(
    work: BlockWork, spec: Mapping[str, Any] | None, *, gated: bool = False, compiled: bool = False
) -> Forward:
    """Our block with this choice for its role; None = the platform's default.

    Raises:
        BackendRejectedError: the machine cannot run the spec; BackendImportError: its package is missing.
    """
    config, sequence = work.config, work.sequence
    lengths = config.attention_lengths(sequence.rows, len(sequence.text_indices))
    attention: dict[str, Any] = {} if spec is None else {"per_role": {"self": dict(spec)}}
    folder = work.gated_folder if gated else work.folder
    with use_attention_config(attention, device=work.device, dtype=DTYPE, lengths=lengths):
        model = MiniMaxH3Model.from_pretrained(folder, device=work.device, dtype=DTYPE).eval()
    records = model.attention_records(sequence.layout)
    prepare_attention(model, records, lengths)
    print(attention_report(model))
    return _caught(
        model, work.inputs() | {"attention_records": records}, work, compiled=compiled, fullgraph=True
    )


def peer_blocks(work: BlockWork, *, compiled: bool) -> dict[str, Forward]:
    """diffusers' block with each of its attention backends that works here."""
    from diffusers import MiniMaxH3Transformer3DModel

    def make(backend: str) -> Forward:
        model = load_peer(MiniMaxH3Transformer3DModel, work.folder, work.device, DTYPE, backend)
        return _caught(model, work.inputs(), work, compiled=compiled)

    return each_backend(make)


def _caught(
    model: Any, inputs: dict[str, Any], work: BlockWork, *, compiled: bool, fullgraph: bool = False
) -> Forward:
    """The only block with the arguments of its call in a forward of the model; the rest is let go."""
    block: nn.Module = model.transformer_blocks[0]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = block.register_forward_pre_hook(
        lambda _, given, named: calls.append((given, named)), with_kwargs=True
    )
    model(**inputs)
    handle.remove()
    ((given, named),) = calls
    if compiled:
        block.compile(fullgraph=fullgraph, backend=work.backend)
    return lambda: block(*given, **named)
