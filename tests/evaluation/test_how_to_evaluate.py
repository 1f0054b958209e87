"""docs/how-to-evaluate.md: its commands name suites and options that exist; its recipe works."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from path_attention import cli
from path_attention.evaluation.report import Report
from path_attention.recipes import find_recipe

TEXT = (Path(__file__).parents[2] / "docs" / "how-to-evaluate.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^path-attention (.*)$", TEXT, flags=re.M)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_one(line: str) -> None:
    pytest.importorskip("lm_eval")
    words = line.split()
    name = next(name for name in cli.COMMANDS if tuple(words[: len(name)]) == name)
    if name == ("train",):
        return
    module, cls, _ = cli.COMMANDS[name]
    known = {f.name for f in dataclasses.fields(getattr(importlib.import_module(module), cls))}
    asked = {w.removeprefix("--").replace("-", "_") for w in words if w.startswith("--")}
    if name == ("corpus", "build"):
        known |= {"sources", "tokenizer"}
    assert asked <= known


def test_every_suite_is_named() -> None:
    suites = {name[1] for name in cli.COMMANDS if name[0] == "evaluate"} - {"merge", "write"}
    assert suites - {"fetch"} == set(re.findall(r"^\| `(\w+)` \| ", TEXT, flags=re.M))
    assert len(COMMANDS) > 6 and dataclasses.is_dataclass(Report)


def test_the_recipe_goes_on_from_a_model(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    file = tmp_path / "books.py"
    file.write_text(code)
    recipe = find_recipe(f"{file}:path")()
    assert recipe.model.overrides() == {} and recipe.data.context_length == 256
    started = dataclasses.replace(recipe.model, start=tmp_path)
    assert started.overrides() == {}
