"""The figure of a conversion's report: errors by layer, perplexity by stage and by length."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from path_attention.results import plain_label, write_figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito's
_MARKERS = "osD^"


def draw(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw a conversion's report as a PNG.

    Left: each layer's relative error of attention, a curve for each stage that has them. Then: the
    student's perplexity after each stage, with its divergence, beside the teacher's line. Right, if
    there are rows by "context": both models' perplexity by tokens of context, on each corpus.
    """
    rows = result["rows"]
    models = [row for row in rows if row["by"] == "model"]
    contexts = [row for row in rows if row["by"] == "context"]
    panels = 3 if contexts else 2
    figure = Figure(figsize=(5 * panels, 4.4), layout="constrained", dpi=150)
    axes = figure.subplots(1, panels)
    _layers(axes[0], [row for row in rows if row["by"] == "layer"])
    _stages(axes[1], models)
    if contexts:
        _contexts(axes[2], contexts)
    for each in axes:
        each.grid(color="0.9", linewidth=0.6)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{models[0]['targets']:,} held-out target tokens", fontsize=11)
    write_figure(figure, path)


def _layers(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for n, stage in enumerate(dict.fromkeys(row["stage"] for row in rows)):
        mine = [row for row in rows if row["stage"] == stage]
        axes.plot(
            [row["layer"] for row in mine],
            [row["error"] for row in mine],
            color=_COLOURS[n % len(_COLOURS)],
            marker=_MARKERS[n % len(_MARKERS)],
            markersize=4,
            label=stage,
        )
    if rows:
        axes.legend(frameon=False)
        if all(row["error"] > 0 for row in rows):
            axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer", ylabel="error of attention / the teacher's mean square")


def _stages(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    places = range(len(rows))
    axes.bar(places, [row["perplexity"] for row in rows], color=_COLOURS[0], width=0.6)
    axes.axhline(rows[0]["teacher_perplexity"], color="0.3", linestyle=":", label="teacher")
    axes.set_yscale("log")
    for place, row in zip(places, rows, strict=True):
        text = f"{row['perplexity']:,.2f}\nKL {row['kl']:.3f}"
        axes.annotate(text, (place, row["perplexity"]), ha="center", va="bottom", fontsize=8)
    names = [f"{row['stage']}\n{row['tokens']:,} tokens" for row in rows]
    axes.set_xticks(list(places), names, fontsize=8)
    axes.margins(y=0.25)
    axes.set(ylabel="perplexity")
    axes.legend(frameon=False)


def _contexts(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for n, corpus in enumerate(dict.fromkeys(row["corpus"] for row in rows)):
        for model, line in (("teacher", ":"), ("student", "-")):
            mine = [r for r in rows if (r["corpus"], r["model"]) == (corpus, model)]
            axes.plot(
                [row["length"] for row in mine],
                [row["perplexity"] for row in mine],
                color=_COLOURS[n % len(_COLOURS)],
                marker=_MARKERS[n % len(_MARKERS)],
                markersize=4,
                linestyle=line,
                label=plain_label(f"{model}, {corpus}"),
            )
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="tokens of context", ylabel="perplexity")
    axes.legend(frameon=False, fontsize=8)
