"""The commands `path-attention task run …` and `path-attention task sweep`.

Both are dataclasses to call from Python too:

    SweepTasks(grids=("flip_flop",), out=Path("runs/tasks")).run()
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from path_attention.recipes.tasks import (
    GRIDS,
    ORDER_OF_WORK,
    Grid,
    find_grid,
    flip_flop_recipe,
    group_words_recipe,
    mqrar_recipe,
    product,
    replace,
    with_options,
)
from path_attention.results import command_line
from path_attention.tasks.flip_flop import FlipFlop
from path_attention.tasks.group_words import GroupWords
from path_attention.tasks.mqrar import Mqrar
from path_attention.tasks.recipe import Options, TaskRecipe
from path_attention.tasks.report import print_report
from path_attention.tasks.sweep import Workers, make_jobs, missing, result_path, run_job, sweep


@dataclass(frozen=True, kw_only=True)
class _RunTask:
    """Options of every `task run`."""

    encoding: str = "path"
    """A preset of PathAttentionConfig."""
    seeds: tuple[int, ...] = (0,)
    """One run each, trained together as replicas of one batched model."""
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    steps: int | None = None
    batch: int | None = None
    """Sequences of a step."""
    learning_rate: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    curriculum_steps: int | None = None
    precision: Literal["float32", "bfloat16"] | None = None
    check_every: int | None = None
    beta_max: float | None = None
    """Householder: the bound on β; 1 takes away its negative eigenvalues."""
    beta_bias_init: float | None = None
    direction_conv_size: int | None = None
    """Householder: width of the convolution; 0 for none."""
    qk_norm: bool | None = None
    householders_per_token: int | None = None
    options: Options = field(default_factory=dict)
    """Any other field of PathAttentionConfig."""
    out: Path = Path("runs/tasks")
    """Where results go; a run that has one there is not done again."""
    device: str = "auto"
    graph: bool = True
    """On a GPU, replay each step as a CUDA graph."""
    compile: bool = False
    """Use torch.compile."""
    models: bool = False
    """Keep the trained models."""

    def base(self) -> TaskRecipe:
        """The task's own recipe."""
        raise NotImplementedError

    def recipes(self) -> Grid:
        """A recipe for each seed. Raises ValueError naming seeds if there is none."""
        if not self.seeds:
            raise ValueError("seeds: expected at least one, got none")
        named = ("layers", "width", "heads", "steps", "batch", "learning_rate", "weight_decay")
        named += ("warmup_steps", "curriculum_steps", "precision", "check_every")
        changes = {name: getattr(self, name) for name in named}
        base = replace(self.base(), **{k: v for k, v in changes.items() if v is not None})
        named = ("beta_max", "beta_bias_init", "direction_conv_size", "qk_norm")
        options = {name: getattr(self, name) for name in (*named, "householders_per_token")}
        given = {name: value for name, value in options.items() if value is not None}
        return product([with_options(base, {**self.options, **given})], seed=self.seeds)

    def run(self) -> None:
        options = {name: getattr(self, name) for name in ("graph", "compile", "models")}
        workers = Workers(devices=(self.device,), **options)
        recipes = self.recipes()
        left = [r for r in recipes if not result_path(self.out, r).exists()]
        for job in make_jobs(left, command_line(sys.argv), workers):
            run_job(self.out, job, workers.places()[0], lambda line: print(line, flush=True))
        print_report([result_path(self.out, recipe) for recipe in recipes])


@dataclass(frozen=True, kw_only=True)
class RunFlipFlop(_RunTask):
    """Train on flip-flop and count errors in distribution, on sparse and on dense sequences.

    What is left None is as in path_attention/recipes/tasks.py.
    """

    task: FlipFlop = field(default_factory=FlipFlop)

    def base(self) -> TaskRecipe:
        return replace(flip_flop_recipe(self.encoding), task=self.task)


@dataclass(frozen=True, kw_only=True)
class RunGroupWords(_RunTask):
    """Train on words in a group and count the words that are right up to each length.

    What is left None is as in path_attention/recipes/tasks.py.
    """

    task: GroupWords = field(default_factory=GroupWords)

    def base(self) -> TaskRecipe:
        return replace(group_words_recipe(self.encoding), task=self.task)


@dataclass(frozen=True, kw_only=True)
class RunMqrar(_RunTask):
    """Train on recall of a key's N-th last value.

    What is left None is as in path_attention/recipes/tasks.py.
    """

    task: Mqrar = field(default_factory=Mqrar)

    def base(self) -> TaskRecipe:
        return replace(mqrar_recipe(self.encoding), task=self.task)


@dataclass(frozen=True, kw_only=True)
class SweepTasks:
    """Do the runs of some grids, on any number of devices side by side.

    Interrupted, it goes on where it was; what has a result is not done again. SIGINT and SIGTERM
    end its workers, and it ends with 128 + the signal's number. Each list of values below replaces
    what the grids say, every combination of them.
    """

    grids: tuple[str, ...] = ORDER_OF_WORK
    """Names in path_attention.recipes.tasks, in order of work."""
    encodings: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    learning_rates: tuple[float, ...] = ()
    weight_decays: tuple[float, ...] = ()
    beta_bias_inits: tuple[float, ...] = ()
    out: Path = Path("runs/tasks")
    """The sweep's folder."""
    workers: Workers = field(default_factory=Workers)
    dry_run: bool = False
    """Say what would be done and stop."""

    def recipes(self) -> Grid:
        """Every run, each once."""
        values: dict[str, tuple[Any, ...]] = {
            "encoding": self.encodings,
            "layers": self.layers,
            "steps": self.steps,
            "learning_rate": self.learning_rates,
            "weight_decay": self.weight_decays,
            "beta_bias_init": self.beta_bias_inits,
            "seed": self.seeds,
        }
        given = {name: choices for name, choices in values.items() if choices}
        return product([recipe for name in self.grids for recipe in find_grid(name)], **given)

    def run(self) -> None:
        recipes = self.recipes()
        if self.dry_run:
            self._show(recipes)
            return
        stopped = sweep(self.out, recipes, command_line(sys.argv), self.workers)
        left = len(missing(self.out))
        if stopped is not None:
            print(f"stopped by {stopped.name}, {left} runs are left; the same command goes on")
            raise SystemExit(128 + stopped)
        print(f"{len(recipes)} runs are done in {self.out}; {left} others there are not")

    def _show(self, recipes: Grid) -> None:
        left = [r for r in recipes if not result_path(self.out, r).exists()]
        for job in make_jobs(left, "", self.workers):
            first = job.recipes[0]
            print(
                f"{first.setting}: {len(job.recipes)} replicas, {first.steps} steps of "
                f"{first.batch} × {first.task.length} tokens"
            )
        print(f"{len(left)} of {len(recipes)} runs are left; grids: {', '.join(GRIDS)}")
