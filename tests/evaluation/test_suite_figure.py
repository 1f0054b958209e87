"""Figures of suites: a curve for each task of one model, a panel for each task of several, bars."""

from __future__ import annotations

import pytest

from path_attention.evaluation.figure import draw_by_length
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


@pytest.mark.parametrize("lengths", [(1024, 2048), (None,)])
def test_any_name_of_a_model_is_shown(lengths):
    """Also one that matplotlib would leave out, or take for a formula."""
    names = ("_mine", r"$\foo$", "a_b^c $")
    columns = ("vt", "fwe")
    rows = [row(m, c, length, 0.5, low=0.0) for m in names for c in columns for length in lengths]
    for shown in (rows, rows[: len(rows) // 3]):
        figure = draw_suite("ruler", shown)
        assert png(figure)[:4] == b"\x89PNG"
    texts = draw_suite("ruler", rows).axes[0].get_legend().get_texts()
    assert [_letters(text) for text in texts] == list(names)


def test_perplexity_shows_any_name(tmp_path):
    names = ("_mine", r"$\foo$")
    rows = [
        {
            **{"text": text, "model": model, "by": by, by: 9, "to_position": 9, "length": 9},
            **{"perplexity": 5.0, "low": 4.0, "high": 6.0, "training_length": None},
            **{"tokens": 8, "documents": 2},
        }
        for text in ("one", "_$\\bar$")
        for model in names
        for by in ("length", "position")
    ]
    figure = draw_by_length(rows)
    assert png(figure)[:4] == b"\x89PNG"
    assert len(figure.axes) == 4
    for axes in figure.axes[::2]:
        assert [_letters(text) for text in axes.get_legend().get_texts()] == list(names)
    titles = [_letters(part._suptitle) for part in figure.subfigs]
    assert [title.split("\n")[0] for title in titles] == [
        "Perplexity by length on one",
        "Perplexity by length on _$\\bar$",
    ]


def _letters(text):
    """What a text of a figure shows."""
    shown, formula = text._preprocess_math(text.get_text())
    assert not formula
    return shown.replace("\u200b", "")


def test_without_lengths_shares_and_perplexities_are_bars_apart():
    rows = [row(model, "piqa", None, 0.25, "acc") for model in "ab"]
    rows += [row(model, "wikitext", None, 20.0, "word_perplexity", low=1.0) for model in "ab"]
    shares, perplexities = panels(draw_suite("zero_shot", rows))
    assert [bar.get_width() for bar in shares.patches] == [25, 25]
    assert [bar.get_width() for bar in perplexities.patches] == [20, 20]
    assert [t.get_text() for t in perplexities.get_yticklabels()] == ["wikitext, word_perplexity"]
