"""Selection as a function: the cache never shows, packages never overrule a person, order never matters."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.flash_attn_rocm import AiterFlashBackend
from omni_attn.backends.registry import (
    DiffusionAttentionBackendEnum,
    load_backend,
    register_diffusion_backend,
    unregister_diffusion_backend,
)
from omni_attn.config import AttentionConfig
from omni_attn.errors import BackendRejectedError, ConfigError, NoBackendError, OmniAttnError
from omni_attn.facts import AttentionRequest, DeviceInfo
from omni_attn.layer import Attention
from omni_attn.platforms import CpuPlatform, CudaPlatform, MpsPlatform, RocmPlatform
from omni_attn.selector import select, use_attention_config
from omni_attn.testing import fake_device
from tests.selection import stubs
from tests.selection.stubs import EVERY_PACKAGE, HERE, ask, choose

BUILT_IN: dict[str, type[AttentionBackend]] = {
    member.name: load_backend(member.value, member.name) for member in DiffusionAttentionBackendEnum
}
PLATFORMS = {"cuda": CudaPlatform, "rocm": RocmPlatform, "cpu": CpuPlatform, "mps": MpsPlatform}
# What a family has in place of a built-in class.
OWN = {("rocm", "FLASH_ATTN"): AiterFlashBackend}
TEST_KERNEL = {"omni-attn-test-kernel": "1.3"}
# What a runtime registration may put in place, and the class that then answers.
TARGETS: list[tuple[str, Any, type[AttentionBackend]]] = [
    ("PLAIN_TEST", stubs.PlainBackend, stubs.PlainBackend),
    ("PLAIN_TEST", f"{HERE}:PlainTwin", stubs.PlainTwin),
    ("TORCH_SDPA", f"{HERE}.OwnSDPABackend", stubs.OwnSDPABackend),
    ("SPARSE_TEST", stubs.SparseBackend, stubs.SparseBackend),
    ("PACKAGED_TEST", f"{HERE}:PackagedBackend", stubs.PackagedBackend),
]

names = st.sampled_from([*BUILT_IN, *{name for name, _, _ in TARGETS}])
specs = st.fixed_dictionaries(
    {"backend": names}, optional={"fallback": st.lists(names, max_size=2, unique=True)}
).map(lambda s: s | {"fallback": [name for name in s.get("fallback", []) if name != s["backend"]]})
configs = st.fixed_dictionaries(
    {}, optional={"default": specs, "per_role": st.dictionaries(st.sampled_from(["self", "cross"]), specs)}
).map(choose)
package_sets = st.sets(st.sampled_from(sorted(EVERY_PACKAGE | TEST_KERNEL))).map(
    lambda chosen: {name: (EVERY_PACKAGE | TEST_KERNEL)[name] for name in chosen}
)
devices = st.builds(
    fake_device,
    st.sampled_from(["sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "mps", "cpu"]),
    packages=package_sets,
    cudnn=st.sampled_from([None, 90400, 91900]),
)
requests = st.builds(
    ask,
    role=st.sampled_from(["self", "cross", "cross.image"]),
    role_category=st.sampled_from([None, "self", "cross"]),
    head_size=st.sampled_from([-1, 64, 80, 96, 100, 128, 256, 320]),
    dtype=st.sampled_from([None, "bfloat16", "float16", "float32", "int8"]),
    mask_usage=st.sampled_from([None, "never", "padding", "arbitrary"]),
    max_seqlen_k=st.sampled_from([None, 1, 512, 32760]),
    video_grid=st.booleans(),
)

Answer = tuple[object, ...]


def cached(request: AttentionRequest, config: AttentionConfig, device: DeviceInfo) -> Answer:
    """The selector's answer, or the type and text of its error."""
    try:
        selection = select(request, config, device)
    except OmniAttnError as error:
        return (type(error),)
    return (selection.backend_cls, selection.variant, selection.spec, selection.source)


def uncached(
    request: AttentionRequest,
    config: AttentionConfig,
    device: DeviceInfo,
    classes: dict[str, type[AttentionBackend]],
) -> Answer:
    """The same from the classes alone: no registry, no loader, no cache."""
    spec, source = config.resolve(request.role, request.role_category)
    candidates: list[tuple[str, Any]] = [(c.backend, c) for c in (spec, *spec.fallback)] if spec else []
    if spec is None:
        order = PLATFORMS.get(device.kind, CpuPlatform)(device).default_order(request)
        candidates = [(name, None) for name in order]
        request = replace(request, mask_usage=request.mask_usage or "arbitrary")
    if any(name not in classes for name, _ in candidates):
        return (ConfigError,)
    for name, chosen in candidates:
        backend = OWN.get((device.kind, name), classes[name])
        if not backend.validate_configuration(request, device, chosen):
            variant = backend.select_variant(request, device, chosen)
            return (backend, variant, chosen, source or "platform default")
    return (BackendRejectedError if spec else NoBackendError,)


