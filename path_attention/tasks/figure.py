"""Figures of the synthetic tasks, drawn from the rows of their report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from path_attention.results import write_figure
from path_attention.tasks.record import Row

# Okabe and Ito's colours, apart for colour-blind readers and in grey; markers tell them apart too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "0.5")
_MARKERS = "osD^vPX*"
_FLOOR = 1e-7  # where no error is drawn on the logarithmic axis


def draw(task: str, rows: Sequence[Row], path: Path) -> None:
    """Draw a task's report as a PNG.

    flip_flop: the share of errors on each test, a row of panels for each number of steps: pooled,
    with its interval, and of each seed's least and greatest; crosses are published. group_words:
    the fewest layers by length, one panel a form. mqrar: accuracy by N, shaded from the least to
    the greatest seed.
    """
    drawing = {"flip_flop": _flip_flop, "group_words": _group_words, "mqrar": _mqrar}[task]
    write_figure(drawing([row for row in rows if row["kind"] != "not_run"]), path)


def _flip_flop(rows: Sequence[Row]) -> Figure:
    tests = list(dict.fromkeys(row["test"] for row in rows))
    names: dict[str, list[str]] = {}
    for row in rows:
        if _name(row) not in names.setdefault(row["title"], []):
            names[row["title"]].append(_name(row))
    heights = [1.6 + 0.3 * len(under) for under in names.values()]
    longest = max(len(name) for under in names.values() for name in under)
    size = (2.6 * len(tests) + 0.075 * longest + 1, sum(heights))
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    panels = figure.subplots(len(names), len(tests), squeeze=False, height_ratios=heights)
    for (title, under), line in zip(names.items(), panels, strict=True):
        for axes, test in zip(line, tests, strict=True):
            for row in (r for r in rows if (r["title"], r["test"]) == (title, test)):
                _share(axes, row, under.index(_name(row)))
            axes.set(xscale="log", xlim=(_FLOOR, 1), title=test, xlabel="share of errors")
            axes.set_yticks(range(len(under)), under if axes is line[0] else [""] * len(under))
            axes.set_ylim(len(under) - 0.5, -0.5)
            _tidy(axes)
        line[0].set_title(f"{title}: {tests[0]}")
    figure.suptitle(
        "Flip-flop: dots pooled, lines 95 %, ticks each seed's least and greatest, ◂ no error: "
        "at most, × published",
        fontsize=9,
    )
    return figure


def _share(axes: Axes, row: Row, y: int) -> None:
    """A setting's share of errors on one test, on the line y."""
    axes.plot([max(row["low"], _FLOOR), row["high"]], [y, y], color=_COLOURS[0])
    if row["errors"]:
        axes.plot(row["errors"] / row["counted"], y, "o", color=_COLOURS[0])
        axes.plot([max(row[k], _FLOOR) for k in ("least", "greatest")], [y, y], "|k")
    else:
        axes.plot(row["high"], y, "<", color=_COLOURS[0])
    if row["published"]:
        axes.plot(row["published"], y, "x", color=_COLOURS[1])


def _group_words(rows: Sequence[Row]) -> Figure:
    fewest = [row for row in rows if row["kind"] == "fewest"]
    titles = list(dict.fromkeys(row["title"] for row in fewest))
    names = list(dict.fromkeys(row["model"] for row in fewest))
    wide = min(len(titles), 3)
    tall = -(-len(titles) // wide)
    figure = Figure(figsize=(4 * wide, 3.4 * tall), layout="constrained", dpi=150)
    panels = list(figure.subplots(tall, wide, squeeze=False).flat)
    for axes in panels[len(titles) :]:
        axes.set_axis_off()
    for axes, title in zip(panels, titles, strict=False):
        for name in names:
            mine = [row for row in fewest if (row["title"], row["model"]) == (title, name)]
            done = [row for row in mine if row["layers"] is not None]
            n = names.index(name)
            shift = 0.04 * (n - len(names) / 2)  # lines that coincide stay visible
            style = {"color": _COLOURS[n % 8], "marker": _MARKERS[n % 8], "markersize": 4}
            at = [row["length"] for row in done]
            axes.plot(at, [row["layers"] + shift for row in done], label=name, **style)
        under = [row for row in fewest if row["title"] == title]
        most, longest = (max(row[name] for row in under) for name in ("tried", "length"))
        axes.set(title=title, xlabel="length", ylabel="fewest layers, every seed > 90 %")
        axes.set_yticks(range(1, most + 1))
        axes.set_ylim(0.7, most + 0.3)
        axes.set_xlim(1.5, longest + 0.5)
        axes.set_xticks(range(2, longest + 1, 2))
        _tidy(axes)
    figure.axes[0].legend(frameon=False, fontsize=7)
    return figure


def _mqrar(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(5.4, 3.8), layout="constrained", dpi=150)
    axes = figure.subplots()
    for n, name in enumerate(dict.fromkeys(_name(row) for row in rows)):
        mine = sorted((row for row in rows if _name(row) == name), key=_n_back)
        at = [_n_back(row) for row in mine]
        style = {"color": _COLOURS[n % 8], "marker": _MARKERS[n % 8], "markersize": 5}
        axes.plot(at, [1 - row["share"] for row in mine], label=name, **style)
        low, high = [1 - row["greatest"] for row in mine], [1 - row["least"] for row in mine]
        axes.fill_between(at, low, high, color=style["color"], alpha=0.18, linewidth=0)
    axes.set(xlabel="N", ylabel="accuracy", ylim=(-0.02, 1.02))
    axes.set_xticks(sorted({_n_back(row) for row in rows}))
    axes.set_title("MQRAR-N: mean of seeds, shaded from the least to the greatest", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    _tidy(axes)
    return figure


def _n_back(row: Row) -> int:
    return int(row["title"].rpartition("-")[2])


def _name(row: Row) -> str:
    words = [f"{row['encoding']}, {row['layers']} layer{'s' * (row['layers'] > 1)}"]
    return "; ".join(words + [row["change"]] * bool(row["change"]))


def _tidy(axes: Axes) -> None:
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
