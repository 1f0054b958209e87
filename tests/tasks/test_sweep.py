"""Sweeps: a queue that several processes empty, resumption, failures that cost no other job."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_tasks import SMALL

from path_attention.results import read_result
from path_attention.tasks import sweep as sweep_module
from path_attention.tasks.engine import Engine
from path_attention.tasks.record import read_run
from path_attention.tasks.sweep import (
    Job,
    Workers,
    enqueue,
    make_jobs,
    missing,
    names_of_jobs,
    queued,
    result_path,
    sweep,
    work,
)
from path_attention.training.lock import lock_if_free

replace = dataclasses.replace
TWO = Workers(devices=("cpu",), each=2, threads=1, replicas=2)
RECIPES = [replace(SMALL, seed=seed) for seed in range(3)] + [replace(SMALL, encoding="rope")]


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are processes of their own: they must find this checkout."""
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))


def results(out: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (out / "runs").glob("*.json")}


def test_two_workers_empty_the_queue_and_a_second_sweep_has_nothing_to_do(
    tmp_path: Path, importable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RECIPES[0]
    enqueue(tmp_path, [first], "one", TWO)
    assert work(tmp_path, "cpu") == 0
    before = results(tmp_path)
    assert list(before) == [f"{first.run}.json"]
    sweep(tmp_path, RECIPES, "all", TWO)
    after = results(tmp_path)
    assert after.keys() == {f"{recipe.run}.json" for recipe in RECIPES}
    assert after[f"{first.run}.json"] == before[f"{first.run}.json"]  # not done again
    assert read_result(result_path(tmp_path, RECIPES[1]))["command"] == "all"
    assert not list((tmp_path / "state").glob("*")) and not missing(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "train", lambda *_: pytest.fail("trained again"))
        assert work(tmp_path, "cpu") == 0
    assert results(tmp_path) == after
    alone = Engine([RECIPES[3]]).run()[0]
    assert read_run(result_path(tmp_path, RECIPES[3])).tests == alone.tests[0].rows()


def test_a_worker_goes_on_where_a_killed_one_was(tmp_path: Path, monkeypatch) -> None:
    enqueue(tmp_path, RECIPES[:2], "x", TWO)
    (job,) = queued(tmp_path)
    checkpoint = tmp_path / "state" / f"{job.name}.pt"
    real = Engine.check

    def killed(self: Engine) -> None:
        if self.step == 4:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(Engine, "check", killed)
    with pytest.raises(KeyboardInterrupt):
        work(tmp_path, "cpu")
    assert checkpoint.exists() and not results(tmp_path)
    assert [recipe.run for recipe in missing(tmp_path)] == [r.run for r in RECIPES[:2]]
    monkeypatch.setattr(Engine, "check", real)
    steps: list[int] = []
    train = Engine.train
    monkeypatch.setattr(
        Engine, "train", lambda self, n: (steps.append(self.step), train(self, n))[1]
    )
    assert work(tmp_path, "cpu") == 0
    assert steps == [2, 4] and not checkpoint.exists()
    whole = Engine(job.recipes).run()
    for outcome in whole:
        run = read_run(result_path(tmp_path, outcome.recipe))
        assert run.curve == outcome.curve and run.tests == outcome.tests[0].rows()


class InThisProcess:
    """A worker that has done its work as soon as it is started."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        out, device, *names = words[words.index("path_attention.tasks.sweep") + 1 :]
        self.failures = work(Path(out), device, names=names)

    def poll(self) -> int:
        return self.failures

    wait = poll

    def terminate(self) -> None: ...


def test_a_sweep_does_what_it_was_asked_in_that_order(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sweep_module, "subprocess", SimpleNamespace(Popen=InThisProcess))
    one_at_a_time = replace(TWO, each=1, replicas=1)
    enqueue(tmp_path, RECIPES, "before", one_at_a_time)
    asked = [RECIPES[2], RECIPES[1]]
    names = [job.name for job in queued(tmp_path)]
    assert names_of_jobs(tmp_path, asked) == [names[2], names[1]]
    assert sweep(tmp_path, asked, "x", one_at_a_time) is None
    done = [result_path(tmp_path, recipe) for recipe in asked]
    assert set((tmp_path / "runs").glob("*.json")) == set(done)
    assert done[0].stat().st_mtime_ns < done[1].stat().st_mtime_ns
    assert names_of_jobs(tmp_path, RECIPES) == [names[0], names[3]]


def test_a_stopped_sweep_ends_its_workers_and_leaves_its_checks(
    tmp_path: Path, importable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = replace(SMALL, steps=100_000)
    state = tmp_path / "state"
    started: list[subprocess.Popen] = []

    def start(words: list[str], env: dict[str, str]) -> subprocess.Popen:
        started.append(subprocess.Popen(words, env=env))
        return started[-1]

    monkeypatch.setattr(sweep_module, "subprocess", SimpleNamespace(Popen=start))

    def stop() -> None:
        for _ in range(600):
            if list(state.glob("[!.]*.pt")):
                break
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    waiting = threading.Thread(target=stop)
    waiting.start()
    assert sweep(tmp_path, [long], "x", TWO) is signal.SIGTERM
    waiting.join()
    assert [process.returncode for process in started] == [-signal.SIGTERM]
    assert not results(tmp_path) and len(list(state.glob("[!.]*.pt"))) == 1
    steps: list[int] = []

    def interrupt(self: Engine, _: int) -> None:
        steps.append(self.step)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "train", interrupt)
    with pytest.raises(KeyboardInterrupt):
        work(tmp_path, "cpu")
    assert steps[0] >= 2  # it goes on


def test_a_job_that_another_worker_has_is_left_to_it(tmp_path: Path) -> None:
    enqueue(tmp_path, RECIPES[:1], "x", TWO)
    (job,) = queued(tmp_path)
    with lock_if_free(tmp_path / "locks" / job.name) as mine:
        assert mine
        assert work(tmp_path, "cpu") == 0
    assert not results(tmp_path)
    assert work(tmp_path, "cpu") == 0 and len(results(tmp_path)) == 1


def test_one_failure_costs_no_other_job(tmp_path: Path, monkeypatch) -> None:
    enqueue(tmp_path, RECIPES, "x", TWO)
    real = Engine.check

    def failing(self: Engine) -> None:
        if self.recipe.encoding == "rope":
            raise RuntimeError("out of memory")
        real(self)

    monkeypatch.setattr(Engine, "check", failing)
    said: list[str] = []
    assert work(tmp_path, "cpu", said.append) == 1
    assert len(results(tmp_path)) == 3
    assert any("failed: out of memory" in line for line in said)
    (failure,) = (tmp_path / "failed").glob("*.txt")
    assert failure.read_text().strip().endswith("RuntimeError: out of memory")
    monkeypatch.setattr(Engine, "check", real)
    assert work(tmp_path, "cpu") == 0
    assert not missing(tmp_path) and not failure.exists()


def test_a_sweep_names_what_came_to_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sweep_module.sys, "executable", "true")  # workers that do nothing
    with pytest.raises(ValueError, match=f"runs: no result of .'{RECIPES[0].run}'.; failures"):
        sweep(tmp_path, RECIPES[:1], "x", TWO)


def test_jobs_hold_one_shape_and_at_most_so_many() -> None:
    jobs = make_jobs([*RECIPES, RECIPES[0]], "x", TWO)
    assert [[r.seed for r in job.recipes] for job in jobs] == [[0, 1], [2], [0]]
    assert all(len({r.shape for r in job.recipes}) == 1 for job in jobs)
    assert len({job.name for job in jobs}) == 3


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job(tuple(RECIPES[:2]), "x", replace(TWO, compile=True, graph=False))
    (tmp_path / "job.json").write_text(job.to_json())
    assert Job.read(tmp_path / "job.json") == job
    assert json.loads(job.to_json())["recipes"][1]["seed"] == 1


def test_workers_are_named_by_their_devices() -> None:
    assert Workers(devices=("cuda:0", "cuda:1"), each=2).places() == [
        "cuda:0",
        "cuda:0",
        "cuda:1",
        "cuda:1",
    ]
    with pytest.raises(ValueError, match="replicas: expected at least 1, got 0"):
        Workers(replicas=0)


def test_models_are_kept_on_request(tmp_path: Path) -> None:
    from path_attention.models import PathAttentionForCausalLM

    enqueue(tmp_path, RECIPES[:1], "x", replace(TWO, models=True))
    assert work(tmp_path, "cpu") == 0
    kept = PathAttentionForCausalLM.from_pretrained(tmp_path / "models" / RECIPES[0].run)
    assert kept.config.direction_rank == 4
