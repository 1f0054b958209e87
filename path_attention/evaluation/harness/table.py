"""The table of a suite in a terminal: lines by task and length, a column for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_scores(suite: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print scores with their intervals; shares in percent."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    table = Table(title=f"{suite}: score, 95 % interval, and the longest request in tokens")
    for heading in ("task", "length", "metric"):
        table.add_column(heading)
    for model in models:
        table.add_column(model, justify="right")
    places = dict.fromkeys(_place(row) for row in rows)
    for place in places:
        cells = {row["model"]: _cell(row) for row in rows if _place(row) == place}
        column, length, how, metric = place
        named = metric if how in ("", "none") else f"{metric}, {how}"
        shown = "" if length is None else f"{length:,}" if isinstance(length, int) else length
        table.add_row(column, shown, named, *(cells.get(model, "") for model in models))
    Console().print(table)


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["column"], row["length"], row["filter"], row["metric"]


def _cell(row: Mapping[str, Any]) -> str:
    percent = "perplexity" not in row["metric"] and "bits" not in row["metric"]
    by = 100 if percent else 1
    if row["score"] is None:
        return "not finite"
    text = f"{by * row['score']:.1f}"
    if row["low"] is not None:
        text += f" [dim]{by * row['low']:.1f}–{by * row['high']:.1f}[/dim]"
    return f"{text} [dim]({row['longest']:,})[/dim]"
