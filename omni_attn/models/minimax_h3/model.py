"""The MiniMax-H3 diffusion transformer: video and audio from one packed sequence. State-dict keys are diffusers'.

Shape letters: B batch, S rows of the packed sequence, of which Nv, Na and Nt are video, audio and text; M distinct
timesteps.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import Tensor, nn

from omni_attn.backends.abstract import AttentionImpl
from omni_attn.backends.metadata import AttentionMetadata, VideoLayout
from omni_attn.errors import MetadataError
from omni_attn.models.layers import EmbeddingMLP
from omni_attn.models.minimax_h3.attention.fastvideo_h3 import MiniMaxH3VSAImpl
from omni_attn.models.minimax_h3.block import MiniMaxH3Block, OutputNorm, Records
from omni_attn.models.minimax_h3.config import NUM_MODALITIES, REFINER_ROLE, MiniMaxH3Config
from omni_attn.models.minimax_h3.embeddings import TokenRefiner, embed_time
from omni_attn.models.minimax_h3.gate import CompressionGate
from omni_attn.models.minimax_h3.inputs import Kind, check_inputs, check_records, check_text, padding_behind
from omni_attn.models.minimax_h3.pretrained import load_pretrained
from omni_attn.models.minimax_h3.rope import build_rope_table
from omni_attn.models.minimax_h3.rows import rows_here
from omni_attn.parallel.context import current_parallel
from omni_attn.preparation import prepare_attention


class MiniMaxH3Model(nn.Module):
    """Predicts the flow velocities of noisy video and audio latents in one packed sequence.

    Built inside `use_attention_config(...)`, each attention layer takes the backend that is configured for its role.
    Built inside `use_parallel(...)`, each rank transforms its share of the rows, and is given and gives back all.

    Args:
        config: what it is made of.
        vsa_impl: what runs in the main blocks where FASTVIDEO_VSA is chosen, in place of its own impl.
    """

    def __init__(self, config: MiniMaxH3Config, *, vsa_impl: type[AttentionImpl] = MiniMaxH3VSAImpl) -> None:
        super().__init__()
        self.config = config
        self.proj_in = nn.Linear(config.patch_dim, config.hidden_size)
        self.audio_proj_in = nn.Linear(config.audio_in_channels, config.hidden_size)
        self.context_embedder = nn.Linear(config.text_dim, config.hidden_size)
        self.time_embedder = EmbeddingMLP(
            config.freq_dim, config.time_embed_hidden_dim, nn.SiLU(), config.time_embed_dim
        )
        self.adaln_basis = (
            None
            if config.adaln_rank is None
            else nn.Linear(config.time_embed_dim, config.adaln_rank, bias=False)
        )
        self.token_refiner = TokenRefiner(config)
        self.transformer_blocks = nn.ModuleList(
            MiniMaxH3Block(config, f"transformer_blocks.{index}", vsa_impl)
            for index in range(config.num_layers)
        )
        self.norm_out = OutputNorm(config)
        self.proj_out = nn.Linear(config.hidden_size, config.patch_dim)
        self.audio_proj_out = nn.Linear(config.hidden_size, config.audio_in_channels)
        self.parallel = current_parallel()
        self._gates = [module for module in self.modules() if isinstance(module, CompressionGate)]

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        adapter: str | os.PathLike[str] | None = None,
        vsa_impl: type[AttentionImpl] = MiniMaxH3VSAImpl,
    ) -> MiniMaxH3Model:
        """The model in a transformer's own folder: config.json beside safetensors, whole or sharded.

        Weights are read one at a time into a model without storage, so nothing is held twice. Projections of patches,
        the time embedder and both heads stay in float32, as the published models were trained; so does the modulation
        of factorised checkpoints. The model has gates of video sparse attention where weights or adapter have them.

        Args:
            folder: as diffusers' `save_pretrained` writes it, or the first release's.
            device: where the weights go, and what attention backends are selected for. None: to the CPU, and
                backends are selected for the device of `use_attention_config`, or this machine's best one.
            dtype: of all other weights, a torch dtype or its name; as stored if None.
            adapter: a FastH3 adapter, which is fused into the weights.
            vsa_impl: see the class.

        Raises:
            ConfigError: files are missing, broken, or of a kind that is not supported, or the weights do not fit
                config.json; all problems at once.
        """
        build = partial(cls, vsa_impl=vsa_impl)
        return load_pretrained(build, folder, device=device, dtype=dtype, adapter=adapter)

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream; loading keeps the projections of patches and both heads in float32."""
        return self.context_embedder.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.context_embedder.weight.device

    def attention_records(
        self, layout: VideoLayout, padded_len: int | None = None
    ) -> dict[str, AttentionMetadata]:
        """A record for each role of this model. The layout is published whatever backend reads it.

        A denoising loop makes them once, and per step hands `record.at_step(...)` to `prepare_attention` and `forward`.
        Gates that are held for shut are looked at again here, which waits for the device.

        Args:
            layout: segments before the target video, and that video as the last span.
            padded_len: rows with the padding behind them, as native packing has it; None = no padding.

        Raises:
            MetadataError: padded_len is less than the layout holds.
        """
        rows = layout.used_len if padded_len is None else padded_len
        if rows < layout.used_len:
            raise MetadataError(
                f"padded_len is {rows}, and the layout holds {layout.used_len} rows: padding only adds rows."
            )
        for gate in self._gates:
            gate.look_if_shut()
        padding = padding_behind(layout.used_len, rows)
        return {
            "self": AttentionMetadata(video_layout=layout, packed_padding=padding),
            REFINER_ROLE: AttentionMetadata(),
        }

    def refine_text(
        self, encoder_hidden_states: Tensor, *, attention_records: Records | None = None
    ) -> Tensor:
        """The text as it enters the packed sequence, which is the same at every step: [B, Nt, C] in the model's dtype.

        Args:
            encoder_hidden_states: [B, Nt, text_dim].
            attention_records: may hold the refiner's; plain attention without it.

        Raises:
            MetadataError: it has another shape.
        """
        check_text(encoder_hidden_states, self.config.text_dim)
        record = None if attention_records is None else attention_records.get(REFINER_ROLE)
        text: Tensor = self.token_refiner(self.context_embedder(encoder_hidden_states.to(self.dtype)), record)
        return text

    def forward(
        self,
        hidden_states: Tensor,
        audio_hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        timestep: Tensor,
        timestep_indices: Tensor,
        token_tags: Tensor,
        position_ids: Tensor,
        video_indices: Tensor,
        audio_indices: Tensor,
        text_indices: Tensor,
        *,
        attention_records: Records | None = None,
        refined_text: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The velocities of all video and audio rows, those of conditions included.

        Tensors that describe the sequence hold for the whole batch; from another device they are copied.

        Args:
            hidden_states: noisy video rows [B, Nv, in_channels * patch], conditions and target in the order of
                video_indices.
            audio_hidden_states: audio rows [B, Na, audio_in_channels].
            encoder_hidden_states: text states [B, Nt, text_dim]; not read, so maybe None, where refined_text is given.
            timestep: distinct times [M] in 0 (noise) .. 1 (clean).
            timestep_indices: [S], the time of each row.
            token_tags: [S], 0 video, 1 text, 2 audio, -1 padding.
            position_ids: [S, 3] real-valued (t, h, w), best float64.
            video_indices, audio_indices, text_indices: [Nv], [Na], [Nt], places of the rows in the sequence; rows
                behind all of them are padding.
            attention_records: this step's records, already given to `prepare_attention`; made and prepared here if
                None, without a layout, which backends that work on a video grid refuse.
            refined_text: `refine_text` of this prompt, [B, Nt, hidden_size].

        Returns:
            [B, Nv, in_channels * patch] and [B, Na, audio_in_channels], in the dtype of the heads (float32).

        Raises:
            MetadataError: shapes do not fit the model or one another; both numbers are named.
        """
        config, device = self.config, self.device
        text, text_name, text_width = encoder_hidden_states, "encoder_hidden_states", config.text_dim
        if refined_text is not None:
            text, text_name, text_width = refined_text, "refined_text", config.hidden_size
        if text is None:
            raise MetadataError("neither encoder_hidden_states nor refined_text: give the prompt's text.")
        rows = check_inputs(
            {
                "video": Kind("hidden_states", hidden_states, config.patch_dim, video_indices),
                "audio": Kind(
                    "audio_hidden_states", audio_hidden_states, config.audio_in_channels, audio_indices
                ),
                "text": Kind(text_name, text, text_width, text_indices),
            },
            timestep,
            {"timestep_indices": timestep_indices, "token_tags": token_tags},
            position_ids,
        )
        if attention_records is None:
            attention_records = {
                "self": AttentionMetadata(packed_padding=padding_behind(rows.used, rows.length)),
                REFINER_ROLE: AttentionMetadata(),
            }
            prepare_attention(self, attention_records, config.attention_lengths(rows.length, rows.text))
        check_records(attention_records, rows)
        for gate in self._gates:
            gate.forget_if_changed()

        if refined_text is None:
            text = self.refine_text(text, attention_records=attention_records)
        text = text.to(self.dtype)
        places = {"text": text_indices, "video": video_indices, "audio": audio_indices}
        places = {kind: indices.to(device, torch.int64) for kind, indices in places.items()}
        here = rows_here(self.parallel, rows.length, places)
        packed_BSC = here.pack(
            text,
            {
                "text": (text, nn.Identity()),
                "video": (hidden_states.to(self.proj_in.weight.dtype), self.proj_in),
                "audio": (audio_hidden_states.to(self.audio_proj_in.weight.dtype), self.audio_proj_in),
            },
        )
        time = embed_time(timestep.to(device), config.freq_dim, self.time_embedder, self.adaln_basis)
        times = here.own(timestep_indices).to(device, torch.int64)
        table_rows = times * NUM_MODALITIES + here.own(token_tags).to(device, torch.int64).clamp(min=0)
        # Cast where they lie: not every device has float64.
        positions = here.own(position_ids).float().to(device)
        rope = build_rope_table(positions, config.rope_freq_dim, config.rope_theta, self.dtype)
        for block in self.transformer_blocks:
            packed_BSC = block(packed_BSC, time, table_rows, rope, attention_records)

        def normalise(rows_BNC: Tensor, times: Tensor) -> Tensor:
            return self.norm_out.normalise(rows_BNC, time, times)

        heads = {"video": self.proj_out, "audio": self.audio_proj_out}
        video, audio = here.unpack(packed_BSC, times, normalise, heads)
        return video, audio
