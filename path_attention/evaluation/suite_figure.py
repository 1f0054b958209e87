"""The figure of a suite's scores: by tokens of context where it has lengths, else as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from path_attention.results import plain_label

Row = Mapping[str, Any]
# Okabe and Ito's colours, apart for colour-blind readers and in grey; markers tell them apart too
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_WIDE = 4  # panels in a line


def scale(row: Row) -> int:
    """100 for shares, which are shown in percent, else 1."""
    return 1 if "perplexity" in row["metric"] or "bits" in row["metric"] else 100


def draw_suite(suite: str, rows: Sequence[Row]) -> Figure:
    """Scores of a suite, with their 95 % intervals.

    With several lengths of context: of one model a panel with a curve for each task; of several
    models a panel for each task, means first, with a curve for each model. Else bars, shares and
    perplexities apart.
    """
    rows = [row for row in rows if row["score"] is not None]
    by_length = [row for row in rows if isinstance(row["length"], int)]
    if len({row["length"] for row in by_length}) > 1:
        return _curves(suite, by_length)
    return _bars(suite, rows)


def _curves(suite: str, rows: Sequence[Row]) -> Figure:
    models = list(dict.fromkeys(row["model"] for row in rows))
    tasks = list(dict.fromkeys(_task(row) for row in rows))
    tasks.sort(key=lambda task: not task.startswith("mean"))
    rows = sorted(rows, key=lambda row: tasks.index(_task(row)))
    panels = {task: [row for row in rows if _task(row) == task] for task in tasks}
    if len(models) == 1 or len(tasks) == 1:
        panels = {models[0] if len(models) == 1 else tasks[0]: list(rows)}
    wide = min(len(panels), _WIDE)
    high = -(-len(panels) // wide)
    size = (6.4, 4.4) if len(panels) == 1 else (3.4 * wide, 2.8 * high)
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    axes = figure.subplots(high, wide, squeeze=False).ravel()
    for panel, (title, mine) in zip(axes, panels.items(), strict=False):
        name = _task if len(models) == 1 else _model
        for n, label in enumerate(dict.fromkeys(map(name, mine))):
            _curve(panel, [row for row in mine if name(row) == label], n, label)
        panel.set_xlabel("tokens of context")
        panel.set_title(plain_label(title), fontsize=9)
        _tidy(panel)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    axes[0].set_ylabel("score, %" if scale(rows[0]) == 100 else "score")
    handles, labels = axes[0].get_legend_handles_labels()
    if len(labels) > 7:
        figure.legend(handles, labels, frameon=False, fontsize=7, loc="outside right upper")
    else:
        axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{suite}: scores with 95 % intervals", fontsize=10)
    return figure


def _curve(axes: Axes, rows: Sequence[Row], n: int, label: str) -> None:
    rows = sorted(rows, key=lambda row: row["length"])
    at = [row["length"] for row in rows]
    mean = label.startswith("mean")
    colour = "#000000" if mean else _COLOURS[n % (len(_COLOURS) - 1)]
    axes.plot(
        at,
        [scale(row) * row["score"] for row in rows],
        color=colour,
        marker=_MARKERS[n % len(_MARKERS)],
        markersize=4,
        linewidth=2.4 if mean else 1.2,
        label=plain_label(label),
    )
    if all(row["low"] is not None for row in rows):
        low, high = ([scale(row) * row[end] for row in rows] for end in ("low", "high"))
        axes.fill_between(at, low, high, color=colour, alpha=0.1, linewidth=0)
    if min(at) > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(at, [f"{length:,}" for length in at], fontsize=7)
    axes.xaxis.set_minor_locator(NullLocator())


def _bars(suite: str, rows: Sequence[Row]) -> Figure:
    kinds = {by: [row for row in rows if scale(row) == by] for by in (100, 1)}
    kinds = {by: mine for by, mine in kinds.items() if mine}
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(5.2 * max(len(kinds), 1), 4.4), layout="constrained", dpi=130)
    axes = figure.subplots(1, max(len(kinds), 1), squeeze=False)[0]
    for panel, (by, mine) in zip(axes, kinds.items(), strict=False):
        tasks = list(dict.fromkeys(_task(row) for row in mine))
        for n, model in enumerate(models):
            found = [row for row in mine if row["model"] == model]
            at = [tasks.index(_task(row)) + (n + 0.5) / len(models) * 0.8 - 0.4 for row in found]
            score = [by * row["score"] for row in found]
            ends = [
                [
                    0.0 if row["low"] is None else abs(by * (row[end] - row["score"]))
                    for row in found
                ]
                for end in ("low", "high")
            ]
            colour = _COLOURS[n % len(_COLOURS)]
            style = {"height": 0.8 / len(models), "color": colour, "ecolor": "0.3"}
            panel.barh(at, score, xerr=ends, label=plain_label(model), **style)
        panel.set_yticks(range(len(tasks)), tasks, fontsize=7)
        panel.invert_yaxis()
        panel.set_xlabel("score, %" if by == 100 else "perplexity, or bits a byte")
        _tidy(panel)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{suite}: scores with 95 % intervals", fontsize=10)
    return figure


def _model(row: Row) -> str:
    return row["model"]


def _task(row: Row) -> str:
    """The column, with what tells rows of one column and length apart."""
    where = f" {row['length']}" if isinstance(row["length"], str) else ""
    metric = "" if row["metric"] in ("score", "mean") else f", {row['metric']}"
    how = "" if row["filter"] in ("", "none") else f", {row['filter']}"
    return f"{row['column']}{where}{metric}{how}"


def _tidy(axes: Axes) -> None:
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_ways(rows: Sequence[Row]) -> Figure:
    """Scores of `evaluate beside_lm_eval`: at each task and length a point for each way to it."""
    ways = list(dict.fromkeys(_way(row) for row in rows))
    places = list(dict.fromkeys(_place(row) for row in rows))
    size = (max(6.4, 1.6 + 0.8 * len(places)), 4.6)
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    axes = figure.subplots()
    for n, way in enumerate(ways):
        mine = [row for row in rows if _way(row) == way]
        at = [places.index(_place(row)) + (n + 0.5) / len(ways) * 0.7 - 0.35 for row in mine]
        ends = [
            [0.0 if row["low"] is None else abs(row[end] - row["score"]) * 100 for row in mine]
            for end in ("low", "high")
        ]
        style: Any = {"color": _COLOURS[n % len(_COLOURS)], "fmt": _MARKERS[n % len(_MARKERS)]}
        score = [100 * row["score"] for row in mine]
        axes.errorbar(at, score, yerr=ends, markersize=4, linewidth=1, label=way, **style)
    axes.set_xticks(range(len(places)), places, fontsize=7)
    axes.set_ylabel("score, %")
    axes.legend(frameon=False, fontsize=7)
    axes.set_title("The same tasks by lm-eval and by us, with 95 % intervals", fontsize=10)
    _tidy(axes)
    return figure


def _way(row: Row) -> str:
    return f"{row['samples']}'s samples, {row['reader']}'s reader, batch {row['batch']}".replace(
        "ours's", "our"
    )


def _place(row: Row) -> str:
    return plain_label(f"{row['model']}\n{row['column']}\n{row['length']:,}")
