"""Named encodings: each is one row of the table of transports and decays."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "nope": {"transport": "none", "decay": "none"},
    "rope": {"transport": "rotary", "decay": "none"},
    "fox": {"transport": "none", "decay": "forget"},
    "path": {"transport": "householder", "decay": "none"},
    "path_fox": {"transport": "householder", "decay": "forget"},
}
