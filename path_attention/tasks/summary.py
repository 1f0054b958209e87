"""What the runs of a task say together: spread over seeds, intervals, the published numbers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from path_attention.tasks.intervals import error_interval
from path_attention.tasks.recipe import TASKS, TaskRecipe
from path_attention.tasks.record import Row, Run

# arXiv 2505.16381 §4.1: share of errors on flip-flop of 512 tokens, one layer.
PUBLISHED: dict[tuple[str, str], float] = {
    (encoding, test): share / 100
    for encoding, shares in {
        "rope": (6.9, 40.3, 0.01),
        "stick_breaking": (9.6, 38.9, 0.0),
        "fox": (8.3, 36.3, 0.0),
        "path": (0.0, 0.0001, 0.0),
    }.items()
    for test, share in zip(("in_distribution", "sparse", "dense"), shares, strict=True)
}
_NO_CHANGE = {"run", "setting", "seed", "encoding", "layers", "task"}
_NO_CHANGE |= {"task.sparse_sequences", "task.test_letters", "check_every"}


def title_of(recipe: Row) -> str:
    """What is learned: runs under one title belong in one table.

    Of flip-flop with its steps, so that a search's short runs are not taken for what is usual.
    """
    if recipe["task"] == "group_words":
        form = "" if recipe["task.form"] == "prefix" else ", is it the identity"
        return f"{recipe['task.group']} over {recipe['task.generators']}{form}"
    if recipe["task"] == "mqrar":
        return f"MQRAR-{recipe['task.n_back']}"
    return f"flip-flop of {2 * recipe['task.pairs']} tokens, {recipe['steps']:,} steps"


def settings_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by setting: those of one differ in the seed alone."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.recipe["seed"]):
        found.setdefault(run.recipe["setting"], []).append(run)
    return found


def changes_of(recipes: Sequence[Row], among: str = "") -> list[str]:
    """For each recipe under one title, where it departs from what most of its encoding's have.

    What changes nothing in a run is left out: how much its tests measure, and how often.
    among: look at names that begin so alone ("options.": at the model).
    """
    keys = {key for recipe in recipes for key in recipe if key.startswith(among)} - _NO_CHANGE
    changes = []
    for recipe in recipes:
        same = [other for other in recipes if other["encoding"] == recipe["encoding"]]
        usual = {k: Counter(other.get(k) for other in same).most_common(1)[0][0] for k in keys}
        words = [
            f"{key.rpartition('.')[2]} {recipe.get(key)}"
            for key in sorted(keys)
            if recipe.get(key) != usual[key]
        ]
        changes.append(", ".join(words))
    return changes


def error_rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each setting and test, over its seeds.

    share, least, greatest: mean, least and greatest share of errors of a seed. errors, counted:
    of all seeds together; low, high: the 95 % interval of these (`error_interval`). clean: seeds
    without any error. solved: seeds that the last check called solved. stayed: seeds whose checks
    on this test were all good from the first good one on. published: the paper's share. seconds:
    the longest training of a seed, of all replicas that were trained with it, checks apart.
    """
    groups = list(settings_of(runs).values())
    changes = changes_of([group[0].recipe for group in groups])
    rows = []
    for group, change in zip(groups, changes, strict=True):
        for test in dict.fromkeys(row["test"] for row in group[0].tests):
            rows.append(_error_row(group, change, test))
    return rows


def _error_row(group: list[Run], change: str, test: str) -> Row:
    recipe = group[0].recipe
    counts = [_counts(run, test) for run in group]
    errors, counted = (sum(of_run[n] for of_run in counts) for n in (0, 1))
    shares = [e / n for e, n in counts]
    low, high = error_interval(errors, counted)
    published = recipe.get("task.pairs") == 256 and recipe["task"] == "flip_flop"
    published = published and recipe["layers"] == 1
    return {
        **_head(group, change),
        "test": test,
        "unit": TASKS[recipe["task"]].unit,
        "share": statistics.fmean(shares),
        "least": min(shares),
        "greatest": max(shares),
        "errors": errors,
        "counted": counted,
        "low": low,
        "high": high,
        "clean": sum(e == 0 for e, _ in counts),
        "solved": sum(run.outcome["solved"] for run in group),
        "stayed": sum(_stayed(run, test) for run in group),
        "published": PUBLISHED.get((recipe["encoding"], test)) if published else None,
    }


