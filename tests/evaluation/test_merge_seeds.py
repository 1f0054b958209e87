"""Merged seeds: mean and spread of the same measurement, and the figure of both kinds of result."""

from __future__ import annotations

import json
import statistics

import pytest

from path_attention.evaluation.figure import draw
from path_attention.evaluation.merge_seeds import MergeSeeds, merge_seeds
from path_attention.results import make_result, read_result, write_result

PERPLEXITIES = ([7.0, 9.0, 30.0], [8.0, 12.0, 90.0], [9.0, 12.0, 60.0])
SHARED = {
    "training_length": 256,
    "dtype": "float32",
    "data": "0123",
    "tokens": 512,
    "windows": 4,
    "documents": 3,
}


def one_seed(values: list[float], **change) -> dict:
    rows = []
    for model, factor in (("path", 1.0), ("rope", 2.0)):
        for length, value in zip((256, 512, 1024), values, strict=True):
            value *= factor
            numbers = {"perplexity": value, "low": value * 0.9, "high": value * 1.1, "loss": 0.0}
            growth = value / (values[0] * factor)
            grown = {"growth": growth, "growth_low": growth * 0.9, "growth_high": growth * 1.1}
            names = {"by": "length", "length": length}
            rows.append({"model": model, **names, **numbers, **grown, **SHARED, **change})
            names = {"by": "position", "from_position": length // 2 + 1, "to_position": length}
            rows.append({"model": model, **names, **numbers, **SHARED, **change})
    return make_result(what="x", rows=rows, command="x")


def test_mean_and_spread():
    result = merge_seeds([one_seed(values) for values in PERPLEXITIES], "make seeds")
    row = next(r for r in result["rows"] if r["model"] == "rope" and r.get("length") == 1024)
    assert row == {
        "model": "rope",
        "by": "length",
        "length": 1024,
        "perplexity": 120.0,
        "std": 60.0,
        "low": 60.0,
        "high": 180.0,
        "growth": pytest.approx((30 / 7 + 90 / 8 + 60 / 9) / 3),
        "growth_std": pytest.approx(statistics.stdev([30 / 7, 90 / 8, 60 / 9]), rel=1e-5),
        "growth_low": pytest.approx(30 / 7),
        "growth_high": pytest.approx(90 / 8),
        "seeds": 3,
        **SHARED,
    }
    assert len(result["rows"]) == 12
    assert result["command"] == "make seeds"


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([one_seed(PERPLEXITIES[0])], "files: expected at least two results"),
        (
            [one_seed(PERPLEXITIES[0]), one_seed(PERPLEXITIES[1], data="4567")],
            "expected the same data in all of them",
        ),
        (
            [one_seed(PERPLEXITIES[0]), one_seed(PERPLEXITIES[1]) | {"device": "other"}],
            "expected the same device",
        ),
        (
            [one_seed(PERPLEXITIES[0]), one_seed(PERPLEXITIES[1], model="path")],
            "expected the same models and lengths",
        ),
    ],
)
def test_what_is_not_the_same_measurement_is_refused(results, message):
    with pytest.raises(ValueError, match=message):
        merge_seeds(results, "x")


def test_the_command_writes_result_and_figure(tmp_path, capsys):
    for seed, values in enumerate(PERPLEXITIES):
        write_result(tmp_path / f"{seed}.json", one_seed(values))
    files = tuple(tmp_path / f"{seed}.json" for seed in range(3))
    MergeSeeds(files=files, out=tmp_path / "all.v1", command="make seeds").run()
    result = read_result(tmp_path / "all.v1.json")
    assert result["rows"][0]["seeds"] == 3
    assert (tmp_path / "all.v1.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "120.00" in shown and "4.29–11.25" in shown


def test_sets_of_texts_stay_apart(tmp_path, capsys):
    files = []
    for seed, values in enumerate(PERPLEXITIES):
        one, other = (one_seed([x * value for value in values])["rows"] for x in (1.0, 7.0))
        rows = [{"text": text, **r} for text, mine in (("a", one), ("b", other)) for r in mine]
        files.append(tmp_path / f"{seed}.json")
        write_result(files[-1], make_result(what="x", rows=rows, command="x"))
    MergeSeeds(files=tuple(files), out=tmp_path / "all", command="x").run()
    rows = read_result(tmp_path / "all.json")["rows"]
    assert len(rows) == 24
    found = {r["text"]: r["perplexity"] for r in rows if r.get("length") == 1024}
    assert found == {"a": 120.0, "b": 840.0}
    shown = capsys.readouterr().out
    assert "120.00" in shown and "840.00" in shown


def test_figure_of_one_document_and_models_of_other_training_lengths(tmp_path):
    result = one_seed(PERPLEXITIES[0], low=None, high=None)
    for row in result["rows"]:
        row["training_length"] = {"path": 256, "rope": None}[row["model"]]
    draw(json.loads(json.dumps(result)), tmp_path / "x.png")
    assert [p.name for p in tmp_path.iterdir()] == ["x.png"]
