"""Reports from made-up runs whose tables are known, and the commands."""

from __future__ import annotations

import dataclasses
import importlib
import re
import warnings
from pathlib import Path

import pytest

from path_attention import cli
from path_attention.recipes.tasks import COMPARED, GRIDS, ORDER_OF_WORK, OTHERS, find_grid, product
from path_attention.recipes.tasks_command import RunFlipFlop, RunGroupWords, RunMqrar, SweepTasks
from path_attention.results import make_result, read_result, write_result
from path_attention.tasks.figure import draw
from path_attention.tasks.flip_flop import FlipFlop
from path_attention.tasks.group_words import GroupWords
from path_attention.tasks.intervals import error_interval
from path_attention.tasks.mqrar import Mqrar
from path_attention.tasks.recipe import TaskRecipe
from path_attention.tasks.record import Run
from path_attention.tasks.report import ReportTasks, make_report
from path_attention.tasks.summary import (
    changes_of,
    error_rows,
    fewest_layers,
    length_rows,
    solved_length,
    title_of,
)
from path_attention.tasks.sweep import Workers, enqueue

replace = dataclasses.replace
SOURCE = {"commit": None, "device": "cpu", "versions": {"python": "3.12"}}


def made_up(recipe: TaskRecipe, tests: dict[str, list[tuple[int, int]]], checks=()) -> Run:
    """A run with these (errors, counted) at each level, and errors of 100 at each check."""
    levels = recipe.task.levels
    rows = [
        {"test": test, "level": levels[n] if n < len(levels) else f"{n + 1} letters"}
        | {"errors": errors, "counted": counted}
        for test, counts in tests.items()
        for n, (errors, counted) in enumerate(counts)
    ]
    curve = [
        {"step": 10 * (n + 1), "loss": 1.0, "running": True, "sparse.errors": errors}
        | {"sparse.counted": 100, "sparse.hardest": errors / 100}
        for n, errors in enumerate(checks)
    ]
    curve = curve or [{"step": 10, "loss": 1.0, "running": True}]
    first = next((row["step"] for row in curve if row.get("sparse.errors") == 0), None)
    outcome = {"step": 10 * len(curve), "solved": bool(checks) and checks[-1] == 0}
    outcome |= {"first_solved": first, "finite": True, "seconds": 1.0, "replicas": 1}
    names = {"run": recipe.run, "setting": recipe.setting}
    return Run({**names, **recipe.flat()}, outcome, curve, rows, SOURCE)


def write(run: Run, out: Path) -> None:
    rows = [{"kind": "recipe", **run.recipe}, {"kind": "outcome", **run.outcome}]
    rows += [{"kind": "curve", **row} for row in run.curve]
    rows += [{"kind": "test", **row} for row in run.tests]
    result = make_result(what="x", rows=rows, command="x")
    write_result(out / "runs" / f"{run.recipe['run']}.json", result)


FLIP = TaskRecipe(task=FlipFlop(), encoding="path")


def test_errors_over_seeds_beside_what_was_published() -> None:
    runs = [
        made_up(replace(FLIP, seed=0), {"sparse": [(0, 500), (0, 500)]}, [5, 0, 0]),
        made_up(replace(FLIP, seed=1), {"sparse": [(1, 500), (3, 500)]}, [0, 2, 0]),
        made_up(replace(FLIP, encoding="rope"), {"sparse": [(400, 1000)]}, [50]),
    ]
    path, rope = error_rows(runs)
    assert (path["errors"], path["counted"], path["seeds"], path["clean"]) == (4, 2000, 2, 1)
    assert (path["share"], path["least"], path["greatest"]) == (0.002, 0.0, 0.004)
    assert (path["low"], path["high"]) == error_interval(4, 2000)
    assert (path["solved"], path["stayed"]) == (2, 1)  # seed 1 left zero again
    assert path["published"] == 1e-6 and rope["published"] == pytest.approx(0.403)
    assert (rope["solved"], rope["stayed"], rope["change"]) == (0, 0, "")
    other = replace(FLIP, task=FlipFlop(pairs=8))
    assert error_rows([made_up(other, {"sparse": [(0, 9)]})])[0]["published"] is None


def test_what_changed_is_named_against_what_most_have() -> None:
    recipes = [
        FLIP,
        replace(FLIP, weight_decay=0.1),
        replace(FLIP, layers=2),
        replace(FLIP, options={"beta_max": 1.0}, check_every=7),
        replace(FLIP, encoding="rope", steps=77),
    ]
    assert changes_of([recipe.flat() for recipe in recipes]) == [
        "",
        "weight_decay 0.1",
        "",
        "beta_max 1.0",
        "",
    ]