def length_rows(runs: Sequence[Run]) -> list[Row]:
    """Group words: a row for each setting with the greatest length solved, over its seeds.

    A word's length is solved where more than 90 % of words are right up to it; in_training and
    beyond are the two tests (beyond: words longer than any trained on). accuracy: of the longest
    words trained on.
    """
    groups = list(settings_of(runs).values())
    recipes = [group[0].recipe for group in groups]
    changes = zip(changes_of(recipes), changes_of(recipes, "options."), strict=True)
    rows = []
    for group, (change, model) in zip(groups, changes, strict=True):
        inside = [solved_length(run, "in_distribution") for run in group]
        beyond = [solved_length(run, "beyond_training") for run in group]
        accuracy = [1 - _hardest(run, "in_distribution") for run in group]
        row = _head(group, change)
        row["model"] = ", ".join([row["encoding"]] + [model] * bool(model))
        for name, values in (("in_training", inside), ("beyond", beyond), ("accuracy", accuracy)):
            row[name] = statistics.fmean(values)
            row[f"{name}_least"], row[f"{name}_greatest"] = min(values), max(values)
        rows.append(row)
    return rows


def fewest_layers(rows: Sequence[Row], longest: int) -> list[Row]:
    """For each model and length, the fewest layers with which every seed solves it.

    rows: of `length_rows`, under one title. layers is None where no depth that was tried does, of
    which tried is the greatest. Of several ways to train a model the best counts.
    """
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        tried = max(row["layers"] for row in mine)
        for length in range(2, longest + 1):
            deep = [row["layers"] for row in mine if row["in_training_least"] >= length]
            layers = min(deep, default=None)
            found.append({"model": model, "length": length, "layers": layers, "tried": tried})
    return found


def solved_length(run: Run, test: str) -> int:
    """The greatest length up to which more than 90 % of words are right at every length."""
    solved = 0
    for row in (row for row in run.tests if row["test"] == test):
        if not row["errors"] < 0.1 * row["counted"]:
            break
        solved = int(row["level"].split()[0])
    return solved


def not_run_rows(recipes: Sequence[TaskRecipe]) -> list[Row]:
    """A row for each setting of these runs, with its seeds."""
    found: dict[str, list[TaskRecipe]] = {}
    for recipe in recipes:
        found.setdefault(recipe.setting, []).append(recipe)
    flat = [group[0].flat() for group in found.values()]
    titles = [title_of(recipe) for recipe in flat]
    rows = []
    for group, recipe, title in zip(found.values(), flat, titles, strict=True):
        same = [other for other, name in zip(flat, titles, strict=True) if name == title]
        change = changes_of(same)[same.index(recipe)]
        seeds = " ".join(str(r.seed) for r in sorted(group, key=lambda r: r.seed))
        row = {"title": title, "encoding": recipe["encoding"], "layers": recipe["layers"]}
        rows.append({**row, "change": change, "seeds_not_run": seeds})
    return rows


def _head(group: list[Run], change: str) -> dict[str, Any]:
    recipe = group[0].recipe
    return {
        "title": title_of(recipe),
        "encoding": recipe["encoding"],
        "layers": recipe["layers"],
        "change": change,
        "seeds": len(group),
        "steps": max(run.outcome["step"] for run in group),
        "seconds": max(run.outcome["seconds"] for run in group),
        "replicas": max(run.outcome["replicas"] for run in group),
    }


def _counts(run: Run, test: str) -> tuple[int, int]:
    """Errors and what was counted; of prefixes of words, those of whole words alone."""
    rows = [row for row in run.tests if row["test"] == test]
    if run.recipe.get("task.form") == "prefix":
        rows = rows[-1:]
    return sum(row["errors"] for row in rows), sum(row["counted"] for row in rows)


def _hardest(run: Run, test: str) -> float:
    row = [row for row in run.tests if row["test"] == test][-1]
    return row["errors"] / row["counted"]


def _stayed(run: Run, test: str) -> bool:
    """Whether a check on this test was good, and every check after it."""
    task = TASKS[run.recipe["task"]]
    good = []
    for row in run.curve:
        if row["step"] <= run.outcome["step"] and f"{test}.errors" in row:
            share = row[f"{test}.errors"] / max(row[f"{test}.counted"], 1)
            share = row[f"{test}.hardest"] if task.hardest_only else share
            good.append(share <= task.solved_error)
    return True in good and all(good[good.index(True) :])
