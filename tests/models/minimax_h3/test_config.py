"""MiniMaxH3Config reads what diffusers writes and refuses what it cannot describe."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from omni_attn.errors import ConfigError, MetadataError
from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from tests.models.minimax_h3.tiny_models import BASE, REAL, build_reference, config_of


def test_reads_what_diffusers_writes() -> None:
    written = json.loads(build_reference().to_json_string())
    assert MiniMaxH3Config.from_dict(written) == config_of()
    assert config_of(gate_compress=True, adaln_rank=4).to_diffusers() == BASE


def test_fields_have_no_defaults_and_do_not_change() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(MiniMaxH3Config)}
    assert (defaults.pop("gate_compress"), defaults.pop("adaln_rank")) == (False, None)
    assert all(default is dataclasses.MISSING for default in defaults.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_of().num_layers = 3  # type: ignore[misc]


def test_sizes_that_follow() -> None:
    real = MiniMaxH3Config(**REAL)
    assert (real.inner_dim, real.patch_dim, real.adaln_dim) == (7168, 96, 2688)
    assert real.token_grid(37, 48, 84) == (37, 24, 42)
    assert dataclasses.replace(real, adaln_rank=16).adaln_dim == 16
    assert real.attention_lengths(37740, 30) == {
        "self": (37740, 37740),
        "minimax_h3.token_refiner": (30, 30),
    }


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layer": 2}, r"num_layer: unknown key\. Did you mean 'num_layers'\?"),
        ({"_class_name": "WanTransformer3DModel"}, "'WanTransformer3DModel', and only 'MiniMaxH3Transformer"),
        ({"num_layers": 0}, "num_layers is 0; it must be a positive integer"),
        ({"num_layers": True}, "num_layers is True"),
        ({"num_layers": "2"}, "num_layers is '2'"),
        ({"norm_eps": 1}, "norm_eps is 1; it must be a number between 0 and 1"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'; it must be a number above 1"),
        ({"patch_size": [2, 2]}, r"patch_size is \(2, 2\)"),
        ({"patch_size": [1, 2, 0]}, r"patch_size is \(1, 2, 0\)"),
        ({"gate_compress": 1}, "gate_compress is 1; it must be true or false"),
        ({"adaln_rank": 0}, "adaln_rank is 0; it must be a positive integer or null"),
        ({"adaln_rank": 33}, "adaln_rank is 33, more than the time_embed_dim 32"),
        ({"rope_freq_dim": 6}, "rope_freq_dim is 6, which turns 36 .* attention_head_dim is 32.* at most 5"),
        ({"freq_dim": 15}, "freq_dim is 15"),
    ],
)
def test_refuses(change: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MiniMaxH3Config.from_dict(BASE | change)


def test_missing_keys_and_all_problems_at_once() -> None:
    values = {key: value for key, value in BASE.items() if key not in {"ffn_dim", "text_dim"}}
    with pytest.raises(ConfigError) as caught:
        MiniMaxH3Config.from_dict(values, source="here")
    assert [problem.partition(" is")[0] for problem in caught.value.problems] == [
        "here: ffn_dim",
        "here: text_dim",
    ]
    with pytest.raises(ConfigError) as caught:
        MiniMaxH3Config.from_dict(BASE | {"num_layers": -1, "qk_norm_eps": 2.0}, source="here")
    assert len(caught.value.problems) == 2


def test_imports_no_torch() -> None:
    program = "import sys, omni_attn.models.minimax_h3.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_latent_that_patches_do_not_fill_is_refused() -> None:
    with pytest.raises(MetadataError, match=r"height is 47, which patches of 2 do not fill. Use 46"):
        MiniMaxH3Config(**REAL).token_grid(37, 47, 84)
