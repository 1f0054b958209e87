"""The command `path-attention task report`: tables beside the published numbers, and figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from path_attention.results import command_line, write_result, write_whole
from path_attention.tasks.record import Row, Run, read_run
from path_attention.tasks.summary import (
    error_rows,
    fewest_layers,
    length_rows,
    not_run_rows,
    title_of,
)
from path_attention.tasks.sweep import missing


@dataclass(frozen=True, kw_only=True)
class ReportTasks:
    """Tables and figures of all runs in a folder, and a list of what was queued and not run.

    Writes TASK.json and TASK.png for each task, and report.md.
    """

    out: Path = Path("runs/tasks")
    """The folder of the runs, as `task sweep` and `task run` have it."""
    to: Path = Path("runs/tasks/report")
    """Where the report goes."""
    command: str | None = None
    """Written into the results as the command that makes them again; default: this one."""

    def run(self) -> None:
        paths = sorted((self.out / "runs").glob("*.json"))
        if not paths:
            raise ValueError(f"out: expected results in {self.out / 'runs'}, found none")
        command = self.command or command_line(sys.argv)
        runs = sorted((read_run(path) for path in paths), key=_order)
        text, results = make_report(runs, missing(self.out), command)
        for task, result in results.items():
            write_result(self.to / f"{task}.json", result)
        write_whole(self.to / "report.md", text)
        from path_attention.tasks.figure import draw

        for task, result in results.items():
            draw(task, result["rows"], self.to / f"{task}.png")
        print(text)


def _order(run: Run) -> tuple[Any, ...]:
    """By encoding and depth; then what is searched for, so that a search reads as a table."""
    recipe = run.recipe
    searched = ("weight_decay", "options.beta_bias_init", "learning_rate")
    numbers = [float(recipe.get(name) or 0) for name in searched]
    return (recipe["encoding"], recipe["layers"], *numbers, recipe["run"])


def make_report(
    runs: Sequence[Run], not_run: Sequence[Any], command: str
) -> tuple[str, dict[str, dict[str, Any]]]:
    """The report as Markdown, and a result for each task.

    A result's rows have a `kind`: "errors" (`error_rows`), "length" (`length_rows`), "fewest"
    (`fewest_layers`), "not_run" (`not_run_rows`).
    """
    results, parts = {}, []
    for task in dict.fromkeys(run.recipe["task"] for run in runs):
        mine = [run for run in runs if run.recipe["task"] == task]
        rows: list[Row] = []
        for title in dict.fromkeys(title_of(run.recipe) for run in mine):
            under = [run for run in mine if title_of(run.recipe) == title]
            parts.append(f"## {title}\n")
            errors = error_rows(under)
            rows += [{"kind": "errors", **row} for row in errors]
            if task == "group_words":
                lengths = length_rows(under)
                letters = max(run.recipe["task.letters"] for run in under)
                fewest = [{"title": title, **row} for row in fewest_layers(lengths, letters)]
                rows += [{"kind": "length", **row} for row in lengths]
                rows += [{"kind": "fewest", **row} for row in fewest]
                parts += [_length_table(lengths), _fewest_table(fewest)]
            parts.append(_error_table(errors))
        left = not_run_rows([recipe for recipe in not_run if recipe.task.name == task])
        rows += [{"kind": "not_run", **row} for row in left]
        results[task] = _result(task, mine, rows, command)
    parts += ["## Not run\n", _not_run_table(not_run_rows(not_run))]
    return "\n".join(parts), results


def print_report(paths: Sequence[Path]) -> None:
    """Print the tables of these runs alone."""
    runs = [read_run(path) for path in paths]
    print(_error_table(error_rows(runs)))
    if runs[0].recipe["task"] == "group_words":
        print(_length_table(length_rows(runs)))


def _result(task: str, runs: Sequence[Run], rows: list[Row], command: str) -> dict[str, Any]:
    sources = [run.source for run in runs]
    commits = {source["commit"] for source in sources}
    devices = sorted({source["device"] for source in sources})
    versions = {
        name: ", ".join(sorted({str(s["versions"].get(name)) for s in sources}))
        for name in sources[0]["versions"]
    }
    return {
        "what": (
            f"Synthetic task {task}: shares of errors over seeds, pooled counts with 95 % "
            "intervals, published shares; what was not run"
        ),
        "command": command,
        "commit": commits.pop() if len(commits) == 1 else None,
        "device": ", ".join(devices),
        "versions": versions,
        "rows": rows,
    }


def _error_table(rows: Sequence[Row]) -> str:
    head = ("encoding", "layers", "change", "test", "errors", "of", "share", "least–greatest")
    head += ("95 % interval", "clean seeds", "solved, stayed", "published")
    return _table(
        head,
        [
            (
                row["encoding"],
                row["layers"],
                row["change"],
                row["test"],
                f"{row['errors']:,}",
                f"{row['counted']:,} {row['unit']}",
                _percent(row["share"]),
                f"{_percent(row['least'])}–{_percent(row['greatest'])}",
                f"{_percent(row['low'])}–{_percent(row['high'])}",
                f"{row['clean']} of {row['seeds']}",
                f"{row['solved']}, {row['stayed']}",
                "" if row["published"] is None else _percent(row["published"]),
            )
            for row in rows
        ],
    )


def _length_table(rows: Sequence[Row]) -> str:
    def spread(row: Row, name: str, form: str) -> str:
        least, greatest = row[f"{name}_least"], row[f"{name}_greatest"]
        return f"{row[name]:{form}} ({least:{form}}–{greatest:{form}})"

    head = ("encoding", "layers", "change", "seeds", "steps", "length solved")
    return _table(
        (*head, "beyond training", "longest words right"),
        [
            (
                *(row[name] for name in ("encoding", "layers", "change", "seeds", "steps")),
                spread(row, "in_training", ".3g"),
                spread(row, "beyond", ".3g"),
                spread(row, "accuracy", ".1%"),
            )
            for row in rows
        ],
    )


def _fewest_table(rows: Sequence[Row]) -> str:
    lengths = sorted({row["length"] for row in rows})
    models = dict.fromkeys(row["model"] for row in rows)
    cells = {(row["model"], row["length"]): row for row in rows}

    def cell(row: Row) -> str:
        return f">{row['tried']}" if row["layers"] is None else str(row["layers"])

    return _table(
        ("fewest layers, by length", *lengths),
        [(name, *(cell(cells[name, length]) for length in lengths)) for name in models],
    )


def _not_run_table(rows: Sequence[Row]) -> str:
    if not rows:
        return "Everything that was queued has a result.\n"
    return _table(
        ("task", "encoding", "layers", "change", "seeds"), [tuple(row.values()) for row in rows]
    )


def _table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.3g} %"
