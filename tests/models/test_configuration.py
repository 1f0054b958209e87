"""PathAttentionConfig: checks, presets, files."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from path_attention.models import PRESETS, PathAttentionConfig


def test_presets_are_the_rows_of_the_table() -> None:
    rows = {name: (row["transport"], row["decay"]) for name, row in PRESETS.items()}
    assert rows == {
        "nope": ("none", "none"),
        "rope": ("rotary", "none"),
        "fox": ("none", "forget"),
        "path": ("householder", "none"),
        "path_fox": ("householder", "forget"),
    }
    for name, row in rows.items():
        config = PathAttentionConfig.from_preset(name, hidden_size=64, num_attention_heads=4)
        assert (config.transport, config.decay) == row
        assert (config.head_dim, config.value_head_dim, config.num_key_value_heads) == (16, 16, 4)
        assert config.intermediate_size == 192


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 64},  # 64 is the default's too
        {"transport": "rotary", "decay": "forget", "direction_rank": None, "beta_max": 1.5},
        {"num_key_value_heads": 3, "intermediate_size": 100, "eos_token_id": [1, 2]},
        {"tie_word_embeddings": True, "pad_token_id": 3, "rope_theta": 5e5},
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
