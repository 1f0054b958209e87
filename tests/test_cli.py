"""The command: finds sub-commands, hands on options, turns bad input into one line."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils.logging import enable_progress_bar

from path_attention import __version__, cli


def run(*words: str) -> int:
    try:
        cli.main(words)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_names_every_command(words, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 0
    shown = capsys.readouterr().out
    assert all(" ".join(name) in shown for name in cli.COMMANDS)
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == f"path-attention {__version__}"


@pytest.mark.parametrize("group", [("evaluate",), ("task", "run"), ("corpus",)])
def test_help_of_a_group_names_its_commands(group, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*group) == 2
    assert run(*group, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split("  ")[1] for line in lines if line.startswith("  ")]
    assert shown == 2 * [" ".join(name) for name in cli.COMMANDS if name[: len(group)] == group]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_a_dataclass_that_runs(name: tuple[str, ...]) -> None:
    module, cls, line = cli.COMMANDS[name]
    command = getattr(importlib.import_module(module), cls)
    assert dataclasses.is_dataclass(command) and callable(command.run) and line
    assert all(field.kw_only for field in dataclasses.fields(command))


@pytest.mark.parametrize("name", [n for n in cli.COMMANDS if n != ("train",)])
def test_every_command_has_help(name, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*name, "--help") == 0
    assert "path-attention " + " ".join(name) in capsys.readouterr().out


def test_help_imports_next_to_nothing() -> None:
    code = (
        "import sys; from path_attention import cli; cli.main(['--help']); "
        "sys.exit(any(m in sys.modules for m in ('transformers', 'tyro', 'datasets')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("dance",), "command: expected one of"),
        (("evaluate", "rulr"), "command: expected one of ['evaluate perplexity', "),
        (("--verbose",), "command: expected one of ['train', 'export', 'corpus', 'convert', "),
        (("train", "no_such"), "RECIPE: expected one of"),
        (("train", "no_such.py:f"), "RECIPE: expected a Python file before the colon"),
        (("corpus", "build", "--sources", "no/such", "--out", "x"), "sources: expected"),
    ],
)
def test_bad_input_is_one_line(
    words, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PATH_ATTENTION_TRACEBACK", raising=False)
    assert run(*words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {line}") and said.count("\n") == 1
    monkeypatch.setenv("PATH_ATTENTION_TRACEBACK", "1")
    with pytest.raises(ValueError):
        cli.main(words)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device", "x"), "error: [Errno 28] No space left on device"),
        (FloatingPointError("the loss is nan\nat step 3"), "error: the loss is nan at step 3"),
        (ImportError("No module named 'tyro'"), "error: No module named 'tyro'; `pip install"),
        (ImportError("No module named 'lm_eval'"), "error: No module named 'lm_eval'; `pip"),
        (ImportError("No module named 'my_code'"), "error: No module named 'my_code'\n"),
    ],
)
def test_failures_are_one_line(error, line: str, capsys, monkeypatch) -> None:
    def fail(words: list[str]) -> None:
        raise error

    monkeypatch.delenv("PATH_ATTENTION_TRACEBACK", raising=False)
    monkeypatch.setattr(cli, "_run", fail)
    assert run("train") == 2
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1


def test_an_interruption_is_one_line(capsys, monkeypatch) -> None:
    def interrupt(words: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupt)
    assert run("train") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_output_that_nobody_reads_is_no_traceback() -> None:
    """A reader that has gone ends a command silently, a full disk with a line; closed is fine."""
    reader, gone = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

    def started(out: int, *options: str, words: tuple[str, ...] = ("--version",)):
        command = [sys.executable, *options, "-m", "path_attention.cli", *words]
        return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.PIPE, text=True)

    runs = [started(gone, words=("task", "--help")), started(gone, "-u"), started(full)]
    *ended, (said, code) = [(run.communicate()[1], run.returncode) for run in runs]
    assert ended == 2 * [("", 141)]
    assert code == 2 and said.startswith("error: [Errno 28]") and said.count("\n") == 1


def test_a_command_without_an_output_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert run("--version") == 0


def test_train_without_a_recipe_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train") == 2
    assert run("train", "--help") == 0
    assert capsys.readouterr().out.count("demo_path") == 2


def test_an_unknown_override_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "demo-path", "--optimizer.learnin-rate", "1") == 2
    assert "optimizer.learning-rate" in capsys.readouterr().err


def test_from_texts_to_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Build a corpus and train on it, by the words a user types."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(20):
        (folder / f"{n}.py").write_text(f"def f{n}(x):\n    return x + {n}\n" * 10)
    corpus = str(tmp_path / "corpus")
    words = ["corpus", "build", "--sources", str(folder), "--out", corpus, "--vocab-size", "280"]
    assert run(*words, "--heldout-fraction", "0.3") == 0
    assert capsys.readouterr().out.strip() == corpus
    out = tmp_path / "run"
    overrides = (
        "--model.hidden-size 16 --model.num-hidden-layers 1 --model.num-attention-heads 2 "
        "--model.options direction_rank 4 --data.context-length 16 --steps 3 --batch-tokens 64 "
        "--schedule.warmup-steps 1 --optimizer.learning-rate 0.01 --precision float32 "
        "--log.every 1 --log.no-progress --log.no-tensorboard --log.heldout-tokens 64"
    )
    words = ["train", "demo-path", "--out", str(out), "--data.corpus", corpus, *overrides.split()]
    assert run(*words) == 0
    card = json.loads((out / "card.json").read_text())
    assert card["recipe"]["model"]["hidden_size"] == 16 and card["recipe"]["steps"] == 3
    assert card["model"]["config"]["direction_rank"] == 4
    assert len((out / "log.jsonl").read_text().splitlines()) == 4
    assert run(*words, "--seed", "5") == 2
    assert "seed was 0, is 5" in capsys.readouterr().err
    assert "| encoding | path (direction_rank 4) |" in (out / "README.md").read_text()
    enable_progress_bar()
    assert run("export", str(out), "--out", str(tmp_path / "exported")) == 0
    assert capsys.readouterr().err == "" and not are_progress_bars_disabled()
