"""The figure of perplexity by length, of one evaluation, several sets of texts or seeds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from path_attention.results import plain_label, write_figure

# Okabe and Ito's colours, apart for colour-blind readers and in grey; markers tell them apart too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
Row = Mapping[str, Any]


def draw(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw a result of `evaluate perplexity`, `perplexity_by_length` or `merge` as a PNG."""
    write_figure(draw_by_length(result["rows"]), path)


def draw_by_length(rows: Sequence[Row]) -> Figure:
    """Perplexity by length: a curve for each model, two panels for each set of texts (`text`).

    Left: perplexity of the same targets against tokens of context. Right: perplexity of each
    stretch of positions in one long window. Both axes are logarithmic, so that equal slopes are
    equal growth and the loss is linear. Shades are each row's `low` to `high`; the dotted line is
    the training length.
    """
    sets = by_text(rows)
    figure = Figure(figsize=(10, 4.6 * len(sets)), layout="constrained", dpi=150)
    parts = figure.subfigures(len(sets), 1, squeeze=False).ravel()
    for part, (text, mine) in zip(parts, sets.items(), strict=True):
        _two_panels(part, text, mine)
    return figure


def by_text(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by their set of texts; "" where they name none."""
    sets: dict[str, list[Row]] = {}
    for row in rows:
        sets.setdefault(row.get("text", ""), []).append(row)
    return sets


def _two_panels(figure: SubFigure, text: str, rows: Sequence[Row]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    by_length = [row for row in rows if row["by"] == "length"]
    by_position = [row for row in rows if row["by"] == "position"]
    _curves(left, by_length, "length")
    _curves(right, by_position, "to_position")
    left.set(xlabel="tokens of context", ylabel="perplexity")
    left.set_title("the same target tokens at every length", fontsize=10)
    right.set(xlabel="position in one long window (stretches end at the marks)")
    right.set_title("targets spread over each stretch", fontsize=10)
    left.legend(frameon=False)
    figure.suptitle(_title(text, rows), fontsize=11)


def _curves(axes: Axes, rows: Sequence[Row], x: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for n, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        mine = sorted((row for row in rows if row["model"] == model), key=lambda row: row[x])
        colour = _COLOURS[n % len(_COLOURS)]
        at = [row[x] for row in mine]
        axes.plot(
            at,
            [row["perplexity"] for row in mine],
            color=colour,
            marker=_MARKERS[n % len(_MARKERS)],
            markersize=5,
            label=plain_label(model),
        )
        if all(row["low"] is not None for row in mine):
            low, high = [row["low"] for row in mine], [row["high"] for row in mine]
            axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
    for trained in sorted({row["training_length"] for row in rows} - {None}):
        axes.axvline(trained, color="0.45", linestyle=":", linewidth=1.2, label="training length")
    ticks = sorted({row[x] for row in rows})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    values = [row["perplexity"] for row in rows]
    wide = max(values) > 3 * min(values)  # few round numbers of a decade fall into a narrow range
    axes.yaxis.set_major_locator(
        LogLocator(subs=(1, 1.5, 2, 3, 5, 7)) if wide else MaxNLocator(7, steps=[1, 2, 2.5, 5, 10])
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _title(text: str, rows: Sequence[Row]) -> str:
    first = rows[0]
    size = f"{first['tokens']:,} target tokens of {first['documents']} held-out documents"
    if "seeds" in first:
        shade = f"mean of {first['seeds']} seeds, shaded from the lowest to the highest"
    elif first["low"] is None:
        shade = "one document: no interval"
    else:
        shade = "shaded: 95 % interval over documents"
    on = f" on {plain_label(text)}\n" if text else " "
    return f"Perplexity by length{on}({size}; {shade})"