def test_short_runs_of_a_search_do_not_change_what_is_usual(tmp_path: Path) -> None:
    searched = [replace(FLIP, learning_rate=rate, weight_decay=0.1) for rate in (3e-4, 1e-3, 3e-3)]
    runs = [made_up(r, {"sparse": [(1, 9)], "dense": [(0, 9)]}) for r in searched]
    runs += [
        made_up(replace(FLIP, steps=10_000, weight_decay=decay), {"sparse": [(0, 9)]})
        for decay in (0.0, 0.0, 0.1)
    ]
    _, results = make_report(runs, [], "x")
    rows = [row for row in results["flip_flop"]["rows"] if row["test"] == "sparse"]
    changes: dict[str, list[str]] = {}
    for row in rows:
        changes.setdefault(row["title"], []).append(row["change"])
    short, long = changes
    assert long == "flip-flop of 512 tokens, 10,000 steps"
    assert changes[short] == ["", "learning_rate 0.001", "learning_rate 0.003"]
    assert changes[long] == ["", "weight_decay 0.1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a figure whose names left no room for its panels
        draw("flip_flop", results["flip_flop"]["rows"], tmp_path / "x.png")
        many = [{**row, "change": f"{n} {'x' * 70}"} for n in range(40) for row in rows]
        draw("flip_flop", many, tmp_path / "y.png")


WORDS = TaskRecipe(task=GroupWords(letters=4, test_letters=6), encoding="path")


def words(recipe: TaskRecipe, inside: list[int], beyond: list[int]) -> Run:
    tests = {"in_distribution": inside, "beyond_training": beyond}
    return made_up(recipe, {k: [(e, 100) for e in v] for k, v in tests.items()})


def test_solved_lengths_and_fewest_layers() -> None:
    runs = [
        words(replace(WORDS, seed=0), [0, 0, 9, 10], [0, 0, 0, 0, 0, 60]),
        words(replace(WORDS, seed=1), [0, 0, 0, 9], [0, 0, 0, 50, 0, 0]),
        words(replace(WORDS, encoding="rope"), [0, 50, 90, 100], [0] * 6),
        words(replace(WORDS, encoding="rope", layers=2), [0, 0, 9, 10], [0] * 6),
        words(replace(WORDS, encoding="rope", learning_rate=1e-4), [0, 9, 90, 100], [0] * 6),
        words(replace(WORDS, options={"householders_per_token": 2}), [0] * 4, [0] * 6),
        words(replace(WORDS, layers=2), [99] * 4, [99] * 6),
    ]
    assert [solved_length(run, "in_distribution") for run in runs[:4]] == [3, 4, 1, 3]
    assert [solved_length(run, "beyond_training") for run in runs[:4]] == [5, 3, 6, 6]
    rows = length_rows(runs)
    assert (rows[0]["in_training"], rows[0]["in_training_least"]) == (3.5, 3)
    assert (rows[0]["accuracy_least"], rows[0]["accuracy_greatest"]) == (0.9, 0.91)
    fewest: dict[str, list[int | None]] = {}
    for row in fewest_layers(rows, 4):
        fewest.setdefault(row["model"], []).append(row["layers"])
        assert row["tried"] == (1 if "householders" in row["model"] else 2)
    assert fewest == {
        "path": [1, 1, None],
        "rope": [1, 2, None],  # one layer by the better of two rates
        "path, householders_per_token 2": [1, 1, 1],  # a model of its own
    }
    assert error_rows(runs)[0]["errors"] == 19  # of whole words, not of their prefixes
    assert title_of(runs[0].recipe) == "S5 over swaps"


def test_a_report_of_everything(tmp_path: Path, capsys) -> None:
    out, to = tmp_path / "tasks", tmp_path / "report"
    recall = TaskRecipe(task=Mqrar(n_back=2), encoding="fox")
    for run in (
        made_up(FLIP, {"sparse": [(0, 3_000_000)], "dense": [(3, 100)]}, [0]),
        words(WORDS, [0, 0, 0, 0], [0, 0, 0, 0, 99, 99]),
        made_up(recall, {"in_distribution": [(70, 100)]}),
        made_up(replace(recall, task=Mqrar(n_back=3)), {"in_distribution": [(90, 100)]}),
    ):
        write(run, out)
    enqueue(out, [FLIP, replace(FLIP, seed=1), replace(FLIP, layers=3)], "x", Workers())
    ReportTasks(out=out, to=to, command="path-attention task report").run()
    text = (to / "report.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert "| 0 | 3,000,000 reads | 0 | 0–0 | 0–9.99e-05 % | 1 of 1 | 1, 1 | 0.0001 % |" in text
    assert "## S5 over swaps" in text and "| path | 1 | 1 | 1 |" in text
    assert "| flip-flop of 512 tokens, 3,000 steps | path | 1 |  | 1 |" in text  # not run
    assert "| flip-flop of 512 tokens, 3,000 steps | path | 3 |  | 0 |" in text
    for task in ("flip_flop", "group_words", "mqrar"):
        assert read_result(to / f"{task}.json")["command"] == "path-attention task report"
        assert (to / f"{task}.png").read_bytes()[:4] == b"\x89PNG"
    assert (to / "flip_flop.png").stat().st_size > 10_000
    kinds = [row["kind"] for row in read_result(to / "flip_flop.json")["rows"]]
    assert kinds == ["errors", "errors", "not_run", "not_run"]
    with pytest.raises(ValueError, match="out: expected results in .*, found none"):
        ReportTasks(out=tmp_path / "none", to=to).run()


def test_a_search_is_reported_in_the_order_of_its_values(tmp_path: Path) -> None:
    values = [(decay, rate) for decay in (0.0, 0.1) for rate in (3e-4, 1e-3, 3e-3)]
    for decay, rate in reversed(values):
        recipe = replace(FLIP, weight_decay=decay, learning_rate=rate)
        write(made_up(recipe, {"sparse": [(round(1e4 * rate) + round(10 * decay), 99)]}), tmp_path)
    ReportTasks(out=tmp_path, to=tmp_path / "report", command="x").run()
    rows = read_result(tmp_path / "report" / "flip_flop.json")["rows"]
    assert [row["errors"] for row in rows] == [3, 10, 30, 4, 11, 31]


def test_results_of_several_sources_say_so() -> None:
    runs = [made_up(replace(FLIP, seed=s), {"sparse": [(0, 9)]}) for s in (0, 1)]
    other = {"commit": "0" * 40, "device": "cuda", "versions": {"python": "3.13"}}
    _, results = make_report([runs[0], replace(runs[1], source=other)], [], "x")
    found = results["flip_flop"]
    assert found["commit"] is None and found["device"] == "cpu, cuda"
    assert found["versions"] == {"python": "3.12, 3.13"}


@pytest.mark.parametrize("name", GRIDS)
def test_every_grid_is_complete(name: str) -> None:
    grid = find_grid(name)
    assert (GRIDS[name].__doc__ or "").strip()
    assert len({recipe.run for recipe in grid}) == len(grid) > 1
    seeds = {recipe.setting: 0 for recipe in grid}
    for recipe in grid:
        seeds[recipe.setting] += 1
    assert min(seeds.values()) >= (2 if name == "demo" else 3)


def test_the_grids_cover_what_is_claimed() -> None:
    everything = [recipe for name in ORDER_OF_WORK for recipe in find_grid(name)]
    flip = {r.encoding for r in everything if r.task == FlipFlop() and r.layers == 1}
    rows = "path rope stick_breaking fox alibi nope path_fox path_alibi rotation_learned"
    assert flip == set(rows.split())
    for name, generators, form in (
        ("a5_elements", "all", "prefix"),
        ("a5_cycles", "three_cycles", "prefix"),
        ("a5_identity", "three_cycles", "identity"),
    ):
        grid = find_grid(name)
        assert {(r.task.group, r.task.generators, r.task.form) for r in grid} == {
            ("A5", generators, form)
        }
        assert {(r.encoding, r.layers) for r in grid} == {
            (encoding, layers) for encoding in ("path", *COMPARED) for layers in (1, 2, 3, 4)
        }
        every = {(r.encoding, r.layers) for r in everything if r.task == grid[0].task}
        assert every == {(encoding, n) for encoding in rows.split() for n in (1, 2, 3, 4)}
    for names, encodings in (("controls", ("path", *COMPARED)), ("controls_others", OTHERS)):
        grid = find_grid(names)
        assert {r.task.group for r in grid} == {"S3", "Z60"}
        assert {r.encoding for r in grid} == set(encodings)
    recall = {(r.encoding, r.task.n_back) for r in find_grid("mqrar")}
    assert recall >= {(name, n) for name in ("path", "rope", "fox") for n in (1, 2, 3, 4)}
    for task in ("s5", "flip_flop", "a5", "mqrar"):
        grid = find_grid(f"{task}_ablations")
        for name, value in (
            ("beta_max", 1.0),
            ("direction_conv_size", 0),
            ("qk_norm", True),
            ("householders_per_token", 2),
        ):
            assert any(r.options.get(name) == value for r in grid)
        bounds = {(r.options.get("beta_max", 2.0), r.precision) for r in grid}
        assert bounds > {(x, p) for x in (2.0, 2 - 2**-7) for p in ("bfloat16", "float32")}


def test_a_sweep_is_a_grid_from_options() -> None:
    command = SweepTasks(
        grids=("flip_flop",), encodings=("path", "rope"), layers=(1, 2), seeds=(7,), steps=(500,)
    )
    recipes = command.recipes()
    assert [(r.encoding, r.layers, r.seed, r.steps) for r in recipes] == [
        ("path", 1, 7, 500),
        ("path", 2, 7, 500),
        ("rope", 1, 7, 500),
        ("rope", 2, 7, 500),
    ]
    (recipe,) = product([FLIP], beta_max=(1.5,))
    assert recipe.options == {"beta_max": 1.5}
    with pytest.raises(ValueError, match="grids: expected names among"):
        SweepTasks(grids=("a6",)).recipes()


def test_options_of_a_run_become_its_recipe() -> None:
    command = RunMqrar(
        task=Mqrar(n_back=3), encoding="fox", seeds=(4, 5), layers=3, qk_norm=False, beta_max=1.0
    )
    one, two = command.recipes()
    assert (one.seed, two.seed, one.layers, one.encoding) == (4, 5, 3, "fox")
    assert one.task == Mqrar(n_back=3) and one.options == {"beta_max": 1.0, "qk_norm": False}
    with pytest.raises(ValueError, match="curriculum_steps: expected 0 to 100"):
        RunGroupWords(steps=100, warmup_steps=1).recipes()
    for kind in (RunFlipFlop, RunGroupWords, RunMqrar):
        with pytest.raises(ValueError, match=r"encoding: expected one of \[.*, got 'pth'"):
            kind(encoding="pth").recipes()
        with pytest.raises(ValueError, match="seeds: expected at least one, got none"):
            kind(seeds=()).recipes()


def test_a_run_and_a_report_by_the_words_a_user_types(tmp_path: Path, capsys) -> None:
    out = str(tmp_path / "tasks")
    small = "--task.pairs 5 --task.keys 2 --task.values 2 --width 16 --heads 2 --layers 1 --steps 4"
    more = "--warmup-steps 1 --batch 2 --check-every 2 --precision float32 --seeds 0 1 --device cpu"
    run = ["task", "run", "mqrar", "--encoding", "rope", *small.split(), *more.split()]
    cli.main([*run, "--out", out])
    said = capsys.readouterr().out
    assert "step 4/4" in said and "| rope | 1 |  | in_distribution |" in said
    cli.main([*run, "--out", out])
    assert "step" not in capsys.readouterr().out.split("|")[0]  # done already
    cli.main(["task", "report", "--out", out, "--to", str(tmp_path / "report")])
    assert "MQRAR-1" in capsys.readouterr().out
    cli.main(["task", "sweep", "--grids", "demo", "--dry-run", "--out", out])
    assert "4 of 4 runs are left" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["task", "run", "mqrar", "--task.pairs", "0"])


def test_the_how_to_runs_as_it_stands_there(capsys) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to-tasks.md").read_text("utf-8")
    code = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    exec("\n".join(code), {})
    assert capsys.readouterr().out == "5 runs\n"
    commands = re.findall(r"^ +path-attention (task .*?)(?: +#.*)?$", text, re.M)
    assert len(commands) == 7
    for words in map(str.split, commands):
        length = 3 if words[1] == "run" else 2
        module, cls, _ = cli.COMMANDS[tuple(words[:length])]
        command = getattr(importlib.import_module(module), cls)
        parsed = cli._parse(command, tuple(words[:length]), words[length:])
        assert isinstance(parsed, command)
        if hasattr(parsed, "recipes"):
            assert parsed.recipes()
    for switch in re.findall(r"`(--[a-z-]+) [\d.]+`", text):
        assert switch.removeprefix("--").replace("-", "_") in {
            field.name for field in dataclasses.fields(RunMqrar)
        }
