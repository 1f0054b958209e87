"""A sweep: a queue of files that workers on any number of devices take jobs from.

    queue/0003-1f….json   a job: runs of one shape, trained as replicas of one batched model
    locks/1f…             held by the worker that has the job, let go by the system if it dies
    state/1f….pt          its last checkpoint, from which another worker goes on, bit for bit
    runs/RUN.json         a run's result; a run that has one is never done again
    models/RUN/           its model, for `from_pretrained`, if asked for
    failed/1f….txt        why a job failed

Nothing else is shared, so workers may also be started by hand on other machines with the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from path_attention.results import write_result, write_whole
from path_attention.tasks.engine import Engine, Say
from path_attention.tasks.recipe import TaskRecipe
from path_attention.tasks.record import result_of
from path_attention.training.lock import lock_if_free
from path_attention.training.signals import stop_signals


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who does the work.

    Attributes:
        devices: where; ("auto",) is every GPU, or the CPU if there is none.
        each: workers on each device, side by side.
        threads: CPU threads of a worker; None leaves PyTorch's choice.
        replicas: the most runs of one shape to train as one batched model.
        graph: on a GPU, replay each step as a CUDA graph.
        compile: use `torch.compile`.
        models: keep the trained models.
    """

    devices: tuple[str, ...] = ("auto",)
    each: int = 1
    threads: int | None = None
    replicas: int = 16
    graph: bool = True
    compile: bool = False
    models: bool = False

    def __post_init__(self) -> None:
        for name in ("each", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def places(self) -> list[str]:
        """A device for each worker."""
        devices = self.devices
        if devices == ("auto",):
            count = torch.cuda.device_count()
            devices = tuple(f"cuda:{n}" for n in range(count)) if count else ("cpu",)
        return [device for device in devices for _ in range(self.each)]


@dataclass(frozen=True)
class Job:
    """Runs of one shape, done together."""

    recipes: tuple[TaskRecipe, ...]
    command: str
    workers: Workers = field(default_factory=Workers)

    @property
    def name(self) -> str:
        runs = "\n".join(recipe.run for recipe in self.recipes)
        return hashlib.sha256(runs.encode()).hexdigest()[:12]

    def to_json(self) -> str:
        values = {
            "command": self.command,
            "workers": asdict(self.workers),
            "recipes": [recipe.to_dict() for recipe in self.recipes],
        }
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> Job:
        values = json.loads(path.read_text(encoding="utf-8"))
        recipes = tuple(TaskRecipe.from_dict(recipe) for recipe in values["recipes"])
        devices = tuple(values["workers"].pop("devices"))
        return cls(recipes, values["command"], Workers(devices=devices, **values["workers"]))


def result_path(out: Path, recipe: TaskRecipe) -> Path:
    """Where a run's result goes."""
    return out / "runs" / f"{recipe.run}.json"


def queued(out: Path) -> list[Job]:
    """The jobs of a sweep's folder, done or not, in order."""
    return [Job.read(path) for path in sorted((out / "queue").glob("*.json"))]


def missing(out: Path) -> list[TaskRecipe]:
    """The runs of a sweep's folder that have no result."""
    recipes = {recipe.run: recipe for job in queued(out) for recipe in job.recipes}
    return [recipe for recipe in recipes.values() if not result_path(out, recipe).exists()]


def make_jobs(recipes: Sequence[TaskRecipe], command: str, workers: Workers) -> list[Job]:
    """Jobs in the order of their first runs, each of at most `workers.replicas` of one shape."""
    by_shape: dict[str, list[TaskRecipe]] = {}
    for recipe in {recipe.run: recipe for recipe in recipes}.values():
        by_shape.setdefault(recipe.shape, []).append(recipe)
    return [
        Job(tuple(group[n : n + workers.replicas]), command, workers)
        for group in by_shape.values()
        for n in range(0, len(group), workers.replicas)
    ]


def enqueue(out: Path, recipes: Sequence[TaskRecipe], command: str, workers: Workers) -> None:
    """Add what is neither done nor in the queue yet, behind what is."""
    jobs = queued(out)
    known = {recipe.run for job in jobs for recipe in job.recipes}
    new = [r for r in recipes if r.run not in known and not result_path(out, r).exists()]
    for n, job in enumerate(make_jobs(new, command, workers), start=len(jobs)):
        write_whole(out / "queue" / f"{n:04d}-{job.name}.json", job.to_json())


def run_job(out: Path, job: Job, device: str, say: Say | None = None) -> None:
    """Do a job, or what is left of it after its last checkpoint, and write its results."""
    graph = None if job.workers.graph else False
    engine = Engine(job.recipes, device=device, compile=job.workers.compile, graph=graph)
    checkpoint = out / "state" / f"{job.name}.pt"
    for r, outcome in enumerate(engine.run(checkpoint, say)):
        if job.workers.models:
            engine.model(r).save_pretrained(out / "models" / outcome.recipe.run)
        write_result(result_path(out, outcome.recipe), result_of(engine, outcome, job.command))
    checkpoint.unlink(missing_ok=True)


def work(
    out: Path, device: str, say: Say | None = None, *, names: Sequence[str] | None = None
) -> int:
    """Take jobs until none is left to take. Returns how many failed.

    names: of the jobs to take, in this order; default: all, in the order of the queue.
    """
    jobs = {job.name: job for job in queued(out)}
    failures = 0
    for name in jobs if names is None else names:
        job = jobs[name]
        with lock_if_free(out / "locks" / name) as mine:
            if not mine or all(result_path(out, recipe).exists() for recipe in job.recipes):
                continue
            failure = out / "failed" / f"{name}.txt"
            try:
                run_job(out, job, device, say)
            except Exception as error:  # one job's failure must not cost the others
                failures += 1
                write_whole(failure, traceback.format_exc())
                if say is not None:
                    say(f"{job.recipes[0].setting} failed: {error}")
            else:
                failure.unlink(missing_ok=True)
    return failures


def names_of_jobs(out: Path, recipes: Sequence[TaskRecipe]) -> list[str]:
    """The queue's jobs that hold these runs and have no result of one, in the order of the runs."""
    holds = {recipe.run: job.name for job in queued(out) for recipe in job.recipes}
    left = [recipe.run for recipe in recipes if not result_path(out, recipe).exists()]
    return list(dict.fromkeys(holds[run] for run in left))


def sweep(
    out: Path, recipes: Sequence[TaskRecipe], command: str, workers: Workers
) -> signal.Signals | None:
    """Do these runs, but for those that have a result, in this order.

    What else is in the queue is left there. Returns the signal that stopped it, SIGINT or SIGTERM,
    or None; stopped, a later call goes on from the last checks.

    Raises:
        ValueError: some runs came to no result; names them and says why.
    """
    enqueue(out, recipes, command, workers)
    environment = {**os.environ}
    if workers.threads is not None:
        environment["OMP_NUM_THREADS"] = str(workers.threads)
    names = names_of_jobs(out, recipes)
    words = [sys.executable, "-m", "path_attention.tasks.sweep", str(out)]
    places = workers.places()[: len(names)]
    with stop_signals() as stop:
        started = [subprocess.Popen([*words, at, *names], env=environment) for at in places]
        try:
            while stop.received is None and any(process.poll() is None for process in started):
                time.sleep(0.1)
        finally:
            for process in started:
                process.terminate()
                process.wait()
    lacking = [r.run for r in recipes if not result_path(out, r).exists()]
    if stop.received is not None:
        return signal.Signals(stop.received)
    if lacking:
        reasons = [
            path.read_text(encoding="utf-8").strip().splitlines()[-1]
            for path in sorted((out / "failed").glob("*.txt"))
        ]
        raise ValueError(f"runs: no result of {lacking}; failures: {reasons or 'none noted'}")
    return None


def _main() -> None:
    out, device, *names = sys.argv[1:]

    def say(line: str) -> None:
        print(f"{device} {line}", flush=True)

    failures = work(Path(out), device, say, names=names or None)
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    _main()
