"""Figures of suites: a curve for each task of one model, a panel for each task of several, bars."""

from __future__ import annotations

import pytest

from path_attention.evaluation.suite_figure import draw_suite
from path_attention.results import png, write_figure


def row(model, column, length, score, metric="score", low=0.05):
    ends = {"low": score - low, "high": score + low} if low else {"low": None, "high": None}
    row = {"model": model, "column": column, "length": length, "filter": "none"}
    return {**row, "metric": metric, "score": score, **ends}


def panels(figure):
    return [axes for axes in figure.axes if axes.get_visible()]


def test_by_length_of_one_model_is_a_curve_for_each_task(tmp_path):
    columns = ("vt", "fwe", "mean of 2")
    rows = [row("a", column, length, 0.5) for column in columns for length in (1024, 2048)]
    figure = draw_suite("ruler", rows)
    (axes,) = panels(figure)
    assert [line.get_label() for line in axes.lines] == ["mean of 2", "vt", "fwe"]
    assert axes.lines[0].get_ydata() == pytest.approx([50, 50])
    write_figure(figure, tmp_path / "x" / "ruler.png")
    assert (tmp_path / "x" / "ruler.png").read_bytes()[:4] == b"\x89PNG" == png(figure)[:4]
    assert len(list((tmp_path / "x").iterdir())) == 1


def test_by_length_of_several_models_is_a_panel_for_each_task():
    columns = ("vt", "fwe", "cwe", "niah_single_1", "mean of 4")
    rows = [
        row(model, column, length, 0.5, low=0.0)
        for model in "ab"
        for column in columns
        for length in (0, 1024, 2048)
    ]
    rows[0]["score"] = None  # not finite
    axes = panels(draw_suite("ruler", rows))
    assert [a.get_title() for a in axes] == ["mean of 4", *columns[:-1]]
    assert [[line.get_label() for line in a.lines] for a in axes] == [["a", "b"]] * 5
    assert len(axes[1].lines[0].get_xdata()) == 2 and len(axes[1].lines[1].get_xdata()) == 3


def test_without_lengths_shares_and_perplexities_are_bars_apart():
    rows = [row(model, "piqa", None, 0.25, "acc") for model in "ab"]
    rows += [row(model, "wikitext", None, 20.0, "word_perplexity", low=1.0) for model in "ab"]
    shares, perplexities = panels(draw_suite("zero_shot", rows))
    assert [bar.get_width() for bar in shares.patches] == [25, 25]
    assert [bar.get_width() for bar in perplexities.patches] == [20, 20]
    assert [t.get_text() for t in perplexities.get_yticklabels()] == ["wikitext, word_perplexity"]
