"""Stand-ins behind the executors of block-sparse attention, by name.

Those on other people's kernels run as they are, on a stand-in for the package; torch's stands in for ours in Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import patch

import torch

from omni_attn.backends import sparse_executors
from omni_attn.facts import PackageRequirement
from omni_attn.ops.block_sparse.executor import CoarseTerm, Packed, SelectedBlocks
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.testing.standins.log import CallLog
from omni_attn.testing.standins.sparse_fa3 import sparse_fa3_stand_in
from omni_attn.testing.standins.sparse_fa4 import sparse_fa4_stand_in
from omni_attn.testing.standins.sparse_fastvideo import sparse_fastvideo_stand_in
from omni_attn.testing.standins.sparse_flashinfer import sparse_flashinfer_stand_in
from omni_attn.testing.standins.sparse_flex import sparse_flex_stand_in

_STAND_INS: Mapping[str, Callable[[CallLog], AbstractContextManager[None]]] = {
    "fa3": sparse_fa3_stand_in,
    "fa4": sparse_fa4_stand_in,
    "fastvideo": sparse_fastvideo_stand_in,
    "flashinfer": sparse_flashinfer_stand_in,
    "flex": sparse_flex_stand_in,
}


class _Logged(TorchExecutor):
    """torch's executor, under a name."""

    def __init__(self, log: CallLog, name: str) -> None:
        self._log, self.name = log, name  # type: ignore[misc]

    def attend(
        self,
        packed: Packed,
        selected: SelectedBlocks,
        softmax_scale: float,
        coarse: CoarseTerm | None = None,
    ) -> torch.Tensor:
        """See Executor.attend."""
        self._log.calls.append(self.name)
        return super().attend(packed, selected, softmax_scale, coarse)

    def attend_with_summaries(
        self, packed: Packed, selected: SelectedBlocks, softmax_scale: float
    ) -> torch.Tensor:
        """See SummarisingExecutor.attend_with_summaries."""
        self._log.calls.append(self.name)
        return super().attend_with_summaries(packed, selected, softmax_scale)


@contextmanager
def sparse_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts one in place for a variant, by default the first; an executor made before is not used meanwhile."""
    name = variant or "triton"
    made = {of: executor for of, executor in sparse_executors._made.items() if of != name}
    if name not in _STAND_INS:
        made[name] = _Logged(log, name)
    package = _STAND_INS[name](log) if name in _STAND_INS else nullcontext()
    with patch.multiple(sparse_executors, _made=made, import_symbols=_found), package:
        yield


def _found(label: str, package: PackageRequirement) -> None:
    """Triton, where there may be none."""
