"""Figures of measured rows: the same five panels for a head, and for a model over its heads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from path_attention.results import plain_label, png, write_figure

Row = Mapping[str, Any]
# Okabe and Ito's colours, apart for colour-blind readers; line styles tell them apart too.
BLUE, RED, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "0.35"
_PANELS = 5


def draw_models(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """A PNG with a row of panels for each model: medians over heads, shaded from 10 % to 90 %."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    size = (3.1 * _PANELS, 2.9 * len(models) + 0.4)
    figure = Figure(figsize=size, layout="constrained", dpi=120)
    panels = figure.subplots(len(models), _PANELS, squeeze=False)
    for line, model in zip(panels, models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        draw_panels(line, mine)
        line[0].set_ylabel(f"{plain_label(model)}\n\n{line[0].get_ylabel()}")
    figure.suptitle(
        f"Routes of attention (medians over heads, shaded from 10 % to 90 %; far: "
        f"{rows[0]['near']:,} tokens or more before the query)",
        fontsize=11,
    )
    write_figure(figure, path)


def head_png(rows: Sequence[Row]) -> bytes:
    """One head's panels as a PNG."""
    figure = Figure(figsize=(3.1 * _PANELS, 3.0), dpi=90)
    # margins by hand: a layout that is found takes half of the time, for every head of a model
    figure.subplots_adjust(left=0.045, right=0.99, bottom=0.16, top=0.91, wspace=0.3)
    draw_panels(figure.subplots(1, _PANELS), rows)
    return png(figure)


def draw_heads(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """A PNG of one model's layers and heads: four numbers of each head."""
    heads = [row for row in rows if row["kind"] == "head"]
    last = max(row["length"] for row in rows if row["kind"] == "context")
    context = {
        (row["layer"], row["head"]): row
        for row in rows
        if row["kind"] == "context" and row["length"] == last
    }
    grids = {
        "spectral gap 1 − ‖E M‖ (log₁₀)": lambda row: _log_gap(row["spectral_norm"]),
        "mixing window, tokens (log₂; grey: none)": lambda row: _log2(row["mixing_window"]),
        f"far mass at {last:,}": lambda row: context[row["layer"], row["head"]]["far_mass"],
        f"far values in step at {last:,}": lambda row: context[row["layer"], row["head"]][
            "in_step"
        ],
    }
    shape = max(row["layer"] for row in heads) + 1, max(row["head"] for row in heads) + 1
    colours = colormaps["viridis"].with_extremes(bad="0.85")
    figure = Figure(figsize=(13, 1.6 + 0.28 * shape[0]), layout="constrained", dpi=110)
    for axes, (title, of) in zip(figure.subplots(1, len(grids)), grids.items(), strict=True):
        grid = np.full(shape, np.nan)
        for row in heads:
            value = of(row)
            grid[row["layer"], row["head"]] = np.nan if value is None else value
        image = axes.imshow(grid, aspect="auto", cmap=colours)
        axes.set(title=title, xlabel="head", ylabel="layer")
        axes.title.set_fontsize(9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axes)
    write_figure(figure, path)


def draw_panels(panels: Sequence[Axes], rows: Sequence[Row]) -> None:
    """Routes, scores, tails, far mass, far values of these heads' rows."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    routes = [row for row in by_kind["route"] if row["length"]]
    draw_routes(panels[0], routes)
    _draw_scores(panels[1], by_kind["scores"])
    _draw_tails(panels[2], by_kind["tail"])
    draw_far_mass(panels[3], by_kind["context"])
    _draw_values(panels[4], by_kind["context"])
    for axes in panels:
        finish(axes)


def draw_routes(axes: Axes, rows: Sequence[Row]) -> None:
    """What is left of a query and of a score, by route length."""
    curve(axes, rows, "kept_norm", "norm left", BLUE, "-")
    curve(axes, rows, "kept_cosine", "direction left (cosine)", GREEN, "--")
    curve(axes, rows, "score_correlation", "score's correlation", RED, "-")
    curve(axes, rows, "norm_power", "‖E M‖ⁿ", GREY, ":", band=False)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="route length, tokens", ylabel="left of it", title="what a route leaves")
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)


def draw_far_mass(axes: Axes, rows: Sequence[Row]) -> None:
    """Far mass beside its bound, by context."""
    curve(axes, rows, "far_mass", "measured", RED, "-", marker="o")
    curve(axes, rows, "bound", r"bound $M/(M + K e^{2\lambda})$", GREY, ":", marker="x")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of context", ylabel="share of attention", title="far mass")
    axes.set_ylim(-0.03, 1.03)


def curve(
    axes: Axes,
    rows: Sequence[Row],
    column: str,
    label: str,
    colour: str,
    style: str,
    *,
    x: str = "length",
    band: bool = True,
    marker: str | None = None,
) -> None:
    """The median over rows of one x, shaded from the 10th to the 90th percentile."""
    at = sorted({row[x] for row in rows if row[column] is not None})
    if not at:
        return
    values: dict[Any, list[float]] = {place: [] for place in at}
    for row in rows:
        if row[column] is not None:
            values[row[x]].append(row[column])
    middle = [median(values[place]) for place in at]
    axes.plot(
        at, middle, style, color=colour, label=label, linewidth=1.4, marker=marker, markersize=4
    )
    if band and max(map(len, values.values())) > 1:
        low, high = zip(*(np.percentile(values[place], [10, 90]) for place in at), strict=True)
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)


def finish(axes: Axes, *, legend: bool = True) -> None:
    axes.grid(color="0.92", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.title.set_fontsize(9)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7)


def _draw_scores(axes: Axes, rows: Sequence[Row]) -> None:
    inner = [row for row in rows if row["above"] is not None and row["below"] is not None]
    heads = len({(row.get("layer"), row["head"]) for row in rows})
    for column, label, colour in (
        ("near_share", "near keys", BLUE),
        ("far_share", "far keys", RED),
    ):
        density: dict[float, float] = {}
        for row in inner:
            low, high = np.arcsinh(row["above"]), np.arcsinh(row["below"])
            at = float(np.sinh((low + high) / 2))
            density[at] = density.get(at, 0.0) + row[column] / heads / float(high - low)
        places = sorted(density)
        axes.step(
            places,
            [density[x] for x in places],
            where="mid",
            color=colour,
            label=label,
            linewidth=1,
        )
    axes.set_xscale("asinh", linear_width=1.0)
    axes.xaxis.set_major_locator(FixedLocator([-100, -30, -10, -3, -1, 0, 1, 3, 10, 30, 100]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set(xlabel="score (decay apart)", ylabel="density on this axis", title="scores")
    axes.set_ylim(bottom=0)


def _draw_tails(axes: Axes, rows: Sequence[Row]) -> None:
    curve(axes, rows, "near_share", "near keys", BLUE, "-", x="u")
    curve(axes, rows, "far_share", "far keys", RED, "-", x="u")
    curve(axes, rows, "tail_bound", "bound 2 e^(−u²/2)", GREY, ":", x="u", band=False)
    axes.set_yscale("log")
    axes.set_ylim(1e-6, 1.5)
    axes.set(
        xlabel="u", ylabel="share with |score| ≥ u", title="tails, in a random score's scatter"
    )


def _draw_values(axes: Axes, rows: Sequence[Row]) -> None:
    curve(axes, rows, "in_step", "measured", RED, "-", marker="o")
    curve(axes, rows, "incoherent", "random directions", GREY, ":", marker="x")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of context", ylabel="‖Σ a v‖ / Σ a ‖v‖", title="far values")
    axes.set_ylim(-0.03, 1.03)


def _log_gap(norm: float | None) -> float | None:
    return None if norm is None else float(np.log10(max(1 - norm, 1e-6)))


def _log2(x: float | None) -> float | None:
    return None if not x else float(np.log2(x))
