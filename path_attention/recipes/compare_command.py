"""The commands `path-attention compare train` and `path-attention compare report`.

OUT/RUN/                 of `train`: recipe.json, log.jsonl, checkpoints/, model/, card.json
OUT/RUN/PART.json        perplexity by length on a part's held-out documents
OUT/RUN/models/step-N/   weights in bfloat16, of the run whose checkpoints are kept
OUT/RUN/failed.txt       why a run came to no result
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from path_attention.evaluation.perplexity_by_length import (
    Partial,
    parse_lengths,
    parse_parts,
    perplexity_by_length,
)
from path_attention.recipes.language_models import COMPARED, Budget, compared_model, milestones
from path_attention.results import make_result, read_result, write_result, write_whole
from path_attention.tasks.sweep import Workers
from path_attention.training.corpus import TokenCorpus
from path_attention.training.export import export_step
from path_attention.training.lock import lock_if_free
from path_attention.training.loop import train
from path_attention.training.progress import say
from path_attention.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class CompareModels:
    """Train language models that differ in their encoding alone, and measure each by length.

    Runs are spread over devices, one after the other on each. What has its results is not done
    again; an interrupted run goes on from its last checkpoint. SIGTERM saves and stops.
    """

    corpus: Path
    """Of `path-attention corpus build`."""
    parts: tuple[str, ...] = ("code=site-packages/*,stdlib/*,include/*", "prose=prose/*")
    """Parts of the held-out documents to measure on, each NAME=PATTERN,PATTERN of their names."""
    models: tuple[str, ...] = COMPARED
    """Names in path_attention.recipes.language_models, in order of work."""
    seeds: tuple[int, ...] = (0, 1)
    budget: Budget = field(default_factory=Budget)
    out: Path = Path("runs/language_models")
    """A folder for each run."""
    devices: tuple[str, ...] = ("auto",)
    """cpu, cuda:0, cuda:1 …; auto is every GPU, or the CPU if there is none."""
    each: int = 1
    """Runs on each device, side by side."""
    lengths: str = "512,1024,2048,4096,8192,16384,32768,65536"
    """Tokens of context that perplexity is measured at."""
    targets: int = 256
    """Target tokens of a window."""
    windows: int = 24
    """The most windows of a part."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of weights and activations in the evaluation."""

    def run(self) -> None:
        parse_lengths(self.lengths)
        corpus = TokenCorpus.open(self.corpus)
        for patterns in self.held_out().values():
            corpus.only(patterns)
        for recipe in self.recipes():
            if self.done(recipe):
                self.check_same(recipe)
        places = Workers(devices=self.devices, each=self.each).places()
        if len(places) == 1:
            _work(self, places[0])
        else:
            self._spread(places)
        lacking = [recipe.name for recipe in self.recipes() if not self.done(recipe)]
        if lacking:
            failed = {n: self.out / n / "failed.txt" for n in lacking}
            reasons = [
                p.read_text().strip().splitlines()[-1] for p in failed.values() if p.exists()
            ]
            raise ValueError(f"models: no result of {lacking}; failures: {reasons or 'none noted'}")

    def recipes(self) -> list[Recipe]:
        """A recipe for each seed and model, in order of work. Raises ValueError on a bad name."""
        return [
            compared_model(name, seed, self.corpus, self.budget)
            for seed in self.seeds
            for name in self.models
        ]

    def held_out(self) -> dict[str, list[str]]:
        """Patterns of each part. Raises ValueError on a part without any."""
        return parse_parts(self.parts)

    def done(self, recipe: Recipe) -> bool:
        """Whether a run has all its results."""
        folder = self.out / recipe.name
        models = [folder / "models" / name / "config.json" for name in milestones(recipe)]
        parts = [folder / f"{part}.json" for part in self.held_out()]
        return all(path.exists() for path in (folder / "card.json", *models, *parts))

    def check_same(self, recipe: Recipe) -> None:
        """Raise ValueError, naming what changed, if a run's results are of other options."""
        folder = self.out / recipe.name
        before = json.loads((folder / "recipe.json").read_text())
        now = json.loads(json.dumps(recipe.to_dict()))
        names = [name for name in recipe.course() if name != "micro_batch_tokens"]
        pairs = {name: (_at(before, name), _at(now, name)) for name in names}
        for part in self.held_out():
            rows = read_result(folder / f"{part}.json")["rows"]
            measured = [row["length"] for row in rows if row["by"] == "length"]
            pairs["lengths"] = (sorted(measured), sorted(parse_lengths(self.lengths)))
            pairs["dtype"] = (rows[0]["dtype"], self.dtype)
        changed = [f"{n} was {was!r}, is {now!r}" for n, (was, now) in pairs.items() if was != now]
        if changed:
            raise ValueError(
                f"out: {folder} holds results of other options: {'; '.join(changed)}. Go back to "
                "them, or choose another folder"
            )

    def do(self, recipe: Recipe, device: str) -> bool:
        """A run's training, or what is left of it, then its results. False if it was stopped."""
        folder = self.out / recipe.name
        recipe = replace(recipe, device="cuda" if device.startswith("cuda") else "cpu")
        if train(recipe, folder).signal is not None:
            return False
        for name, step in milestones(recipe).items():
            if not (folder / "models" / name / "config.json").exists():
                export_step(folder, step, folder / "models" / name, "bfloat16")
        corpus = TokenCorpus.open(self.corpus)
        for part, patterns in self.held_out().items():
            if not (folder / f"{part}.json").exists():
                self._measure(recipe, part, corpus.only(patterns), device)
        return True

    def _measure(self, recipe: Recipe, part: str, corpus: TokenCorpus, device: str) -> None:
        folder = self.out / recipe.name
        partial = Partial(folder / f"{part}.partial.json")
        rows = perplexity_by_length(
            {recipe.name.rpartition("_seed")[0]: folder},
            corpus,
            lengths=parse_lengths(self.lengths),
            targets=self.targets,
            windows=self.windows,
            dtype=self.dtype,
            device=device,
            batch_tokens=1 << 16,
            partial=partial,
        )
        what = f"Perplexity by length of {recipe.name} on held-out documents of {part}"
        write_result(folder / f"{part}.json", make_result(what=what, rows=rows, device=device))
        partial.delete()

    def _spread(self, places: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        started = [context.Process(target=_work, args=(self, place)) for place in places]

        def stop(number: int, _: FrameType | None) -> None:
            for process in started:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, number)

        before = signal.signal(signal.SIGTERM, stop)
        try:
            for process in started:
                process.start()
            for process in started:
                process.join()
        finally:
            signal.signal(signal.SIGTERM, before)
            for process in started:
                process.kill()


