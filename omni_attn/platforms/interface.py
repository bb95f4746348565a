"""OmniPlatform: the policy of a device family. Tables of names; the facts on the backends do the judging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from omni_attn.backends import registry
from omni_attn.config import AttentionSpec
from omni_attn.errors import BackendImportError, BackendRejectedError, ConfigError, NoBackendError
from omni_attn.facts import AttentionRequest, DeviceInfo, Verdict


@dataclass(frozen=True)
class OrderRow:
    """One row of a default order: it holds for requests with at least so many expected key tokens.

    Attributes:
        order: backend names, best first.
        min_key_tokens: lower limit on max_seqlen_k. 0 holds for every request, None only for those without that hint.
        needs: (backend, variant) that the order was measured with; the row holds only where it serves the request.
    """

    order: tuple[str, ...]
    min_key_tokens: int | None = 0
    needs: tuple[str, str] | None = None

    def fits(self, key_tokens: int | None) -> bool:
        """Whether the row is meant for a hint on key tokens, or for none."""
        if key_tokens is None or self.min_key_tokens is None:
            return key_tokens is None and not self.min_key_tokens
        return key_tokens >= self.min_key_tokens


class OmniPlatform:
    """What a device family prefers, forbids and replaces. One object per device.

    Attributes:
        class_paths: class paths that replace the built-in one of a name on this family.
        bans: names never used on this family, with the reason.
        mla_order: candidate names for layers over a cache of latents, best first.
    """

    class_paths: ClassVar[Mapping[str, str]] = {}
    bans: ClassVar[Mapping[str, str]] = {}
    # Our kernels wherever there is Triton; torch's operators bring all latents together in float32.
    mla_order: ClassVar[tuple[str, ...]] = ("TRITON_ATTN", "TORCH_SDPA")

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.device.name})"

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        """Candidate names for a request that nobody chose a backend for, best first."""
        return ("TORCH_SDPA",)

    def first_order(self, rows: tuple[OrderRow, ...], request: AttentionRequest) -> tuple[str, ...]:
        """The order of the first row that holds for a request on this device."""
        return next(
            row.order
            for row in rows
            if row.fits(request.max_seqlen_k) and (row.needs is None or self._serves(*row.needs, request))
        )

    def class_path(self, name: str) -> str:
        """The class path of a canonical name: runtime registration, else this family's table, else the default.

        Raises:
            ConfigError: nobody registered the name.
        """
        return registry.runtime_path(name) or self.class_paths.get(name) or registry.default_path(name)

    def evaluate(
        self,
        spec: AttentionSpec | None,
        request: AttentionRequest,
        *,
        broken: Mapping[str, str] | None = None,
    ) -> tuple[Verdict, ...]:
        """A verdict for each candidate: the spec and its fallbacks, or this family's default order.

        Args:
            spec: a person's choice, None for the default.
            broken: label of a verdict -> why that kernel turned out unusable although its facts accepted it.

        Raises:
            ConfigError: a name that nobody registered.
        """
        broken = broken or {}
        if spec is not None:
            candidates = (spec, *spec.fallback)
            return tuple(
                self._judge(candidate.backend, candidate, request, index, broken)
                for index, candidate in enumerate(candidates)
            )
        if request.mask_usage is None and request.kv_cache is None:  # over a paged cache no mask can come
            request = replace(request, mask_usage="arbitrary")
        latents = request.kv_cache is not None and request.kv_cache.kind == "mla"
        order = enumerate(self.mla_order if latents else self.default_order(request))
        return tuple(self._judge(name, None, request, index, broken) for index, name in order)

    def get_diffusion_attn_backend_cls(self, spec: AttentionSpec | None, request: AttentionRequest) -> str:
        """The class path of the first accepted candidate.

        Raises:
            BackendRejectedError: a person's choice, and all its fallbacks, cannot run here.
            NoBackendError: no candidate of the default order can run here.
        """
        verdicts = self.evaluate(spec, request)
        for verdict in verdicts:
            if verdict.accepted:
                return verdict.class_path
        raise self.refusal(spec, request, verdicts, "given spec")

    def refusal(
        self,
        spec: AttentionSpec | None,
        request: AttentionRequest,
        verdicts: tuple[Verdict, ...],
        source: str,
    ) -> BackendRejectedError | NoBackendError:
        """The error for verdicts of which none accepts: the role, every reason, and what would run instead."""
        if spec is None:
            every = "".join(f"\n  {verdict}" for verdict in verdicts)
            return NoBackendError(
                verdicts,
                f'role "{request.role}": no backend of the platform\'s default order can run on {self.device.name}:'
                f"{every}\nChange what the layer needs, or install one of the packages named above.",
            )
        first, *fallbacks = verdicts
        asked = f"{spec.backend} variant {spec.variant}" if spec.variant else spec.backend
        text = (
            f'role "{request.role}": {asked} (from {source}) cannot run on {self.device.name}: '
            f"{'; '.join(first.reasons)}."
        )
        if fallbacks:
            text += f" Its fallbacks cannot either: {'; '.join(map(str, fallbacks))}."
        accepted = [
            v
            for v in self.evaluate(None, request)
            if v.accepted and (v.backend != spec.backend or spec.variant)
        ]
        if accepted:
            text += (
                f" Accepted here: {', '.join(v.label for v in accepted)}. To choose for this role alone, write "
                f"`per_role: {{{request.role}: {{backend: {accepted[0].backend}}}}}`."
            )
        else:
            text += " Nothing in the default order can run this layer here either."
        return BackendRejectedError(
            text,
            role=request.role,
            backend=spec.backend,
            source=source,
            reasons=first.reasons,
            alternatives=tuple(verdict.backend for verdict in accepted),
        )

    def _serves(self, name: str, variant: str, request: AttentionRequest) -> bool:
        try:
            return self._judge(name, AttentionSpec(backend=name, variant=variant), request, 0, {}).accepted
        except ConfigError:
            return False  # nobody chose it: the default order below tells the reason

    def _judge(
        self,
        name: str,
        spec: AttentionSpec | None,
        request: AttentionRequest,
        index: int,
        broken: Mapping[str, str],
    ) -> Verdict:
        path = self.class_path(name)
        verdict = Verdict(name, path, spec.variant if spec else None, index=index)
        if name in self.bans:
            return replace(verdict, reasons=(f"never used on {self.device.kind}: {self.bans[name]}",))
        try:
            backend = registry.load_backend(path, name)
        except (BackendImportError, ConfigError) as error:
            if spec is not None and isinstance(error, ConfigError):
                raise
            return replace(verdict, reasons=(str(error),))
        reasons = tuple(backend.validate_configuration(request, self.device, spec))
        if spec is None and backend.facts.numerics != "exact":
            reasons += (f"needs exact numerics for a default, found {backend.facts.numerics}",)
        if reasons:
            return replace(verdict, reasons=reasons)
        accepted = replace(verdict, variant=backend.select_variant(request, self.device, spec))
        why = broken.get(accepted.label)
        return accepted if why is None else replace(accepted, reasons=(why,))
