"""One result and figure from the evaluations of several seeds: mean and spread of each number."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from path_attention.results import command_line, read_result, write_result

_PLACE = ("text", "model", "by", "length", "from_position", "to_position")
_SHARED = ("training_length", "dtype", "data", "tokens", "windows", "documents")


@dataclass(frozen=True, kw_only=True)
class MergeSeeds:
    """Merge evaluations that differ in the training seed alone into one result and figure.

    Each file is one seed: the same model labels, measured on the same tokens. Writes OUT.json and
    OUT.png.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Results of `path-attention evaluate perplexity` or `perplexity_by_length`, one a seed."""
    out: Path
    """Where the result goes, without an ending."""
    command: str | None = None
    """Written into the result as the command that made all of it; default: this one."""

    def run(self) -> None:
        from path_attention.evaluation.figure import by_text, draw
        from path_attention.evaluation.table import print_by_length

        command = self.command or command_line(sys.argv)
        result = merge_seeds([read_result(file) for file in self.files], command)
        figure = self.out.with_name(f"{self.out.name}.png")
        write_result(figure.with_suffix(".json"), result)
        draw(result, figure)
        for rows in by_text(result["rows"]).values():
            print_by_length(rows)
        print(f"wrote {figure.with_suffix('.json')} and {figure}")


def merge_seeds(results: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    """Merge results of `perplexity_by_length` that differ in the training seed alone.

    Returns:
        A result whose rows have `perplexity` (the mean over seeds), `std` (of one seed, n − 1 in
        the denominator), `low` and `high` (the least and the greatest seed), `seeds` (how many);
        by length also `growth`, with `growth_std`, `growth_low` and `growth_high`.

    Raises:
        ValueError: if there are fewer than two, or they do not measure the same models on the same
            tokens with the same code, versions and device.
    """
    if len(results) < 2:
        raise ValueError(f"files: expected at least two results, one a seed, got {len(results)}")
    first = results[0]
    for key in ("commit", "device", "versions"):
        found = [result[key] for result in results]
        if any(value != found[0] for value in found):
            raise ValueError(f"files: expected the same {key} in all of them, got {found}")
    tables = [{_place(row): row for row in result["rows"]} for result in results]
    if any(table.keys() != tables[0].keys() for table in tables):
        raise ValueError("files: expected the same models and lengths in all of them")
    rows = []
    for place, row in tables[0].items():
        mine = [table[place] for table in tables]
        shared = {name: row[name] for name in _SHARED}
        for name, value in shared.items():
            if any(other[name] != value for other in mine):
                raise ValueError(
                    f"files: expected the same {name} in all of them, got "
                    f"{[other[name] for other in mine]} for {row['model']}"
                )
        names = {name: row[name] for name in _PLACE if name in row}
        numbers = _spread("perplexity", "", mine)
        if "growth" in row:
            numbers |= _spread("growth", "growth_", mine)
        rows.append({**names, **numbers, "seeds": len(mine), **shared})
    what = (
        f"Perplexity by length on held-out documents, {len(results)} training seeds: mean, "
        "standard deviation (std), least (low) and greatest (high) seed; the same targets at every "
        "length, and growth since the shortest"
    )
    return {**first, "what": what, "command": command, "rows": rows}


def _spread(name: str, prefix: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    seen = [row[name] for row in rows]
    return {
        name: round(statistics.fmean(seen), 6),
        f"{prefix}std": round(statistics.stdev(seen), 6),
        f"{prefix}low": min(seen),
        f"{prefix}high": max(seen),
    }


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _PLACE)
