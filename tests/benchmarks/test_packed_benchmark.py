"""The benchmark of packed documents: their lengths, and what it measures."""

from __future__ import annotations

import math

import pytest

from path_attention.benchmarks.packed import BenchmarkPacked, lognormal_lengths
from path_attention.results import read_result

SMALL = {"tokens": 150, "mean": 40.0, "shapes": "2x8", "repeats": 2, "device": "cpu"}


def test_lengths_are_lognormal_and_fill_the_batch():
    lengths = lognormal_lengths(10**7, 1000, 0.7, seed=3)
    assert sum(lengths) == 10**7 and min(lengths) >= 1
    logs = [math.log(n) for n in lengths]
    mean = sum(logs) / len(logs)
    # 10⁴ draws: each estimate's own deviation is 0.007 and less.
    assert mean == pytest.approx(math.log(1000) - 0.7**2 / 2, abs=0.03)
    assert math.sqrt(sum((x - mean) ** 2 for x in logs) / len(logs)) == pytest.approx(0.7, abs=0.03)
    assert lengths == lognormal_lengths(10**7, 1000, 0.7, seed=3)
    assert lognormal_lengths(10, 4, 0.0, seed=0) == [4, 4, 2]


def test_writes_rows_figure_and_table(tmp_path, capsys):
    BenchmarkPacked(**SMALL, batches=2, out=tmp_path / "x").run()
    result = read_result(tmp_path / "x.json")
    names = [(r["seed"], r["candidate"], r["encoding"]) for r in result["rows"]]
    ours = [("blockwise", e) for e in ("path", "path_fox", "fox", "nope")]
    assert names == [(n, *name) for n in (0, 1) for name in [("sdpa", "nope"), *ours]]
    for row in result["rows"]:
        lengths = lognormal_lengths(150, 40, 1, row["seed"])
        assert (row["documents"], row["longest"]) == (len(lengths), max(lengths))
        assert row["both_ms"] > 0 and row["peak_mib"] > 0 and row["error"] < 1e-5
        assert row["candidate"] != "sdpa" or row["both_ratio"] == 1
    assert result["command"] == (
        "path-attention benchmark packed --tokens 150 --mean 40.0 --batches 2 --shapes 2x8 "
        "--device cpu --repeats 2 --out x"
    )
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "blockwise" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": 0.5}, "mean: expected at least 1, got 0.5"),
        ({"sigma": -1.0}, "sigma: expected at least 0, got -1.0"),
        ({"sigma": float("nan")}, "sigma: expected a finite number, got nan"),
        ({"mean": float("inf")}, "mean: expected a finite number, got inf"),
        ({"shapes": "2"}, "shapes: expected heads x size, like 32x64, got '2'"),
        ({"candidates": "flash_varlen"}, "candidates: expected some of sdpa, blockwise"),
    ],
)
def test_bad_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        BenchmarkPacked(**{**SMALL, **options}, out=tmp_path / "x").run()
