"""Progress on the terminal: a rich bar where there is one, plain lines where there is not."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

console = Console(stderr=True, highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """One plain line on stderr, above a running bar."""
    console.print(line, markup=False)


def progress_bar(*columns: ProgressColumn | str, enabled: bool = True) -> Progress:
    """A bar with count and time left, and these columns behind; drawn on a terminal only."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        *columns,
        console=console,
        disable=not (enabled and console.is_terminal),
    )
