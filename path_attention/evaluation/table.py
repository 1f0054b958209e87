"""What the evaluation shows in a terminal: a progress bar and the table of perplexity by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each label: call it with (label, tokens done, tokens in all)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def report(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done)

        yield report


def print_by_length(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print perplexity by length: a line a model, its interval or its seeds' spread below."""
    rows = [row for row in rows if row["by"] == "length"]
    lengths = sorted({row["length"] for row in rows})
    table = Table(title="Perplexity by tokens of context, on the same target tokens")
    table.add_column("model")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right")
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = {row["length"]: _cell(row) for row in rows if row["model"] == model}
        table.add_row(model, *(cells.get(length, "") for length in lengths))
    Console().print(table)


def _cell(row: Mapping[str, Any]) -> str:
    if row["low"] is None:
        return f"{row['perplexity']:.2f}"
    return f"{row['perplexity']:.2f}\n[dim]{row['low']:.2f}–{row['high']:.2f}[/dim]"
