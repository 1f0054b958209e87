"""The operator's benchmark as a figure and as a table in the terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from rich.console import Console
from rich.table import Table

from path_attention.benchmarks.measure import PHASES, show_time

# Okabe and Ito's colours, apart for colour-blind readers; markers tell them apart in grey.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "xosD^vP"


def draw(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw a result of `benchmark operator` as a PNG.

    Left: time of forward and backward as a ratio to the anchor's. Right: peak memory above the
    inputs, both axes logarithmic; dotted: linear in a batch's tokens from the anchor's first point.
    """
    rows = result["rows"]
    figure = Figure(figsize=(10, 4.4), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2)
    tokens = sorted({row["tokens"] for row in rows})
    for n, (name, label) in enumerate(_series(rows)):
        mine = [row for row in rows if (row["candidate"], row["encoding"]) == name]
        style: dict[str, Any] = {
            "color": _COLOURS[n % len(_COLOURS)],
            "marker": _MARKERS[n % len(_MARKERS)],
            "markersize": 5,
            "alpha": 0.8,
            "label": label,
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
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    part = Path(path).with_suffix(".part.png")
    figure.savefig(part, metadata={"Software": None})
    os.replace(part, path)


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


def _series(rows: list[dict[str, Any]]) -> list[tuple[tuple[str, str], str]]:
    names = dict.fromkeys((row["candidate"], row["encoding"]) for row in rows)
    return [(name, " ".join(name)) for name in names]


def _title(result: Mapping[str, Any]) -> str:
    row = result["rows"][0]
    count = row["threads"]
    threads = "" if count is None else f", {count} thread{'s' if count > 1 else ''}"
    return (
        f"{result['device']}: {row['heads']} heads of {row['size']} over {row['key_heads']} key "
        f"heads, {row['dtype']}, median of {row['repeats']}{threads}"
    )
