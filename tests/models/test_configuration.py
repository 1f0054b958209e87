"""PathAttentionConfig: checks, presets, files."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from path_attention.models import PRESETS, PathAttentionConfig, PathAttentionForCausalLM


def test_presets_are_configurations_that_fill_in_the_sizes() -> None:
    for name, row in PRESETS.items():
        config = PathAttentionConfig.from_preset(name, hidden_size=64, num_attention_heads=4)
        assert {field: getattr(config, field) for field in row} == row
        assert (config.head_dim, config.value_head_dim, config.num_key_value_heads) == (16, 16, 4)
        assert config.intermediate_size == 192


def test_files_from_before_there_were_more_choices_mean_what_they_meant(tmp_path) -> None:
    """A config.json as it was written when there were transports and decays alone."""
    old = {
        "architectures": ["PathAttentionForCausalLM"], "model_type": "path_attention",
        "beta_bias_init": -1.0, "beta_max": 2.0, "decay": "forget", "direction_conv_size": 3,
        "direction_rank": 8, "dtype": "float32", "forget_bias_init": 0.0, "head_dim": 8,
        "hidden_size": 32, "initializer_range": 0.2, "intermediate_size": 128,
        "max_position_embeddings": 4096, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "pad_token_id": 0, "qk_norm": True, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "transport": "householder",
        "transformers_version": "5.17.0", "use_cache": True, "value_head_dim": 12,
        "vocab_size": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = AutoConfig.from_pretrained(tmp_path)
    new = {
        "normalizer": "softmax",
        "moves_values": False,
        "output_norm": False,
        "householders_per_token": 1,
    }
    for name, value in {**old, **new}.items():
        if name not in ("architectures", "dtype", "transformers_version"):
            assert getattr(config, name) == value, name
    attention = PathAttentionForCausalLM(config).model.layers[0].attention
    assert {name: list(value.shape) for name, value in attention.state_dict().items()} == {
        "q_proj.weight": [32, 32],
        "k_proj.weight": [16, 32],
        "v_proj.weight": [24, 32],
        "o_proj.weight": [32, 48],
        "q_norm.weight": [8],
        "k_norm.weight": [8],
        "transport.w_conv": [16, 3],
        "transport.w_proj.0.weight": [8, 32],
        "transport.w_proj.1.weight": [16, 8],
        "transport.beta_proj.weight": [2, 32],
        "transport.beta_proj.bias": [2],
        "decay.forget_proj.weight": [4, 32],
        "decay.forget_proj.bias": [4],
    }


def test_how_rotations_once_learned_is_read_where_no_rotation_is(tmp_path) -> None:
    """Every file has the field: "learned" was its default, and is refused of rotations alone."""
    for preset in ("path_fox", "rope", "rotation_learned"):
        PathAttentionConfig.from_preset(preset).save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**saved, "rotation_angles": "learned"}))
        if preset == "rotation_learned":
            with pytest.raises(ValueError, match=r"^rotation_angles: .*, got 'learned'"):
                AutoConfig.from_pretrained(tmp_path)
        else:
            assert AutoConfig.from_pretrained(tmp_path).rotation_angles == saved["rotation_angles"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 64},  # 64 is the default's too
        {"transport": "rotary", "decay": "forget", "direction_rank": None, "beta_max": 1.5},
        {"num_key_value_heads": 3, "intermediate_size": 100, "eos_token_id": [1, 2]},
        {"tie_word_embeddings": True, "pad_token_id": 3, "rope_theta": 5e5},
        {"transport": "accumulated_rotation", "moves_values": True, "rotation_bound": 1.5},
        {"normalizer": "linear", "householders_per_token": 2, "output_norm": True},
    ],
)
def test_files_keep_every_field(fields: dict, tmp_path) -> None:
    config = PathAttentionConfig(**fields)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "path_attention"
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is PathAttentionConfig
    ours, theirs = config.to_dict(), again.to_dict()
    for name in ("transformers_version", "_name_or_path"):
        ours.pop(name, None), theirs.pop(name, None)
    assert ours == theirs


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"initializer_range": 0.0}, "initializer_range"),
        ({"pad_token_id": 32000}, "pad_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"eos_token_id": [1, 40000]}, "eos_token_id"),
        ({"pad_token_id": "end"}, "pad_token_id"),
        ({"bos_token_id": 1.5}, "bos_token_id"),
        ({"nope_layers": 3}, "nope_layers"),
        ({"nope_layers": [12]}, "nope_layers"),
        ({"nope_layers": [0.5]}, "nope_layers"),
        ({"use_cache": "no"}, "use_cache"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings"),
        ({"transport": "rope"}, "transport"),
        ({"beta_max": 3.0}, "beta_max"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
    ],
)
def test_bad_fields_are_refused(fields: dict, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        PathAttentionConfig(**fields)


def test_presets_refuse_unknown_names_and_fields() -> None:
    with pytest.raises(ValueError, match=r"name: expected one of .*'path_fox'"):
        PathAttentionConfig.from_preset("path-fox")
    with pytest.raises(ValueError, match=r"overrides: .* got \['beta_maxx'\]"):
        PathAttentionConfig.from_preset("path", beta_maxx=1.0)
