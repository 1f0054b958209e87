"""The figure of perplexity by length, of one evaluation or of several seeds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from path_attention.results import write_figure

# Okabe and Ito's colours, apart for colour-blind readers and in grey; markers tell them apart too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
Row = Mapping[str, Any]


def draw(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw a result of `evaluate perplexity` or `evaluate merge` as a PNG.

    Left: perplexity of the same targets against tokens of context. Right: perplexity of each
    stretch of positions in one long window. Both axes are logarithmic, so that equal slopes are
    equal growth and the loss is linear. Shades are each row's `low` to `high`; the dotted line is
    the training length.
    """
    rows = result["rows"]
    figure = Figure(figsize=(10, 4.6), layout="constrained", dpi=150)
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
    figure.suptitle(_title(rows), fontsize=11)
    write_figure(figure, path)


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
            label=model,
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


def _title(rows: Sequence[Row]) -> str:
    first = rows[0]
    size = f"{first['tokens']:,} target tokens of {first['documents']} held-out documents"
    if "seeds" in first:
        shade = f"mean of {first['seeds']} seeds, shaded from the lowest to the highest"
    elif first["low"] is None:
        shade = "one document: no interval"
    else:
        shade = "shaded: 95 % interval over documents"
    return f"Perplexity by length ({size}; {shade})"
