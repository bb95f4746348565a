"""Backends from outside: options that only their own model knows, and names that come with an installation."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, StrictBool, StrictInt

from omni_attn.config import AttentionConfig
from omni_attn.errors import BackendRejectedError
from omni_attn.selector import select
from omni_attn.testing import fake_device
from tests.selection.fresh import run_fresh, write_metadata
from tests.selection.stubs import HERE, OptionsBackend, PlainBackend, ask, choose, registered

CPU = fake_device("cpu")


@pytest.mark.parametrize(
    ("name", "options", "refused"),
    [
        ("OPTIONS_TEST", {"strength": 3}, None),
        ("OPTIONS_TEST", {"strength": "loud"}, "strength"),
        ("OPTIONS_TEST", {"stregth": 3}, "stregth"),
        ("PLAIN_TEST", {"strength": 3}, "strength"),
    ],
)
def test_options_are_checked_by_the_backends_own_model(
    name: str, options: dict[str, object], refused: str | None
) -> None:
    config = choose({"default": {"backend": name, "options": options}})
    with registered(("OPTIONS_TEST", OptionsBackend), ("PLAIN_TEST", PlainBackend)):
        if refused is None:
            assert select(ask(), config, CPU).spec == config.default
            return
        with pytest.raises(BackendRejectedError, match=rf"{name}.*{refused}"):
            select(ask(), config, CPU)


class StrictModel(BaseModel):
    flag: StrictBool = False
    level: StrictInt = 0


class StrictBackend(PlainBackend):
    options_model = StrictModel

    @staticmethod
    def get_name() -> str:
        return "STRICT_TEST"


@pytest.mark.parametrize("right_first", [True, False])
@pytest.mark.parametrize(
    ("right", "wrong"),
    [({"flag": True}, {"flag": 1}), ({"flag": False}, {"flag": 0}), ({"level": 1}, {"level": True})],
    ids=["true", "false", "one"],
)
@pytest.mark.parametrize("nested", [False, True], ids=["choice", "fallback"])
def test_equal_options_of_another_type_are_another_question(
    right: dict[str, object], wrong: dict[str, object], right_first: bool, nested: bool
) -> None:
    """True == 1, and what was answered for one is no answer for the other."""

    def question(options: dict[str, object]) -> AttentionConfig:
        spec: dict[str, object] = {"backend": "STRICT_TEST", "options": options}
        return choose({"default": {"backend": "CUDNN_ATTN", "fallback": [spec]} if nested else spec})

    with registered(("STRICT_TEST", StrictBackend)):
        for options in (right, wrong) if right_first else (wrong, right):
            if options is right:
                spec = select(ask(), question(options), CPU).spec
                assert spec is not None and repr(dict(spec.options or {})) == repr(right)
            else:
                with pytest.raises(BackendRejectedError, match=f"options.{next(iter(wrong))}"):
                    select(ask(), question(options), CPU)


# --- entry points


PLUGIN_PROGRAM = """
from omni_attn.backends.registry import registered_names
from omni_attn.errors import BackendRejectedError
from omni_attn.platforms import current_omni_platform
from omni_attn.selector import select
from tests.selection.stubs import PlainBackend, ask, choose
assert {"PLAIN_TEST", "GONE_TEST"} <= set(registered_names())
cpu = current_omni_platform("cpu")
assert select(ask(), choose("plain_test"), cpu).backend_cls is PlainBackend
assert select(ask(), None, cpu).backend == "TORCH_SDPA"
try:
    select(ask(), choose("GONE_TEST"), cpu)
except BackendRejectedError as error:
    print(error)
"""


def test_entry_points_add_names_and_a_broken_one_breaks_only_itself(tmp_path: Path) -> None:
    points = f"PLAIN_TEST = {HERE}:PlainBackend\nGONE_TEST = no_such_module:Backend\n"
    write_metadata(tmp_path, "plugin", "1.0", f"[omni_attn.backends]\n{points}")
    printed = run_fresh(PLUGIN_PROGRAM, tmp_path)
    assert "GONE_TEST" in printed and "no_such_module" in printed
