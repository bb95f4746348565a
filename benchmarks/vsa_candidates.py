"""What benchmarks/vsa.py times: our executors, the layer, FastVideo with and without packing, dense attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.fastvideo_peer import PATHS, FastVideoAttention, FastVideoPath, FastVideoTiles
from benchmarks.rounds import Candidate
from benchmarks.vsa_checks import as_map, watched
from benchmarks.vsa_inputs import DTYPE, Inputs, SparseCase
from omni_attn import Attention, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.backends.sparse_executors import make_executor
from omni_attn.ops.block_sparse.executor import Executor
from omni_attn.ops.video_sparse import video_sparse_attention

EXECUTORS = ("triton", "fa3", "fa4", "flex", "fastvideo", "flashinfer")
BACKEND = "FASTVIDEO_VSA"


@dataclass(frozen=True)
class Setting:
    """One case with its tensors and its share of tiles."""

    case: SparseCase
    inputs: Inputs
    sparsity: float
    topk: int

    @property
    def device(self) -> torch.device:
        return self.inputs.query.device

    def composed(self, executor: Executor) -> torch.Tensor:
        """The whole call on an executor."""
        query, key, value, gate = self.inputs
        tiles = self.case.tiles(self.device)
        return video_sparse_attention(
            executor, query, key, value, tiles, self.topk, self.case.scale, gate=gate
        )

    def selected_by(self, executor: Executor) -> torch.Tensor:
        """The tiles that this call selects on an executor, bool [B, H, N, N]."""
        with watched(executor, self.device) as watch:
            self.composed(executor)
        assert watch.selected is not None
        return as_map(watch.selected, self.case.num_tiles)


def executor_named(name: str) -> Executor:
    """The executor of this name, the same object that the backend's layers use."""
    return make_executor(name, f"{BACKEND} ({name})")


def candidates(
    setting: Setting, executors: Iterable[str], *, with_peers: bool
) -> Iterator[Candidate | tuple[str, Exception]]:
    """Every candidate, or its name and why it is not here."""
    makers: list[tuple[str, Callable[[], list[Candidate]]]] = [("dense", lambda: [_dense(setting)])]
    makers += [(f"executor {name}", partial(_composed, setting, name)) for name in executors]
    makers.append(("layer", lambda: [_layer(setting)]))
    if with_peers:
        volume = setting.case.tiles(setting.device).capacity
        makers += [(p.name, partial(_fastvideo, setting, p)) for p in PATHS if volume in p.volumes]
    for name, make in makers:
        try:
            yield from make()
        except Exception as error:
            yield name, error


def _composed(setting: Setting, name: str) -> list[Candidate]:
    executor = executor_named(name)
    return [
        Candidate(
            name=f"executor {name}",
            kind="ours",
            call=lambda: setting.composed(executor),
            selected=lambda: setting.selected_by(executor),
            executor=executor,
        )
    ]


def _layer(setting: Setting) -> Candidate:
    block = {"sparsity": setting.sparsity, "tile_size": list(setting.case.tile)}
    layer, record = _prepared(setting, {"backend": BACKEND, "fastvideo_vsa": block})
    assert layer.selection is not None and layer.selection.variant is not None
    executor = executor_named(layer.selection.variant)
    # With all tiles kept the layer has a dense route, which leaves the coarse term out.
    is_sparse = setting.topk < setting.case.num_tiles
    query, key, value, gate = setting.inputs
    beside = record.with_layer_inputs(gate_compress=gate)
    return Candidate(
        name=f"layer {layer.route}",
        kind="ours",
        call=lambda: layer(query, key, value, beside),
        selected=(lambda: setting.selected_by(executor)) if is_sparse else None,
    )


def _dense(setting: Setting) -> Candidate:
    """FlashAttention 3 through our layer on a GPU, torch's attention elsewhere."""
    on_gpu = setting.device.type == "cuda"
    spec: dict[str, object] = (
        {"backend": "FLASH_ATTN", "variant": "fa3"} if on_gpu else {"backend": "TORCH_SDPA"}
    )
    layer, record = _prepared(setting, spec)
    assert layer.selection is not None
    query, key, value, _ = setting.inputs
    return Candidate(
        name=f"dense {layer.selection.label}",
        kind="dense",
        call=lambda: layer(query, key, value, record),
        selected=None,
    )


def _prepared(setting: Setting, spec: dict[str, object]) -> tuple[Attention, AttentionMetadata]:
    case = setting.case
    lengths = {"self": (case.tokens, case.tokens)}
    with use_attention_config({"default": spec}, device=setting.device, dtype=DTYPE, lengths=lengths):
        layer = Attention(case.heads, case.head_size, role="self", mask_usage="never", video_grid=True)
    record = AttentionMetadata(vsa_dit_seq_shape=case.grid)
    prepare_attention(layer, {"self": record}, lengths)
    return layer, record


def _fastvideo(setting: Setting, path: FastVideoPath) -> list[Candidate]:
    peer = FastVideoAttention(path, setting.case, setting.topk, setting.device)
    tiles = FastVideoTiles(setting.case.tiles(setting.device))
    ready = Inputs(
        *(x.clone(memory_format=torch.contiguous_format) for x in peer.layout(tiles.tile(setting.inputs)))
    )
    tiles.release()

    def packed() -> torch.Tensor:
        return tiles.untile(peer.kernel(peer.layout(tiles.tile(setting.inputs))))

    def selected() -> torch.Tensor:
        with peer.noting_map() as maps:
            peer.kernel(ready)
        return maps[0]

    return [
        Candidate(
            name=f"{path.name}, with packing",
            kind="peer",
            call=packed,
            selected=selected,
            release=tiles.release,
        ),
        Candidate(
            name=f"{path.name}, in tile order",
            kind="peer kernel",
            call=lambda: peer.kernel(ready),
            selected=selected,
            raster=tiles.untile,
        ),
    ]
