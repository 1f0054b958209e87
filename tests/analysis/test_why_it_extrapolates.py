"""docs/why-it-extrapolates.md: numbers are their rows', figures exist, commands parse."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
import tyro

from path_attention import cli
from path_attention.results import read_result

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "why-it-extrapolates.md").read_text(encoding="utf-8")
QUOTES = re.findall(r"\[([^\]]*)\]\((\.\./results/[^)#]*)#([^)]*)\)", TEXT)
COMMANDS = [
    line
    for line in re.sub(r"\\\n *", "", TEXT).splitlines()
    if line.startswith("    path-attention")
]


@pytest.mark.parametrize(("text", "file", "anchor"), QUOTES)
def test_numbers_are_those_of_their_rows(text: str, file: str, anchor: str) -> None:
    wanted = dict(parse_qsl(anchor, strict_parsing=True))
    column, times = wanted.pop("column"), float(wanted.pop("times", "1"))
    rows = json.loads((DOCS / file).read_text(encoding="utf-8"))["rows"]
    found = [row for row in rows if all(str(row.get(k)) == v for k, v in wanted.items())]
    assert len(found) == 1, wanted
    shown = text.removesuffix(" %").replace("−", "-").replace(",", "")
    places = len(shown.partition(".")[2])
    assert float(shown) == pytest.approx(found[0][column] * times, abs=0.5001 * 10**-places)


def test_links_and_figures_lead_somewhere() -> None:
    assert len(QUOTES) > 10
    for target in re.findall(r"\]\(([^)#]*)[#)]", TEXT):
        assert (DOCS / target).exists(), target


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str) -> None:
    words = shlex.split(line)[1:]
    name = next(name for name in cli.COMMANDS if tuple(words[: len(name)]) == name)
    module, cls, _ = cli.COMMANDS[name]
    tyro.cli(getattr(importlib.import_module(module), cls), args=words[len(name) :])


def test_figures_are_made_by_the_commands_that_stand_below_them() -> None:
    figures = re.findall(r"!\[[^\]]*\]\((\.\./results/[^)]*)\)\n\n((?:    .*\n)+)", TEXT)
    assert len(figures) == 6
    for file, block in figures:
        lines = [line.strip() for line in re.sub(r"\\\n *", "", block).strip().splitlines()]
        made = [shlex.split(line) for line in lines if not line.startswith("make ")]
        command = read_result((DOCS / file).with_suffix(".json"))["command"].split("; ")
        assert len(command) == len(made)
        for said, told in zip(command, made, strict=True):
            assert shlex.split(said)[: len(told)] == told
