"""docs/how-to-benchmark.md names every benchmark, candidate, option and result as they are."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from path_attention import cli
from path_attention.benchmarks import candidates, comparison, decode, encodings
from path_attention.results import read_result

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how-to-benchmark.md").read_text(encoding="utf-8")
NAMES = [name[1] for name in cli.COMMANDS if name[0] == "benchmark"]
RESULTS = {path.name: read_result(path) for path in sorted((ROOT / "results").glob("*.json"))}
_, MEASURES, _, CHECKS, MADE = re.split(r"^## .*\n", TEXT, flags=re.M)
TABLE, CANDIDATES = MEASURES.split("The candidates of")
STARTED = r"torchrun [^`\n]*-m path_attention\.cli"
PLAIN = re.sub(STARTED, "path-attention", TEXT)
COMMANDS = re.findall(r"(?:^    |`)(path-attention [^`\n#]+)", PLAIN, flags=re.M)
COMMANDS = [part for line in COMMANDS for part in line.split("; ") if not part.endswith("NAME")]


def class_of(words: list[str]) -> Any:
    name = next(name for name in cli.COMMANDS if tuple(words[: len(name)]) == name)
    module, cls, _ = cli.COMMANDS[name]
    return getattr(importlib.import_module(module), cls)


def test_every_benchmark_is_told() -> None:
    told = re.findall(r"^\| `(\w+)` \|", TABLE, flags=re.M)
    assert sorted(told) == sorted(NAMES)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_names_options_that_there_are(line: str) -> None:
    words = shlex.split(line)[1:]
    known = {field.name for field in dataclasses.fields(class_of(words))}
    for field in dataclasses.fields(class_of(words)):
        if dataclasses.is_dataclass(field.default_factory):  # its fields are options, too
            known |= {f"{field.name}.{f.name}" for f in dataclasses.fields(field.default_factory)}
    asked = [word[2:].replace("-", "_") for word in words if word.startswith("--")]
    assert {option.removeprefix("no_") for option in asked} <= known


def test_an_option_told_belongs_to_the_benchmark_of_its_row() -> None:
    found = 0
    for name, rest in re.findall(r"^\| `(\w+)` \|(.*)", TABLE, flags=re.M):
        known = {f.name for f in dataclasses.fields(class_of(["benchmark", name]))}
        asked = re.findall(r"--([a-z][a-z-]*)", rest)
        found += len(asked)
        assert {option.replace("-", "_") for option in asked} <= known, name
    options = set(re.findall(r"--([a-z][a-z-]*)", re.sub(STARTED, "", TEXT.replace(MADE, ""))))
    every = {f.name for name in NAMES for f in dataclasses.fields(class_of(["benchmark", name]))}
    assert found > 4 and {x.replace("-", "_") for x in options} <= every | {"help"}


def test_the_candidates_are_these() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\w, ]+) \| (GPU|CPU|both) \|$", CANDIDATES, re.M)
    told = {name: (computes.split(", "), on) for name, computes, on in rows}
    places = {("cuda",): "GPU", ("cpu",): "CPU", ("cpu", "cuda"): "both"}
    there = {}
    for one in candidates._CANDIDATES:
        every = set(one.encodings) == set(candidates.ENCODINGS)
        there[one.name] = (["all"] if every else list(one.encodings), places[one.devices])
    assert told == there
    anchors = {
        (device, layout): candidates.candidates(device, layout)[0].name
        for device in ("cpu", "cuda")
        for layout in ("batch", "packed")
    }
    assert anchors == {
        ("cpu", "batch"): "sdpa",
        ("cpu", "packed"): "sdpa",
        ("cuda", "batch"): "sdpa_cudnn",
        ("cuda", "packed"): "flash_varlen",
    }


def test_what_is_allowed_is_what_is_told() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    told = re.findall(r"\d(?:\.\d)?e-\d", CHECKS)
    allowed = [table[x] for table in (comparison.ALLOWED, encodings._ALLOWED) for x in dtypes]
    assert [float(x) for x in told] == [*allowed, decode._ALLOWED]


def test_the_commands_of_results_are_their_own() -> None:
    row = "| [`{0}`](../results/{0}) | {1} | `{2}` |"
    for name, result in RESULTS.items():
        place = "H200" if "H200" in result["device"] else "2 CPU cores"
        line = row.format(name, place, result["command"])
        assert line in MADE, f"docs/how-to-benchmark.md: expected the line {line}"
    assert len(re.findall(r"^\| \[`", MADE, flags=re.M)) == len(RESULTS)
    made = {name for r in RESULTS.values() for name in re.findall(r"benchmark (\w+)", r["command"])}
    (missing,) = re.findall(r"^No file is there yet of (.*)\.$", MADE, flags=re.M)
    assert set(re.findall(r"`(\w+)`", missing)) == set(NAMES) - made
