"""Every preset and free combinations of what an attention layer can be made of."""

from __future__ import annotations

from typing import Any

from path_attention.models import PRESETS

FREE: dict[str, dict[str, Any]] = {
    "rope + forget": {"transport": "rotary", "decay": "forget"},
    "rope + alibi": {"transport": "rotary", "decay": "alibi"},
    "rope of other frequencies and scale": {
        "transport": "rotary",
        "rope_frequencies": [1.0, 0.3, 0.02],
        "attention_scale": 0.7,
        "qkv_bias": True,
        "output_bias": True,
    },
    "rope and path + scaled forget": {
        "transport": "rotary_householder",
        "decay": "forget",
        "forget_scale": 0.4,
        "qkv_bias": True,
    },
    "rope of values too": {"transport": "rotary", "moves_values": True},
    "learned rotation + forget": {
        "transport": "accumulated_rotation",
        "decay": "forget",
        "moves_values": True,
    },
    "rotation learned from states": {
        "transport": "accumulated_rotation",
        "rotation_angles": "learned_state",
    },
    "random rotation + alibi": {
        "transport": "accumulated_rotation",
        "rotation_angles": "random_position",
        "rotation_bound": 3.0,
        "rotation_seed": 7,
        "decay": "alibi",
    },
    "random rotation by frequency": {
        "transport": "accumulated_rotation",
        "rotation_angles": "random_position",
        "rotation_bound": None,
        "rope_theta": 300.0,
        "moves_values": True,
    },
    "token rotation + forget": {
        "transport": "accumulated_rotation",
        "rotation_angles": "random_token",
        "decay": "forget",
        "moves_values": True,
    },
    "two householders": {"transport": "householder", "householders_per_token": 2},
    "three householders + forget": {
        "transport": "householder",
        "decay": "forget",
        "householders_per_token": 3,
        "direction_rank": None,
        "direction_conv_size": 0,
    },
    "rope + stick-breaking": {"transport": "rotary", "normalizer": "stick_breaking"},
    "learned rotation + stick-breaking": {
        "transport": "accumulated_rotation",
        "normalizer": "stick_breaking",
        "moves_values": True,
    },
    "linear": {"transport": "none", "normalizer": "linear"},
    "linear rope + alibi": {"transport": "rotary", "decay": "alibi", "normalizer": "linear"},
    "linear path + forget": {
        "transport": "householder",
        "decay": "forget",
        "normalizer": "linear",
        "beta_max": 1.0,
    },
    "linear + two householders": {
        "transport": "householder",
        "householders_per_token": 2,
        "normalizer": "linear",
    },
    "linear learned rotation": {
        "transport": "accumulated_rotation",
        "normalizer": "linear",
        "moves_values": True,
    },
    "gated delta rule": {
        "transport": "delta_rule",
        "decay": "forget",
        "normalizer": "linear",
        "output_norm": True,
    },
}
CASES = {**PRESETS, **FREE}
