"""Real processes that are killed: a resume gives the straight run's numbers bit for bit."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from path_attention.training.log import read_log

STEPS = 100
RECIPE = """
import dataclasses, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from small_run import small_recipe
from path_attention.training.recipe import CheckpointRecipe

def recipe():
    return dataclasses.replace(
        small_recipe(Path({corpus!r})), steps={steps}, checkpoint=CheckpointRecipe(every=4, keep=2)
    )
"""


@pytest.fixture(scope="module")
def recipe_file(corpus, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("recipes") / "mine.py"
    here = str(Path(__file__).parent)
    path.write_text(RECIPE.format(here=here, corpus=str(corpus.path), steps=STEPS))
    return f"{path}:recipe"


def start(recipe_file: str, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "path_attention.cli", "train", recipe_file, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def steps_done(out: Path) -> int:
    lines = read_log(out / "log.jsonl")
    return max((line["step"] for line in lines if "loss" in line), default=0)


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    end = time.monotonic() + 120
    while steps_done(out) < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "the run does not start"
        time.sleep(0.005)


def numbers(out: Path) -> list[tuple[int, float, float]]:
    lines = read_log(out / "log.jsonl")
    return [(line["step"], line["loss"], line["gradient_norm"]) for line in lines if "loss" in line]


def assert_same_run(one: Path, other: Path) -> None:
    assert numbers(one) == numbers(other)
    first, second = (load_file(out / "model" / "model.safetensors") for out in (one, other))
    assert all((first[name] == second[name]).all() for name in first)


@pytest.fixture(scope="module")
def straight(recipe_file: str, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    process = start(recipe_file, out)
    assert process.wait(120) == 0, process.communicate()[1]
    assert [step for step, _, _ in numbers(out)] == list(range(1, STEPS + 1))
    return out


def test_kill_and_resume_is_the_straight_run(
    straight: Path, recipe_file: str, tmp_path: Path
) -> None:
    killed = start(recipe_file, tmp_path)
    wait_for_step(killed, tmp_path, 9)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    assert 9 <= steps_done(tmp_path) < STEPS and not (tmp_path / "model").exists()
    resumed = start(recipe_file, tmp_path)
    _, said = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, said
    events = [line for line in read_log(tmp_path / "log.jsonl") if "event" in line]
    assert len(events) == 1 and events[0]["step"] >= 4 and events[0]["step"] % 4 == 0
    assert_same_run(straight, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_cleanly(
    straight: Path, recipe_file: str, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(recipe_file, tmp_path)
    wait_for_step(process, tmp_path, 5)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    assert "Traceback" not in said
    done = steps_done(tmp_path)
    assert (tmp_path / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()
    if number == signal.SIGINT:
        return
    resumed = start(recipe_file, tmp_path)
    _, said = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, said
    assert {"step": done, "event": "resumed"} in read_log(tmp_path / "log.jsonl")
    assert_same_run(straight, tmp_path)


def test_a_full_disk_keeps_the_checkpoints_before(recipe_file: str, tmp_path: Path) -> None:
    """A limit on file sizes that the log fits in and a checkpoint does not."""
    command = [sys.executable, "-m", "path_attention.cli", "train", recipe_file, "--out"]
    first = start(recipe_file, tmp_path)
    wait_for_step(first, tmp_path, 5)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    before = sorted((tmp_path / "checkpoints").glob("*/*"))
    result = subprocess.run(
        [*command, str(tmp_path)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert re.match(r"error: the checkpoint of step \d+ can't be written", last), result.stderr
    assert sorted((tmp_path / "checkpoints").glob("*/*")) == before


def test_kill_one_of_two_processes_and_resume(recipe_file: str, tmp_path: Path) -> None:
    """kill −9 in the middle of a spread run: the same command gives the straight run's numbers."""

    def launch(out: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", "path_attention.cli", "train", recipe_file]
        command += ["--parallel", "fsdp", "--micro-batch-tokens", "64", "--steps", "24"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*command, "--checkpoint.asynchronous", "--out", str(out)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    straight, out = tmp_path / "straight", tmp_path / "killed"
    process = launch(straight)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    process = launch(out)
    wait_for_step(process, out, 9)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0 and 9 <= steps_done(out) < 24
    process = launch(out)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    events = [line for line in read_log(out / "log.jsonl") if "event" in line]
    assert len(events) == 1 and events[0]["step"] >= 4 and events[0]["step"] % 4 == 0
    assert_same_run(straight, out)
