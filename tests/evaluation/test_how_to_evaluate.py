"""docs/how-to-evaluate.md: its commands name suites and options that exist."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from path_attention import cli
from path_attention.conversion.fine_tune import FineTuneRecipe
from path_attention.evaluation.report import Report

TEXT = (Path(__file__).parents[2] / "docs" / "how-to-evaluate.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ *path-attention (.*)$", TEXT.replace("\\\n", ""), flags=re.M)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_one(line: str) -> None:
    pytest.importorskip("lm_eval")
    words = line.split()
    name = next(name for name in cli.COMMANDS if tuple(words[: len(name)]) == name)
    module, cls, _ = cli.COMMANDS[name]
    known = {f.name for f in dataclasses.fields(getattr(importlib.import_module(module), cls))}
    if name[1:] == ("fine_tune",):
        known |= {f"training.{f.name}" for f in dataclasses.fields(FineTuneRecipe)}
    asked = {w.removeprefix("--").replace("-", "_") for w in words if w.startswith("--")}
    assert asked <= known


def test_every_suite_is_named() -> None:
    suites = {name[1] for name in cli.COMMANDS if name[0] == "evaluate"} - {"merge", "fetch"}
    assert suites - {"fine_tune", "beside_lm_eval"} == set(
        re.findall(r"^\| `(\w+)` \| ", TEXT, flags=re.M)
    )
    assert len(COMMANDS) > 6 and dataclasses.is_dataclass(Report)
