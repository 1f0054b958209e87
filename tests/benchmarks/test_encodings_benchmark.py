"""The benchmark of encodings: a row for each preset, and no figure of a wrong layer."""

from __future__ import annotations

import pytest
import torch

from path_attention.benchmarks import encodings as module
from path_attention.benchmarks.encodings import BenchmarkEncodings
from path_attention.models.presets import PRESETS
from path_attention.results import read_result

SMALL = {"tokens": 40, "batch": 1, "hidden_size": 32, "heads": 2, "repeats": 2, "device": "cpu"}


def test_writes_rows_figure_and_table(tmp_path, capsys):
    BenchmarkEncodings(**SMALL, out=tmp_path / "x").run()
    rows = read_result(tmp_path / "x.json")["rows"]
    assert [row["encoding"] for row in rows] == ["rope", *(n for n in PRESETS if n != "rope")]
    plain = {row["encoding"]: row["parameters"] for row in rows}
    assert plain["rope"] == plain["alibi"] == 4 * 32 * 32 < plain["rotation_learned"]
    for row in rows:
        assert row["both_ms"] > 0 and row["peak_mib"] > 0 and row["error"] < 1e-4
    assert rows[0]["both_ratio"] == 1
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "rotation_learned" in capsys.readouterr().out


def test_rope_is_measured_beside_those_asked_for(tmp_path):
    run = BenchmarkEncodings(**SMALL, encodings="fox,path,fox", out=tmp_path / "x")
    rows = run.measure(torch.device("cpu"), lambda line: None)
    assert [row["encoding"] for row in rows] == ["rope", "fox", "path"]


def test_memory_that_is_rounded_away_is_no_division_by_it(tmp_path):
    sizes = {"tokens": 1, "hidden_size": 8}
    BenchmarkEncodings(**{**SMALL, **sizes}, encodings="nope", out=tmp_path / "x").run()
    assert read_result(tmp_path / "x.json")["rows"][0]["peak_mib"] == 0
    assert (tmp_path / "x.png").is_file()


def test_a_wrong_layer_is_not_measured(tmp_path, monkeypatch):
    """Its output is rounded to bfloat16 where float32 is asked for."""
    right = module._job

    def rounded(layer, x, ids):
        job = right(layer, x, ids)
        return (
            job
            if x.dtype == torch.float64
            else job._replace(call=lambda: job.call().bfloat16().float())
        )

    monkeypatch.setattr(module, "_job", rounded)
    run = BenchmarkEncodings(**SMALL, encodings="fox", out=tmp_path / "x")
    with pytest.raises(ValueError, match="rope: expected a relative error of at most 0.0001"):
        run.run()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"encodings": "rope,pathh"}, "encodings: expected some of nope"),
        ({"tokens": 0}, "tokens: expected at least 1"),
        ({"repeats": 0}, "repeats: expected at least 1"),
        ({"heads": 5}, "num_attention_heads: expected a divisor"),
        ({"device": "tpu"}, "device: expected"),
    ],
)
def test_bad_options_are_refused(tmp_path, change: dict, named: str):
    with pytest.raises(ValueError, match=named):
        BenchmarkEncodings(**{**SMALL, **change}, out=tmp_path / "x").run()
