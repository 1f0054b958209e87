"""What the evaluation shows in a terminal: a progress bar and the table of perplexity by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from path_attention.training.progress import progress_bar


@contextmanager
def show_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each label: call it with (label, tokens done, tokens in all)."""
    tasks: dict[str, TaskID] = {}
    with progress_bar("tokens") as bars:

        def report(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done)

        yield report


def print_by_length(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print perplexity by length, and below it how it grew since the shortest length."""
    rows = [row for row in rows if row["by"] == "length"]
    lengths = sorted({row["length"] for row in rows})
    spread = "all seeds" if "seeds" in rows[0] else "95 % interval"
    table = Table(
        title="Perplexity by tokens of context, on the same target tokens",
        caption=f"× perplexity at {lengths[0]:,} tokens; {spread} below",
        show_lines=True,
    )
    table.add_column("model")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right")
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = {row["length"]: _cell(row) for row in rows if row["model"] == model}
        table.add_row(model, *(cells.get(length, "") for length in lengths))
    Console().print(table)


def _cell(row: Mapping[str, Any]) -> str:
    text = f"{row['perplexity']:,.2f}\n× {row['growth']:.3f}"
    if row["growth_low"] is not None:
        text += f"\n[dim]{row['growth_low']:.2f}–{row['growth_high']:.2f}[/dim]"
    return text
