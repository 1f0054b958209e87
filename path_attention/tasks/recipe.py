"""A task recipe says everything about one training run on a task, and names it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from path_attention.models import PRESETS, PathAttentionConfig
from path_attention.tasks.flip_flop import FlipFlop
from path_attention.tasks.group_words import GroupWords
from path_attention.tasks.mqrar import Mqrar
from path_attention.tasks.task import SEEDS, Task, check_range

TASKS: dict[str, type[Task]] = {task.name: task for task in (FlipFlop, GroupWords, Mqrar)}
Options = dict[str, int | float | bool | str | None]

# What replicas of one batched model may differ in: nothing but numbers that are data to it.
_OF_REPLICAS = ("seed", "learning_rate", "weight_decay")
_OF_START = ("beta_bias_init", "forget_bias_init", "initializer_range")


@dataclass(frozen=True, kw_only=True)
class TaskRecipe:
    """One training run on a synthetic task.

    Attributes:
        task: what is learned.
        encoding: a preset (`PathAttentionConfig.from_preset`).
        layers, width, heads: of the model.
        options: any other field of `PathAttentionConfig`, by name.
        steps: optimizer steps.
        batch: sequences of a step.
        learning_rate, betas, eps, weight_decay, clip: of AdamW; decay of matrices alone; clip is
            the longest gradient norm, None for no clipping.
        warmup_steps, schedule, final: straight up over so many steps, then down to this share of
            the peak along a "cosine" or a straight "linear" line.
        curriculum_steps: over so many steps the longest target grows from the task's least to its
            greatest; 0 for none.
        precision: "bfloat16" is autocast over float32 parameters, norms and strengths.
        check_every: steps between checks.
        stop_after: end a replica once so many checks in a row call it solved; None for never.
        seed: of the start and of the sequences.
    """

    task: Task
    encoding: str = "path"
    layers: int = 1
    width: int = 64
    heads: int = 2
    options: Options = field(default_factory=dict)
    steps: int = 3000
    batch: int = 16
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = 1.0
    warmup_steps: int = 50
    schedule: Literal["cosine", "linear"] = "cosine"
    final: float = 0.1
    curriculum_steps: int = 0
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    check_every: int = 250
    stop_after: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.encoding not in PRESETS:
            raise ValueError(f"encoding: expected one of {sorted(PRESETS)}, got {self.encoding!r}")
        for name in ("layers", "width", "heads", "steps", "batch", "check_every"):
            check_range(name, getattr(self, name), 1)
        for name in ("learning_rate", "eps", "weight_decay"):
            check_range(name, getattr(self, name), 0)
        check_range("warmup_steps", self.warmup_steps, 0, self.steps)
        check_range("curriculum_steps", self.curriculum_steps, 0, self.steps)
        check_range("final", self.final, 0, 1)
        check_range("seed", self.seed, 0, SEEDS - 1)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected two values in [0, 1), got {self.betas}")
        for name in ("clip", "stop_after"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected more than 0 or None, got {getattr(self, name)}")
        if self.schedule not in ("cosine", "linear"):
            raise ValueError(f"schedule: expected 'cosine' or 'linear', got {self.schedule!r}")
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision: expected 'float32' or 'bfloat16', got {self.precision!r}")
        if self.curriculum_steps and self.task.curriculum is None:
            raise ValueError(
                f"curriculum_steps: expected 0 with {self.task.name}, which has no curriculum, "
                f"got {self.curriculum_steps}"
            )
        self.model_config()

    def model_config(self) -> PathAttentionConfig:
        """The model's configuration. Raises ValueError naming a bad field."""
        sizes = {
            "vocab_size": self.task.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.task.length,
            "use_cache": False,
        }
        twice = sorted(sizes.keys() & self.options)
        if twice:
            raise ValueError(f"options: expected fields that the recipe does not set, got {twice}")
        return PathAttentionConfig.from_preset(self.encoding, **sizes, **self.options)

    def share(self, step: int) -> float:
        """The rate's share of its peak at step 0 ≤ step < steps."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step + 1 - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        down = (1 - math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else done
        return 1 - (1 - self.final) * down

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` is its inverse."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        task = {"name": self.task.name, **dataclasses.asdict(self.task)}
        return {**values, "task": task, "betas": list(self.betas), "options": dict(self.options)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TaskRecipe:
        """The recipe that `to_dict` gave these values of."""
        task = dict(values["task"])
        made = TASKS[task.pop("name")](**task)
        return cls(**{**values, "task": made, "betas": tuple(values["betas"])})

    def flat(self) -> dict[str, Any]:
        """The same under flat names: task.pairs, options.beta_max, beta1."""
        values = self.to_dict()
        task, options, betas = (values.pop(name) for name in ("task", "options", "betas"))
        of_task = {"task" if k == "name" else f"task.{k}": v for k, v in task.items()}
        of_options = {f"options.{k}": options[k] for k in sorted(options)}
        return {**of_task, **values, "beta1": betas[0], "beta2": betas[1], **of_options}

    @property
    def setting(self) -> str:
        """A name for everything but the seed: recipes of one setting differ in it alone."""
        words = [self.task.name, self.encoding, f"{self.layers}l"]
        return "-".join([*words, _digest({**self.to_dict(), "seed": None})])

    @property
    def run(self) -> str:
        """A name for the run; its result's file is called so."""
        return f"{self.setting}-seed{self.seed}"

    @property
    def shape(self) -> str:
        """Recipes of one shape can be replicas of one batched model."""
        values = {k: v for k, v in self.to_dict().items() if k not in _OF_REPLICAS}
        values["options"] = {k: v for k, v in self.options.items() if k not in _OF_START}
        return _digest(values)


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
