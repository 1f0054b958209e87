"""The benchmark of stick-breaking attention: its rows, and no figure of a wrong operator."""

from __future__ import annotations

import pytest
import torch

from path_attention.benchmarks import stick_breaking as module
from path_attention.benchmarks.stick_breaking import BenchmarkStickBreaking
from path_attention.results import read_result

SMALL = {"tokens": "40,64", "batch_tokens": 64, "heads": 2, "size": 8, "repeats": 2}


def test_writes_rows_figure_and_table(tmp_path, capsys):
    BenchmarkStickBreaking(**SMALL, device="cpu", out=tmp_path / "x").run()
    rows = read_result(tmp_path / "x.json")["rows"]
    names = [(row["candidate"], row["tokens"], row["mean_logit"]) for row in rows]
    one = [("flash", 0), ("stick_breaking", 0), ("stick_breaking", -8)]
    assert names == [(name, T, mean) for T in (40, 64) for name, mean in one]
    for row in rows:
        assert row["both_ms"] > 0 and row["peak_mib"] > 0
    assert rows[0]["both_ratio"] == 1 and rows[1]["error"] < 1e-4
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "stick_breaking" in capsys.readouterr().out


def test_the_logits_have_the_mean_that_is_asked_for():
    options = BenchmarkStickBreaking(**SMALL)
    q, k, _ = options._inputs(1, 300, -8.0, torch.float32, torch.device("cpu"))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5
    assert abs(logits.mean() + 8) < 0.5


def test_a_wrong_operator_is_not_measured(monkeypatch):
    right = module.stick_breaking_attention

    def rounded(*x, implementation=None):
        out, rest = right(*x, implementation=implementation)
        return (out if out.dtype == torch.float64 else out.bfloat16().float()), rest

    monkeypatch.setattr(module, "stick_breaking_attention", rounded)
    with pytest.raises(ValueError, match="stick_breaking: expected a relative error of at most"):
        BenchmarkStickBreaking(**SMALL).measure(torch.device("cpu"), lambda line: None)


@pytest.mark.parametrize("means", ["", "0,x", "nan", "0,-8,0"])
def test_bad_means_are_refused_by_name(means):
    options = BenchmarkStickBreaking(**SMALL, mean_logits=means)
    with pytest.raises(ValueError, match="mean_logits: expected different numbers"):
        options.measure(torch.device("cpu"), lambda line: None)
