"""The directions' bandwidth: bytes over time, beside a copy."""

from __future__ import annotations

import pytest

from path_attention.benchmarks.directions import directions_bandwidth


def test_rows_hold_bytes_over_time():
    rows = directions_bandwidth(tokens=256, heads=4, size=16, device="cpu", repeats=3)
    assert [row["pass"] for row in rows] == ["copy", "forward", "backward"]
    # x in bfloat16 and w in float32: 6 bytes a channel forward, 8 backward.
    for row, count in zip(rows, (6, 6, 8), strict=True):
        assert row["gb_per_s"] * row["ms"] * 1e6 == pytest.approx(256 * 64 * count, rel=2e-3)
        assert row["of_copy"] == pytest.approx(row["gb_per_s"] / rows[0]["gb_per_s"], rel=1e-2)
