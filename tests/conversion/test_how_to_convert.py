"""docs/how-to-convert.md names options, starts and budgets that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from path_attention.cli import main
from path_attention.conversion.recipe import BUDGETS, budget
from path_attention.conversion.starts import START_RULES

TEXT = (Path(__file__).parents[2] / "docs" / "how-to-convert.md").read_text(encoding="utf-8")


def options_of(words: list[str], capsys) -> str:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    return re.sub(r"[│\s]+", " ", capsys.readouterr().out)


def test_commands_name_options_that_there_are(capsys) -> None:
    commands = [["convert"], ["convert", "compare"], ["convert", "fla"], ["export"]]
    commands += [["corpus", "build"], ["evaluate", "perplexity"], ["evaluate", "fine_tune"]]
    commands += [["benchmark", "conversion"], ["convert", "checkpoints"], ["convert", "control"]]
    known = " ".join(options_of(words, capsys) for words in commands)
    named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", TEXT)) - {"--help", "--pretraining"}
    assert len(named) > 15 and {name for name in named if name not in known} == set()


def test_starts_and_budgets_are_all_there() -> None:
    assert set(re.findall(r"^\| `(\w+)` \| [^|]*\| [^|]*\|$", TEXT, flags=re.M)) == set(START_RULES)
    assert set(re.findall(r"--budget (\w+)", TEXT)) <= set(BUDGETS)
    small, published = budget("small"), budget("published")
    for name in ("attention", "logits", "pretraining"):
        row = re.search(rf"^\| `{name}` \|.*\| (\w+) \| (\w+) \|$", TEXT, flags=re.M)
        for recipe, said in zip((published, small), row.groups(), strict=True):
            tokens = getattr(recipe, name).tokens
            units = {"M": 10**6, "B": 10**9}
            assert tokens == (0 if said == "none" else int(said[:-1]) * units[said[-1]])
