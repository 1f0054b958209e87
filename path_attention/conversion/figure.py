"""The figure of a conversion's report: errors by layer, perplexity by stage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito's
_MARKERS = "osD^"


def draw(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw a conversion's report as a PNG.

    Left: each layer's relative error of attention, a curve for each stage that has them. Right: the
    student's perplexity after each stage, with its divergence, beside the teacher's line.
    """
    rows = result["rows"]
    figure = Figure(figsize=(10, 4.4), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2)
    layers = [row for row in rows if row["by"] == "layer"]
    for n, stage in enumerate(dict.fromkeys(row["stage"] for row in layers)):
        mine = [row for row in layers if row["stage"] == stage]
        left.plot(
            [row["layer"] for row in mine],
            [row["error"] for row in mine],
            color=_COLOURS[n % len(_COLOURS)],
            marker=_MARKERS[n % len(_MARKERS)],
            markersize=4,
            label=stage,
        )
    if layers:
        left.legend(frameon=False)
        if all(row["error"] > 0 for row in layers):
            left.set_yscale("log")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set(xlabel="layer", ylabel="error of attention / the teacher's mean square")
    models = [row for row in rows if row["by"] == "model"]
    places = range(len(models))
    right.bar(places, [row["perplexity"] for row in models], color=_COLOURS[0], width=0.6)
    right.axhline(models[0]["teacher_perplexity"], color="0.3", linestyle=":", label="teacher")
    right.set_yscale("log")
    for place, row in zip(places, models, strict=True):
        text = f"{row['perplexity']:,.2f}\nKL {row['kl']:.3f}"
        right.annotate(text, (place, row["perplexity"]), ha="center", va="bottom", fontsize=8)
    names = [f"{row['stage']}\n{row['tokens']:,} tokens" for row in models]
    right.set_xticks(list(places), names, fontsize=8)
    right.margins(y=0.25)
    right.set(ylabel="perplexity")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{models[0]['targets']:,} held-out target tokens", fontsize=11)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    part = Path(path).with_suffix(".part.png")
    figure.savefig(part, metadata={"Software": None})
    os.replace(part, path)
