"""tools/reproduce.sh: commands that there are, the ones that made the results; stop and go on."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from path_attention import cli
from path_attention.results import read_result
from path_attention.training.corpus import CorpusRecipe

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "reproduce.sh"


def reproduce(
    *words: str, script: Path = SCRIPT, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(script), *words], capture_output=True, text=True, env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    """What every group runs, as words behind the program's name."""
    groups = re.search(r'GROUPS_KNOWN="([\w\s]+)"', SCRIPT.read_text())
    assert groups is not None
    done = reproduce("-n", "0,1:" + ",".join(groups[1].split()))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "path_attention.cli" in line]
    assert len(lines) > len(groups[1].split())
    return [shlex.split(line.partition("path_attention.cli")[2]) for line in lines]


def test_commands_and_options_are_there(commands: list[list[str]]) -> None:
    for words in commands:
        name = next(name for name in cli.COMMANDS if tuple(words[: len(name)]) == name)
        module, cls, _ = cli.COMMANDS[name]
        fields = {f.name for f in dataclasses.fields(getattr(importlib.import_module(module), cls))}
        asked = {w[2:].partition(".")[0].replace("-", "_") for w in words if w.startswith("--")}
        if name == ("corpus", "build"):  # its recipe's fields are options, too
            fields |= {field.name for field in dataclasses.fields(CorpusRecipe)}
        missing = {option.removeprefix("no_") for option in asked} - fields
        assert not missing, (name, missing)


def test_benchmarks_are_run_as_the_results_were(commands: list[list[str]]) -> None:
    compared = 0
    for words in commands:
        if words[0] != "benchmark":
            continue
        out = words.index("--out")
        path = ROOT / "results" / f"{Path(words[out + 1]).name}.json"
        if path.exists():
            made = shlex.split(read_result(path)["command"])[1:]
            if "--out" in made:
                del made[made.index("--out") : made.index("--out") + 2]
            assert words[:out] + words[out + 2 :] == made
            compared += 1
    assert compared >= 9


def test_what_is_not_known_is_refused() -> None:
    done = reproduce("-n", "0:operator,verse")
    assert done.returncode == 2 and "expected groups of: tests operator" in done.stderr
    assert reproduce().returncode == 2


def test_stopped_it_goes_on_and_keeps_what_came(tmp_path: Path) -> None:
    """A program that waits for a file in `decode` and ends at once in others stands for ours."""
    program, calls, gate = tmp_path / "program", tmp_path / "calls", tmp_path / "gate"
    program.write_text(
        f'#!/usr/bin/env bash\necho "$CUDA_VISIBLE_DEVICES $*" >> {calls}\n'
        f'while [[ "$*" == *decode* && ! -e {gate} ]]; do sleep 0.05; done\n'
        'while [ "$1" != --out ]; do shift; done; echo "{}" > "$2.json"; echo > "$2.safetensors"\n'
    )
    program.chmod(0o755)
    script = tmp_path / "project" / "tools" / "reproduce.sh"  # of a clone where nothing was run yet
    script.parent.mkdir(parents=True)
    shutil.copy2(SCRIPT, script)
    words = ["-t", str(tmp_path / "to"), "-k", str(tmp_path / "kept")]
    words += ["0:packed,decode,directions", "1:stages"]
    begun = time.monotonic()
    reproduce("-s", "3", *words, script=script, PA=str(program))
    assert time.monotonic() - begun < 20
    first = sorted(line.split()[0] + line.split()[2] for line in calls.read_text().splitlines())
    assert first == ["0decode", "0packed", "1stages"]
    gate.touch()
    assert reproduce(*words, script=script, PA=str(program)).returncode == 0
    again = [line.split()[2] for line in calls.read_text().splitlines()[3:]]
    assert again == ["decode", "directions"]
    with tarfile.open(tmp_path / "kept" / "results.tar.xz") as kept:
        names = {Path(name).name for name in kept.getnames()}
    assert {"decode.json", "operator_stages.json", "packed.json", "directions.json"} <= names
    assert not any(name.endswith(".safetensors") for name in names)