class Interleavings(RuleBasedStateMachine):
    """Registrations come and go between questions; a few devices and requests are asked again and again."""

    @initialize(
        devices=st.lists(devices, min_size=2, max_size=3),
        requests=st.lists(requests, min_size=2, max_size=3),
        configs=st.lists(configs, min_size=2, max_size=3),
    )
    def draw(
        self, devices: list[DeviceInfo], requests: list[AttentionRequest], configs: list[AttentionConfig]
    ) -> None:
        self.pool = list(itertools.product(requests, configs, devices))
        self.classes = dict(BUILT_IN)

    @rule(choice=st.sampled_from(TARGETS))
    def register(self, choice: tuple[str, Any, type[AttentionBackend]]) -> None:
        name, target, answers = choice
        register_diffusion_backend(name, target)
        self.classes[name] = answers

    @rule(name=st.sampled_from([name for name, _, _ in TARGETS]))
    def unregister(self, name: str) -> None:
        unregister_diffusion_backend(name)
        self.classes.pop(name, None)
        self.classes.update({k: v for k, v in BUILT_IN.items() if k == name})

    @rule(data=st.data())
    def ask_one(self, data: st.DataObject) -> None:
        request, config, device = data.draw(st.sampled_from(self.pool))
        assert cached(request, config, device) == uncached(request, config, device, self.classes)

    @rule(data=st.data(), field=st.sampled_from(["head_size", "dtype", "mask_usage", "max_seqlen_k", "role"]))
    def ask_with_one_field_changed(self, data: st.DataObject, field: str) -> None:
        request, config, device = data.draw(st.sampled_from(self.pool))
        other = replace(request, **{field: getattr(data.draw(requests), field), "value_head_size": None})
        for question in (request, other, request):
            assert cached(question, config, device) == uncached(question, config, device, self.classes)

    @rule(data=st.data(), packages=package_sets)
    def ask_with_other_packages(self, data: st.DataObject, packages: dict[str, str]) -> None:
        request, config, device = data.draw(st.sampled_from(self.pool))
        for asked in (device, replace(device, packages=packages), device):
            assert cached(request, config, asked) == uncached(request, config, asked, self.classes)

    def teardown(self) -> None:
        for name, _, _ in TARGETS:
            unregister_diffusion_backend(name)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def all_registered() -> AbstractContextManager[None]:
    return stubs.registered(*((name, target) for name, target, _ in TARGETS))


@settings(max_examples=200, deadline=None)
@given(request=requests, spec=specs.map(lambda s: s["backend"]), device=devices, added=package_sets)
def test_an_added_package_never_changes_an_explicit_choice(
    request: AttentionRequest, spec: str, device: DeviceInfo, added: dict[str, str]
) -> None:
    config = choose({"default": spec})
    richer = replace(device, packages={**added, **device.packages})
    with all_registered():
        before, after = cached(request, config, device), cached(request, config, richer)
    if len(before) > 1:
        assert (after[0], after[2:]) == (before[0], before[2:])
    elif len(after) > 1:
        assert after[0].get_name() == spec  # type: ignore[attr-defined]
    else:
        assert after == before == (BackendRejectedError,)


@settings(max_examples=100, deadline=None)
@given(request=requests, device=devices)
def test_a_default_is_never_refused_for_what_a_model_may_need(
    request: AttentionRequest, device: DeviceInfo
) -> None:
    """TORCH_SDPA ends every order, so some float dtype on any machine always has an answer."""
    floats = replace(request, dtype="bfloat16" if request.dtype == "int8" else request.dtype)
    selection = select(floats, None, device)
    assert selection.verdicts[-1].backend == "TORCH_SDPA" and selection.verdicts[-1].accepted
    assert selection.backend_cls.facts.numerics == "exact"


ORDER_CONFIG = {"default": "SDPA", "per_role": {"cross": "CUDNN_ATTN", "odd": "SPARSE_TEST"}}
ROLES = [("self", "self"), ("cross", "cross"), ("cross.image", "cross"), ("odd", None)]


@settings(max_examples=24, deadline=None)
@given(order=st.permutations(ROLES))
def test_order_of_construction_does_not_matter(order: list[tuple[str, str | None]]) -> None:
    def build(role: str, category: str | None) -> object:
        try:
            layer = Attention(2, 64, role=role, role_category=category)
        except BackendRejectedError as error:
            return str(error)
        assert layer.selection is not None
        return layer.group_id, layer.selection.explain()

    device = fake_device("sm_90", cudnn=91900)
    with all_registered(), use_attention_config(ORDER_CONFIG, platform=device):
        expected = {role: build(role, category) for role, category in ROLES}
        again = {role: build(role, category) for role, category in order}
    assert again == expected
    assert "video grid" in str(expected["odd"]) and "CUDNN_ATTN" in str(expected["cross.image"])
