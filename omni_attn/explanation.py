"""The answers of `explain`: what one role would run, and what a whole pipeline would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_attn.errors import BackendRejectedError
from omni_attn.facts import AttentionRequest, CacheFacts, DeviceInfo, Verdict
from omni_attn.plain import to_plain

if TYPE_CHECKING:
    from omni_attn.config import AttentionSpec, ParallelConfig


@dataclass(frozen=True, kw_only=True)
class RoleExplanation:
    """The answer for the layers of one role that share one request.

    Attributes:
        request: what these layers need.
        layers: how many they are.
        source: where the choice came from (`per_role['self']`, `default`, `platform default`, ...).
        spec: the person's options, None for a platform default.
        backend, variant: what runs; None if the choice is refused.
        verdicts: one per candidate, in the order in which they were asked.
        refusal: the full error text of a refused choice, else None.
        cache: what the chosen kernel takes of a paged KV cache; None without a cache, or for a refused choice.
        parallel: what the ranks do with the sequence; None in one process, or where they cannot split it.
    """

    request: AttentionRequest
    layers: int
    source: str
    spec: AttentionSpec | None
    backend: str | None
    variant: str | None
    verdicts: tuple[Verdict, ...]
    refusal: str | None
    cache: CacheFacts | None = None
    parallel: str | None = None

    @property
    def label(self) -> str:
        """Backend and variant that run, as a Verdict's; "nothing" for a refused choice."""
        return "nothing" if self.chosen is None else self.chosen.label

    @property
    def chosen(self) -> Verdict | None:
        """The verdict on what runs; None for a refused choice, also where it is the ranks that are refused."""
        accepted = (verdict for verdict in self.verdicts if verdict.accepted)
        return None if self.backend is None else next(accepted, None)

    @property
    def cache_line(self) -> str | None:
        """The layers' KV cache, and what the chosen kernel takes of one; None where there is nothing to tell."""
        kept, takes = self.request.kv_cache, self.cache
        if kept is None or takes is None:
            return None
        lengths = ", plans each step from lengths on the host" if takes.host_lengths else ""
        return (
            f'role "{self.request.role}" keeps {kept.dtype} in pages of {kept.block_size} tokens ({kept.kind}); '
            f"{self.backend} takes page sizes {' or '.join(map(str, takes.block_sizes))}, layouts "
            f"{' or '.join(takes.layouts)}, CUDA graphs {takes.cudagraph.name}{lengths}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "role": self.request.role,
            "role_category": self.request.role_category,
            "layers": self.layers,
            "backend": self.backend,
            "variant": self.variant,
            "source": self.source,
            "spec": to_plain(self.spec),
            "parallel": self.parallel,
            **({} if self.request.kv_cache is None else {"kv_cache": self._cache_dict()}),
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }

    def _cache_dict(self) -> dict[str, Any]:
        kept, takes = self.request.kv_cache, self.cache
        assert kept is not None
        stated = {"kind": kept.kind, "dtype": kept.dtype, "block_size": kept.block_size}
        if takes is None:
            return stated
        return {
            **stated,
            "kernel_block_sizes": [str(size) for size in takes.block_sizes],
            "layouts": list(takes.layouts),
            "cudagraph": takes.cudagraph.name,
        }


@dataclass(frozen=True, kw_only=True)
class PipelineExplanation:
    """The answers for a whole pipeline on one device.

    Attributes:
        unmatched: key path -> what is wrong, for each key of `per_role` that no layer of the model answers to.
        notes: what a person should know beside that: a tuned file that was measured on another machine.
        ranks: over which the sequence is split; None in one process.
    """

    device: DeviceInfo
    dtype: str
    roles: tuple[RoleExplanation, ...]
    unmatched: Mapping[str, str]
    notes: tuple[str, ...] = ()
    ranks: ParallelConfig | None = None

    @property
    def refusals(self) -> tuple[str, ...]:
        """Error texts of all refused roles."""
        return tuple(role.refusal for role in self.roles if role.refusal is not None)

    def raise_if_refused(self) -> None:
        """Nothing if every role can run.

        Raises:
            BackendRejectedError: some cannot; the text holds all of them.
        """
        if self.refusals:
            raise BackendRejectedError("\n".join(self.refusals))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the device and its facts, the dtype, the ranks, the roles, and the notes."""
        return {
            "device": to_plain(self.device),
            "dtype": self.dtype,
            "parallel": None if self.ranks is None else self._ranks_dict(self.ranks),
            "roles": [role.to_dict() for role in self.roles],
            "notes": list(self.notes),
        }

    def _ranks_dict(self, ranks: ParallelConfig) -> dict[str, Any]:
        return {"processes": ranks.size, "mode": ranks.mode, **ranks.model_dump()}
