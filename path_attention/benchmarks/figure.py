"""Results of the benchmarks as figures and as tables in the terminal."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from rich.console import Console
from rich.table import Table

from path_attention.benchmarks.candidates import ENCODINGS
from path_attention.benchmarks.measure import PHASES, show_time
from path_attention.results import write_figure

# Okabe and Ito's colours, apart for colour-blind readers. Lines: a colour for each encoding, a
# marker for each candidate.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9")
_ENCODING_COLOURS = dict(zip(ENCODINGS, _COLOURS, strict=False))
_MARKERS = "xosD^vP"


class Panel(NamedTuple):
    """Bars, a colour for each series and a group for each category; no bar at None, ∞ as such."""

    title: str
    label: str  # of the values' axis
    bars: Mapping[tuple[str, str], float | None]  # (series, category) → value
    logarithmic: bool = False


def draw(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw a result of `benchmark operator` as a PNG.

    Left: time of forward and backward as a ratio to the anchor's. Right: peak memory above the
    inputs, both axes logarithmic; dotted: linear in a batch's tokens from the anchor's first point.
    """
    rows = result["rows"]
    figure = Figure(figsize=(10, 4.4), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2)
    tokens = sorted({row["tokens"] for row in rows})
    candidates = list(dict.fromkeys(row["candidate"] for row in rows))
    for candidate, encoding in dict.fromkeys((r["candidate"], r["encoding"]) for r in rows):
        mine = [r for r in rows if (r["candidate"], r["encoding"]) == (candidate, encoding)]
        style: dict[str, Any] = {
            "color": _ENCODING_COLOURS[encoding],
            "marker": _MARKERS[candidates.index(candidate) % len(_MARKERS)],
            "markersize": 5,
            "alpha": 0.8,
            "label": f"{candidate} {encoding}",
        }
        timed = [row for row in mine if row["both_ratio"] is not None]
        left.plot([r["tokens"] for r in timed], [r["both_ratio"] for r in timed], **style)
        right.plot([r["tokens"] for r in mine], [r["peak_mib"] for r in mine], **style)
    anchor = [row for row in rows if row["candidate"] == rows[0]["candidate"]]
    each = anchor[0]["peak_mib"] / (anchor[0]["tokens"] * anchor[0]["batch"])
    linear = [each * row["tokens"] * row["batch"] for row in anchor]
    right.plot(tokens, linear, color="0.6", linestyle=":", label="linear in tokens a batch")
    left.set_ylim(bottom=0)
    left.set(xlabel="tokens", ylabel="time, forward + backward (1: the anchor's)")
    right.set_yscale("log")
    right.set(xlabel="tokens", ylabel="peak memory above the inputs, MiB")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(tokens))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=8)
    figure.suptitle(_title(result), fontsize=10)
    write_figure(figure, path)


def draw_bars(panels: Sequence[Panel], title: str, path: str | os.PathLike[str]) -> None:
    """Draw panels of grouped bars side by side as a PNG; a line at 1 where bars are near it."""
    series = list(dict.fromkeys(name for panel in panels for name, _ in panel.bars))
    widths = [len({category for _, category in panel.bars}) + 1 for panel in panels]
    figure = Figure(figsize=(max(8.0, 0.5 * sum(widths)), 5), layout="constrained", dpi=150)
    all_axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for panel, axes in zip(panels, all_axes, strict=True):
        categories = list(dict.fromkeys(category for _, category in panel.bars))
        own = list(dict.fromkeys(name for name, _ in panel.bars))
        width = 0.8 / max(len(own), 1)
        for n, name in enumerate(own):
            colour = _COLOURS[series.index(name) % len(_COLOURS)]
            values = [panel.bars.get((name, category)) for category in categories]
            left = width * (n - (len(own) - 1) / 2)
            finite = [v if v is not None and math.isfinite(v) else math.nan for v in values]
            places = [m + left for m in range(len(values))]
            axes.bar(places, finite, width=width, color=colour, label=name)
            for place, value in zip(places, values, strict=True):
                if value == math.inf:
                    axes.text(place, 1, "∞", color=colour, ha="center", va="bottom")
        known = [v for v in panel.bars.values() if v is not None]
        if not known or min(known) / 2 <= 1 <= 2 * max(known):
            axes.axhline(1, color="0.3", linewidth=0.8, linestyle=":")
        if panel.logarithmic:
            axes.set_yscale("log")
        axes.set_xticks(range(len(categories)), categories, fontsize=7, rotation=45, ha="right")
        axes.set_title(panel.title, fontsize=9)
        axes.set_ylabel(panel.label, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    handles = {
        label: handle
        for axes in all_axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    entry = 0.5 + 0.065 * max(map(len, handles), default=1)  # inches
    figure.legend(
        handles.values(), handles, frameon=False, fontsize=8, loc="outside lower center",
        ncols=max(1, min(6, int(figure.get_figwidth() / entry))),
    )  # fmt: skip
    figure.suptitle(title, fontsize=10)
    write_figure(figure, path)


def print_table(result: Mapping[str, Any]) -> None:
    """Print the rows: milliseconds, the ratio to the anchor, peak memory, error."""
    table = Table(title=_title(result), caption="× time of the first candidate in the same turn")
    table.add_column("tokens", justify="right")
    table.add_column("candidate")
    for name in (*PHASES, "peak MiB", "error"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        times = [show_time(row, phase) for phase in PHASES]
        table.add_row(
            f"{row['tokens']:,}",
            f"{row['candidate']} {row['encoding']}",
            *times,
            f"{row['peak_mib']:,.1f}",
            f"{row['error']:.1e}",
        )
    Console().print(table)


def print_rows(
    result: Mapping[str, Any],
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Print these columns of a result's rows, or of some of them."""
    shown: Sequence[Mapping[str, Any]] = result["rows"] if rows is None else rows
    table = Table(title=result["device"])
    for name in columns:
        table.add_column(name, justify="right")
    for row in shown:
        table.add_row(*(_show(row[name]) for name in columns))
    if shown:
        # Whole words, in a log's 80 columns too.
        needed = Console(width=10_000).measure(table).maximum
        Console(width=max(Console().width, needed)).print(table)


def _show(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,.3g}" if isinstance(value, float) else str(value)


def _title(result: Mapping[str, Any]) -> str:
    row = result["rows"][0]
    count = row["threads"]
    threads = "" if count is None else f", {count} thread{'s' if count > 1 else ''}"
    return (
        f"{result['device']}: {row['heads']} heads of {row['size']} over {row['key_heads']} key "
        f"heads, {row['dtype']}, median of {row['repeats']}{threads}"
    )
