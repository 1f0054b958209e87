"""Named encodings: each is one row of the table of transports, decays and normalizers.

docs/how-to-choose-an-encoding.md has the table and says which other combinations there are.
"""

from __future__ import annotations

from typing import Any


def _rotation(angles: str, *, moves_values: bool = False) -> dict[str, Any]:
    return {
        "transport": "accumulated_rotation",
        "rotation_angles": angles,
        "moves_values": moves_values,
        "decay": "none",
    }


PRESETS: dict[str, dict[str, Any]] = {
    "nope": {"transport": "none", "decay": "none"},
    "rope": {"transport": "rotary", "decay": "none"},
    "alibi": {"transport": "none", "decay": "alibi"},
    "fox": {"transport": "none", "decay": "forget"},
    "path": {"transport": "householder", "decay": "none"},
    "path_fox": {"transport": "householder", "decay": "forget"},
    "path_alibi": {"transport": "householder", "decay": "alibi"},
    "rotation_random": _rotation("random_position"),
    "rotation_random_qkv": _rotation("random_position", moves_values=True),
    "rotation_token": _rotation("random_token"),
    "rotation_token_qkv": _rotation("random_token", moves_values=True),
    "rotation_learned": _rotation("learned_token"),
    "rotation_learned_qkv": _rotation("learned_token", moves_values=True),
    "stick_breaking": {"transport": "none", "decay": "none", "normalizer": "stick_breaking"},
    "delta_net": {
        "transport": "delta_rule",
        "decay": "none",
        "normalizer": "linear",
        "beta_max": 1.0,
        "output_norm": True,
    },
    "path_linear": {
        "transport": "householder",
        "decay": "none",
        "normalizer": "linear",
        "output_norm": True,
    },
}
