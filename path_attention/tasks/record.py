"""One run's result: its recipe, its course and its tests, in the form of `results`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from path_attention.results import make_result, read_result
from path_attention.tasks.engine import Engine, Outcome

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A result read back.

    Attributes:
        recipe: `TaskRecipe.flat()`, with `run` and `setting`, its names.
        outcome: step, solved, first_solved, finite, seconds, replicas.
        curve: a row for each check.
        tests: a row for each test and level: test, level, errors, counted.
        source: what the result says of commit, device and versions.
    """

    recipe: Row
    outcome: Row
    curve: list[Row]
    tests: list[Row]
    source: Row


def result_of(engine: Engine, outcome: Outcome, command: str) -> dict[str, Any]:
    """A run's result. Rows by `kind`: "recipe", "outcome", "curve", "test".

    `seconds` is the training time of all replicas together, checks apart.
    """
    recipe = outcome.recipe
    rows: list[Row] = [
        {"kind": "recipe", "run": recipe.run, "setting": recipe.setting, **recipe.flat()},
        {
            "kind": "outcome",
            "step": outcome.step,
            "solved": outcome.solved,
            "first_solved": outcome.first_solved,
            "finite": outcome.finite,
            "seconds": round(engine.seconds, 3),
            "replicas": engine.replicas.count,
        },
    ]
    rows += [{"kind": "curve", **row} for row in outcome.curve]
    rows += [{"kind": "test", **row} for counts in outcome.tests for row in counts.rows()]
    what = (
        f"One run on {recipe.task.name}: errors among {recipe.task.unit} counted, by test and "
        "level of difficulty; its recipe, its checks during training"
    )
    return make_result(what=what, rows=rows, device=str(engine.device), command=command)


def read_run(path: Path) -> Run:
    """Read what `result_of` made. Raises ValueError naming the file."""
    result = read_result(path)
    by_kind: dict[str, list[Row]] = {}
    for row in result["rows"]:
        by_kind.setdefault(row.get("kind", ""), []).append(row)
    kinds = {"recipe", "outcome", "curve", "test"}
    if by_kind.keys() != kinds or len(by_kind["recipe"]) != 1 or len(by_kind["outcome"]) != 1:
        raise ValueError(f"{path}: expected rows of the kinds {sorted(kinds)}, got {list(by_kind)}")
    rows = {
        kind: [{k: v for k, v in row.items() if k != "kind"} for row in found]
        for kind, found in by_kind.items()
    }
    source = {key: result[key] for key in ("commit", "device", "versions")}
    return Run(rows["recipe"][0], rows["outcome"][0], rows["curve"], rows["test"], source)
