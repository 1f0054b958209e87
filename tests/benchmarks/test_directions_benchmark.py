"""The directions' bandwidth: bytes over time, beside a copy."""

from __future__ import annotations

import pytest

from path_attention.benchmarks.directions import BenchmarkDirections
from path_attention.results import read_result

SMALL = {"tokens": 256, "heads": 4, "size": 16, "device": "cpu", "repeats": 3}


def test_rows_hold_bytes_over_time(tmp_path, capsys):
    BenchmarkDirections(**SMALL, dtype="bfloat16", out=tmp_path / "x").run()
    result = read_result(tmp_path / "x.json")
    rows = result["rows"]
    assert [row["pass"] for row in rows] == ["copy", "forward", "backward"]
    # x in bfloat16 and w in float32: 6 bytes a channel forward, 8 backward.
    for row, count in zip(rows, (6, 6, 8), strict=True):
        assert row["gb_per_s"] * row["ms"] * 1e6 == pytest.approx(256 * 64 * count, rel=2e-3)
        assert row["of_copy"] == pytest.approx(row["gb_per_s"] / rows[0]["gb_per_s"], rel=1e-2)
    assert [row["speedup"] for row in rows] == [None, 1, 1]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "of_copy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementations": "triton"}, "implementations: expected some of torch, got 'triton'"),
        ({"repeats": 0}, "repeats: expected at least 1, got 0"),
        ({"dtype": "int8"}, "dtype: expected some of float32, bfloat16, float16, got 'int8'"),
    ],
)
def test_bad_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        BenchmarkDirections(**{**SMALL, **options}, out=tmp_path / "x").run()