def _work(comparison: CompareModels, device: str) -> None:
    """Take runs until none is left to take, or one was told to stop."""
    _die_with_parent()
    if device.startswith("cuda"):
        os.environ["LOCAL_RANK"] = device.partition(":")[2] or "0"
        torch.cuda.set_device(device)
    for recipe in comparison.recipes():
        folder = comparison.out / recipe.name
        with lock_if_free(folder / "lock") as mine:
            if not mine or comparison.done(recipe):
                continue
            torch.compiler.reset()
            say(f"{device}: {recipe.name} begins")
            if not _finishes(lambda r=recipe: comparison.do(r, device), folder / "failed.txt"):
                return
            say(f"{device}: {recipe.name} ends")


def _at(values: Any, name: str) -> Any:
    """The value of "a.b" in nested dictionaries, None where there is none."""
    for key in name.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _die_with_parent() -> None:
    """End this process as soon as the one that started it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _finishes(run: Callable[[], bool], failure: Path) -> bool:
    """Whether work goes on. A run's failure must not cost the others: it is written down."""
    try:
        going_on = run()
    except Exception as error:
        write_whole(failure, traceback.format_exc())
        say(f"{failure.parent.name} failed: {' '.join(str(error).split())[:300]}")
        return True
    failure.unlink(missing_ok=True)
    return going_on
