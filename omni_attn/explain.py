"""What every attention role of a pipeline would run, and why, without building any weights.

The model is constructed on the meta device in a mode where each Attention layer states its request and selects
nothing; then every distinct request is selected on its own, so that all refusals are seen at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from omni_attn.config import ParallelConfig, TunedFor
from omni_attn.config.names import nearest
from omni_attn.errors import BackendRejectedError, ConfigError, NoBackendError
from omni_attn.explanation import PipelineExplanation, RoleExplanation
from omni_attn.facts import AttentionRequest, DeviceInfo, Verdict
from omni_attn.models import get_family
from omni_attn.models.family import CachedChoice
from omni_attn.models.runtime import resolve_device, resolve_dtype
from omni_attn.parallel import use_parallel
from omni_attn.parallel.dispatch import describe_split
from omni_attn.platforms import OmniPlatform, current_omni_platform
from omni_attn.selector import PLATFORM_DEFAULT, collect_attention_requests, select, use_attention_config

if TYPE_CHECKING:
    from omni_attn.config import AttentionConfig, AttentionSpec, PipelineConfig

__all__ = [
    "PipelineExplanation",
    "RoleExplanation",
    "check_run",
    "collect_requests",
    "explain_pipeline",
    "explain_request",
    "measured_on",
    "tuned_elsewhere",
    "unmatched_roles",
]


def explain_pipeline(config: PipelineConfig, platform: OmniPlatform | None = None) -> PipelineExplanation:
    """What every attention role of a pipeline would run on a platform (None = the one that `device` names).

    Raises:
        ConfigError: the model, device or dtype cannot be resolved.
    """
    platform = platform or current_omni_platform(resolve_device(config.device))
    dtype = resolve_dtype(config.dtype, platform.device.kind)
    requests = collect_requests(config, platform, dtype)
    return PipelineExplanation(
        device=platform.device,
        dtype=dtype,
        roles=tuple(
            explain_request(request, config.attention, platform, layers=layers, ranks=config.parallel)
            for request, layers in requests.items()
        ),
        unmatched=unmatched_roles(config.attention, requests),
        notes=tuned_elsewhere(config.tuned_for, measured_on(platform.device, dtype, requests)),
        ranks=None if config.parallel.mode is None else config.parallel,
    )


def check_run(config: PipelineConfig, explanation: PipelineExplanation) -> None:
    """Nothing if the pipeline's model can use all that was asked for, on what its roles would run.

    Raises:
        ConfigError: it cannot, as `run` would say before it loads weights.
    """
    choices = [
        CachedChoice(role.label, role.request.kv_cache.block_size, role.cache)
        for role in explanation.roles
        if role.cache is not None and role.request.kv_cache is not None
    ]
    get_family(config.pipeline).check_run(config, choices, explanation.dtype)


def measured_on(device: DeviceInfo, dtype: str, requests: Iterable[AttentionRequest]) -> TunedFor:
    """What a file that is tuned here and now would say."""
    lengths = {
        request.role: (request.max_seqlen_q, request.max_seqlen_k)
        for request in requests
        if request.max_seqlen_q and request.max_seqlen_k
    }
    return TunedFor(
        device=device.product,
        capability=device.name,
        torch=device.torch_version,
        cudnn=device.cudnn_text,
        packages=device.packages,
        dtype=dtype,
        lengths=lengths,
    )


def tuned_elsewhere(tuned: TunedFor | None, here: TunedFor) -> tuple[str, ...]:
    """A note if a file was tuned on another machine than this, or for other sizes; nothing else."""
    differences = () if tuned is None else tuned.differences(here)
    if not differences:
        return ()
    return (
        f"tuned_for: measured under other conditions: {'; '.join(differences)}. The file's choices hold as they are "
        "written and may not be the fastest here; `omni-attn tune` measures anew.",
    )


def collect_requests(config: PipelineConfig, platform: OmniPlatform, dtype: str) -> Counter[AttentionRequest]:
    """Every distinct request of the pipeline's models with its number of layers, in order of construction.

    Where the sequence is split over ranks, as the first of them builds its models.
    """
    family = get_family(config.pipeline)
    with use_parallel(config.parallel):
        lengths = family.attention_lengths(config)
    with (
        use_parallel(config.parallel),
        use_attention_config(config.attention, platform=platform, dtype=dtype, lengths=lengths),
        collect_attention_requests() as layers,
    ):
        family.build_meta_model(config)
    return Counter(layer.request for layer in layers)


def explain_request(
    request: AttentionRequest,
    config: AttentionConfig,
    platform: OmniPlatform,
    *,
    layers: int = 1,
    ranks: ParallelConfig | None = None,
) -> RoleExplanation:
    """Selects for one request among ranks; what is refused becomes part of the answer instead of an error."""
    refusals, parallel, selection = [], None, None
    try:
        parallel = None if ranks is None else describe_split(request, ranks)
    except ConfigError as error:
        refusals.append(str(error))
    try:
        selection = select(request, config, platform)
    except (BackendRejectedError, NoBackendError, ConfigError) as error:
        refusals.append(str(error))
    if selection is None or refusals:
        spec, source = config.resolve(request.role, request.role_category)
        return RoleExplanation(
            request=request,
            layers=layers,
            source=source or PLATFORM_DEFAULT,
            spec=spec,
            backend=None,
            variant=None,
            verdicts=_verdicts(spec, request, platform),
            refusal="\n".join(refusals),
            parallel=parallel,
        )
    return RoleExplanation(
        request=request,
        layers=layers,
        source=selection.source,
        spec=selection.spec,
        backend=selection.backend,
        variant=selection.variant,
        verdicts=selection.verdicts,
        refusal=None,
        parallel=parallel,
        cache=None
        if request.kv_cache is None
        else selection.backend_cls.get_cache_facts(selection.variant, request.kv_cache.kind),
    )


def _verdicts(
    spec: AttentionSpec | None, request: AttentionRequest, platform: OmniPlatform
) -> tuple[Verdict, ...]:
    """As platform.evaluate, with a rejection in place of the error for a name that nobody registered."""
    if spec is None:
        return platform.evaluate(None, request)
    verdicts = []
    for index, candidate in enumerate((spec, *spec.fallback)):
        try:
            (verdict,) = platform.evaluate(candidate.model_copy(update={"fallback": ()}), request)
        except ConfigError as error:
            verdict = Verdict(candidate.backend, "", reasons=(str(error),))
        verdicts.append(replace(verdict, index=index))
    return tuple(verdicts)


def unmatched_roles(config: AttentionConfig, requests: Counter[AttentionRequest]) -> dict[str, str]:
    """Key path -> what is wrong, for each key of `per_role` that is no role and no category of any layer."""
    roles = list(dict.fromkeys(request.role for request in requests))
    categories = sorted({request.role_category for request in requests if request.role_category})
    unmatched = {}
    for key in config.per_role:
        if key in roles or key in categories:
            continue
        near = nearest(key, [*roles, *categories])
        unmatched[f"attention.per_role.{key}"] = (
            f"no layer of this model has the role {key!r}."
            + (f" Did you mean {near!r}?" if near else "")
            + f" Roles: {', '.join(roles)}. Categories: {', '.join(categories)}."
        )
    return unmatched
