"""WanConfig refuses what it cannot describe, and the presets are the published models."""

from __future__ import annotations

import dataclasses
import json

import pytest

from omni_attn.errors import ConfigError
from omni_attn.models import get_family
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.presets import WAN_PRESETS
from tests.models.wan.tiny_models import BASE, build_reference, config_of


def test_reads_what_diffusers_writes() -> None:
    written = json.loads(build_reference("i2v").to_json_string())
    assert WanConfig.from_dict(written) == config_of("i2v")


def test_reads_files_from_before_a_key_existed() -> None:
    old = {key: value for key, value in BASE.items() if key not in {"pos_embed_seq_len", "image_dim"}}
    assert WanConfig.from_dict(old | {"_class_name": "WanTransformer3DModel"}) == config_of("t2v")


def test_null_out_channels_mean_in_channels() -> None:
    assert WanConfig.from_dict(BASE | {"out_channels": None}).out_channels == 4


def test_fields_have_no_defaults_and_do_not_change() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(WanConfig)}
    assert defaults.pop("gate_compress") is False  # files do not have it
    assert all(default is dataclasses.MISSING for default in defaults.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_of("t2v").num_layers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layer": 2}, r"num_layer: unknown key\. Did you mean 'num_layers'\?"),
        ({"gibberish_xyz": 2}, r"gibberish_xyz: unknown key"),
        (
            {"_class_name": "WanVACETransformer3DModel"},
            "'WanVACETransformer3DModel'.*only 'WanTransformer3DModel'",
        ),
        ({"qk_norm": "layer_norm"}, "qk_norm is 'layer_norm'; it must be 'rms_norm_across_heads'"),
        ({"num_layers": 0}, "num_layers is 0; it must be a positive integer"),
        ({"num_layers": True}, "num_layers is True"),
        ({"num_layers": "2"}, "num_layers is '2'"),
        ({"eps": 1}, "eps is 1"),
        ({"cross_attn_norm": 1}, "cross_attn_norm is 1"),
        ({"gate_compress": 1}, "gate_compress is 1; it must be true or false"),
        ({"patch_size": [2, 2]}, r"patch_size is \(2, 2\)"),
        ({"patch_size": [1, 2, 0]}, r"patch_size is \(1, 2, 0\)"),
        ({"attention_head_dim": 13}, "attention_head_dim is 13.*even"),
        ({"attention_head_dim": 4}, "attention_head_dim is 4.*at least 6"),
        ({"freq_dim": 5}, "freq_dim is 5"),
        ({"image_dim": 8}, "image_dim is 8 and added_kv_proj_dim is None"),
        ({"image_dim": 8, "added_kv_proj_dim": 16}, "added_kv_proj_dim is 16.*= 24"),
        ({"pos_embed_seq_len": 10}, "pos_embed_seq_len is 10 without an image_dim"),
    ],
)
def test_refuses(change: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        WanConfig.from_dict(BASE | change, source="here/config.json")
    assert all(problem.startswith("here/config.json: ") for problem in caught.value.problems)


def test_names_all_problems_at_once() -> None:
    incomplete = {key: value for key, value in BASE.items() if key not in {"eps", "ffn_dim"}}
    with pytest.raises(ConfigError) as caught:
        WanConfig.from_dict(incomplete | {"window": 3})
    assert [problem.split(": ")[1].split(" is ")[0] for problem in caught.value.problems] == [
        "window",
        "ffn_dim",
        "eps",
    ]
    with pytest.raises(ConfigError) as caught:
        WanConfig.from_dict(BASE | {"num_layers": -1, "eps": 2.0})
    assert len(caught.value.problems) == 2


def test_attention_lengths_of_the_published_requests() -> None:
    i2v, flf2v = (WAN_PRESETS[name].transformer for name in ("wan2.1-i2v-14b", "wan2.1-flf2v-14b"))
    grid = i2v.token_grid(21, 60, 104)
    assert grid == (21, 30, 52)
    assert i2v.attention_lengths(grid) == {
        "self": (32760, 32760),
        "cross": (32760, 512),
        "cross.image": (32760, 257),
    }
    assert flf2v.attention_lengths(grid)["cross.image"] == (32760, 514)
    assert set(WAN_PRESETS["wan2.2-ti2v-5b"].transformer.attention_lengths((31, 22, 40))) == {"self", "cross"}


def test_presets_are_named_by_their_key_and_say_how_many_experts_work() -> None:
    assert all(name == preset.name for name, preset in WAN_PRESETS.items())
    boundaries = {
        name: preset.boundary_ratio for name, preset in WAN_PRESETS.items() if preset.num_experts == 2
    }
    assert boundaries == {"wan2.2-t2v-a14b": 0.875, "wan2.2-i2v-a14b": 0.9}
    assert [name for name, preset in WAN_PRESETS.items() if preset.expand_timesteps] == ["wan2.2-ti2v-5b"]
    assert WAN_PRESETS["wan2.2-ti2v-5b"].vae_spatial == 16


def test_unknown_family_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'wam' is not a model family\. Did you mean 'wan'\?"):
        get_family("wam")
