"""The tables of golden/: device x packages x request x choice -> backend and variant, or the reasons against it.

base.yaml holds the names of devices, package sets and requests, and the defaults; each backend may have a file of its
own with rows, and with package sets and requests beside those of base.yaml.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_attn.backends.registry import DiffusionAttentionBackendEnum
from omni_attn.config.names import canonical_name
from omni_attn.errors import BackendRejectedError
from omni_attn.facts import AttentionRequest, DeviceInfo, FullAttentionSpec
from omni_attn.platforms import current_omni_platform
from omni_attn.selector import select
from omni_attn.testing import fake_device
from tests.selection.stubs import choose


def _table() -> dict[str, Any]:
    whole: dict[str, Any] = {"devices": {}, "packages": {}, "requests": {}, "rows": []}
    for file in sorted(Path(__file__).with_name("golden").glob("*.yaml")):
        part = yaml.safe_load(file.read_text(encoding="utf-8"))
        for section in ("devices", "packages", "requests"):
            again = whole[section].keys() & part.get(section, {}).keys()
            assert not again, f"{file.name} names {again} again"
            whole[section] |= part.get(section, {})
        for number, row in enumerate(part["rows"]):
            # A row may name a list of base.yaml's devices where YAML anchors do not reach.
            device = row["device"]
            names = whole["devices"][device] if isinstance(device, str) else device
            whole["rows"].append(row | {"device": names, "id": f"{file.stem}-{number}"})
    return whole


TABLE = _table()
COLUMNS = {"id", "device", "with", "cudnn", "ask", "but", "choose", "gives", "because", "refused"}


def _cases() -> list[Any]:
    return [
        pytest.param(row, device, packages, id=f"{row['id']}-{device}-{packages}")
        for row in TABLE["rows"]
        for device, packages in product(row["device"], row.get("with", ["none"]))
    ]


def _request(row: dict[str, Any]) -> AttentionRequest:
    fields = TABLE["requests"][row["ask"]] | row.get("but", {})
    if "kv_cache" in fields:
        fields["kv_cache"] = FullAttentionSpec(**fields["kv_cache"])
    return AttentionRequest(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def _device(row: dict[str, Any], name: str, packages: str) -> DeviceInfo:
    return fake_device(name, packages=TABLE["packages"][packages], cudnn=row.get("cudnn"))


@pytest.mark.parametrize(("row", "device", "packages"), _cases())
def test_row(row: dict[str, Any], device: str, packages: str) -> None:
    request, spec = _request(row), row.get("choose")
    config = choose({} if spec is None else {"per_role": {request.role: spec}})
    platform = current_omni_platform(_device(row, device, packages))
    if "refused" in row:
        with pytest.raises(BackendRejectedError) as caught:
            select(request, config, platform)
        with pytest.raises(BackendRejectedError):
            platform.get_diffusion_attn_backend_cls(config.per_role[request.role], request)
        missing = [part for part in row["refused"] if part not in str(caught.value)]
        assert not missing, f"{missing} not in: {caught.value}"
        return
    selection = select(request, config, platform)
    backend, _, variant = row["gives"].partition(" ")
    assert (selection.backend, selection.variant) == (backend, variant or None), selection.explain()
    assert selection.source == ("platform default" if spec is None else f"per_role['{request.role}']")
    assert (selection.spec is None) == (spec is None)
    assert selection.backend_cls.get_name() == backend
    path = platform.get_diffusion_attn_backend_cls(config.per_role.get(request.role), request)
    assert path == selection.class_path
    missing = [part for part in row.get("because", ()) if part not in selection.explain()]
    assert not missing, f"{missing} not in: {selection.explain()}"


def _asked(*, explicit: bool) -> set[tuple[str, str]]:
    """(device, backend) pairs that some row asks about."""
    pairs = set()
    for row in TABLE["rows"]:
        spec = row.get("choose")
        if (spec is not None) == explicit:
            name = canonical_name(spec["backend"] if isinstance(spec, dict) else spec) if spec else "default"
            pairs |= {(device, name) for device in row["device"]}
    return pairs


def test_rows_have_known_columns_and_one_answer() -> None:
    for row in TABLE["rows"]:
        assert row.keys() <= COLUMNS and ("gives" in row) != ("refused" in row), row


def test_every_device_has_a_default() -> None:
    assert {device for device, _ in _asked(explicit=False)} >= set(TABLE["devices"]["all"])


def test_every_built_in_backend_is_chosen_and_refused() -> None:
    """A new backend meets this test with its first row."""
    names = set(DiffusionAttentionBackendEnum.__members__)
    chosen = {row["gives"].split()[0] for row in TABLE["rows"] if "gives" in row and row.get("choose")}
    refused = {
        canonical_name(row["choose"]["backend"] if isinstance(row["choose"], dict) else row["choose"])
        for row in TABLE["rows"]
        if "refused" in row
    }
    assert chosen == refused == names
    assert {name for _, name in _asked(explicit=True)} == names


def test_every_built_in_backend_is_asked_for_on_every_device() -> None:
    asked = _asked(explicit=True)
    everywhere = {
        (device, name)
        for device in TABLE["devices"]["all"]
        for name in DiffusionAttentionBackendEnum.__members__
    }
    assert not everywhere - asked
