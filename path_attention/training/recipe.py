"""A recipe says everything about a training run: keyword-only dataclasses, checked when made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from path_attention.training.corpus import CorpusRecipe

Precision = Literal["auto", "float32", "bfloat16"]
Parallel = Literal["auto", "ddp", "fsdp"]
Initialisation = Literal["whole", "meta"]


def _at_least(low: float, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value >= low:
            raise ValueError(f"{name}: expected at least {low}, got {value}")


def check_choices(recipe: object) -> None:
    """Raise ValueError, naming it, if a dataclass's field is none of those its `Literal` lists."""
    for name, hint in get_type_hints(type(recipe)).items():
        if get_origin(hint) is Literal and getattr(recipe, name) not in get_args(hint):
            raise ValueError(
                f"{name}: expected one of {list(get_args(hint))}, got {getattr(recipe, name)!r}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """The model to build: a preset's encoding, and sizes.

    Attributes:
        preset: a name of `PathAttentionConfig.from_preset`, for example "path" or "rope".
        start: folder of a model of this library to go on from: its configuration and weights. Its
            encoding must be the preset's, and no size may be given.
        hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
            intermediate_size, tie_word_embeddings, initializer_range: as in
            `PathAttentionConfig`; None: its default.
        options: any other field of `PathAttentionConfig`, by name. The vocabulary, the special
            tokens and the context length come from the data.
    """

    preset: str = "path_fox"
    start: Path | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    tie_word_embeddings: bool | None = None
    initializer_range: float | None = None
    options: dict[str, int | float | bool | str | None] = field(default_factory=dict)

    def overrides(self) -> dict[str, Any]:
        """Keywords for `PathAttentionConfig.from_preset`. Raises ValueError on one given twice."""
        named = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("preset", "start", "options") and getattr(self, f.name) is not None
        }
        for name in self.options:
            if name in named:
                raise ValueError(f"model.options: {name} is given as model.{name} too")
        if self.start is not None and (named or self.options):
            raise ValueError(
                f"model.start: expected no other field of the model with {self.start}, got "
                f"{sorted({**named, **self.options})}"
            )
        return {**named, **self.options}


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """The corpus, and how much of it the model sees at once.

    Attributes:
        context_length: longest piece of a document that a row holds, in tokens.
        corpus: the corpus's folder: opened if it is there, else made there from `build`. None for a
            folder of the cache.
        build: what the corpus is made from.
        mixture: corpora in place of one, each "FOLDER=WEIGHT". Whole numbers are ratios, as 1, 1,
            1; others are shares and must sum to 1.
        workers: threads of each process that make the next step's rows during this one; with 0
            they are made when they are needed. The rows are the same.
    """

    context_length: int
    corpus: Path | None = None
    build: CorpusRecipe = field(default_factory=CorpusRecipe)
    mixture: tuple[str, ...] = ()
    workers: int = 0

    def __post_init__(self) -> None:
        if self.mixture and self.corpus is not None:
            raise ValueError(
                f"mixture: expected none beside a corpus, got {self.mixture} and {self.corpus}"
            )
        _at_least(2, context_length=self.context_length)
        _at_least(0, workers=self.workers)


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """AdamW (arXiv 1711.05101) with clipping of the gradient's norm.

    Attributes:
        learning_rate: the peak.
        betas: decay of the first and second moment.
        eps: added to the second moment's root.
        weight_decay: of matrices only; norms, biases and gains (fewer than 2 dimensions) have none.
        clip: the longest gradient norm; None for no clipping.
    """

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        _at_least(0, learning_rate=self.learning_rate, weight_decay=self.weight_decay, eps=self.eps)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected two values in [0, 1), got {self.betas}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip: expected more than 0 or None, got {self.clip}")


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe:
    """The learning rate's course, as a share of its peak.

    Attributes:
        kind: "cosine": down to `final` over all steps. "wsd": flat, then straight down to `final`
            over the last `decay_steps` steps (warm-up, stable, decay; arXiv 2404.06395).
        warmup_steps: straight up over so many steps first.
        warmup_tokens: the same in tokens, rounded to whole steps; one of the two at most.
        start: where the warm-up starts.
        final: what remains at the last step.
        decay_steps: of "wsd" alone.
    """

    kind: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = 0
    warmup_tokens: int | None = None
    start: float = 0.0
    final: float = 0.1
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        _at_least(0, warmup_steps=self.warmup_steps, warmup_tokens=self.warmup_tokens)
        for name in ("start", "final"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected in [0, 1], got {getattr(self, name)}")
        if self.warmup_steps and self.warmup_tokens is not None:
            raise ValueError(
                f"warmup_tokens: expected None with warmup_steps = {self.warmup_steps}, "
                f"got {self.warmup_tokens}"
            )
        if self.kind == "wsd":
            if self.decay_steps is None:
                raise ValueError(
                    'decay_steps: expected a number of steps with kind="wsd", got None'
                )
            _at_least(1, decay_steps=self.decay_steps)
        elif self.decay_steps is not None:
            raise ValueError(
                f'decay_steps: expected None with kind="{self.kind}", got {self.decay_steps}'
            )

    def warmup(self, batch_tokens: int) -> int:
        """The warm-up in steps of so many tokens."""
        if self.warmup_tokens is None:
            return self.warmup_steps
        return round(self.warmup_tokens / batch_tokens)

    def share(self, step: int, steps: int, batch_tokens: int = 1) -> float:
        """The share of the peak at step 0 ≤ step < steps, each of `batch_tokens` tokens."""
        warmup = self.warmup(batch_tokens)
        if step < warmup:
            return self.start + (1 - self.start) * (step + 1) / warmup
        first = warmup if self.decay_steps is None else steps - self.decay_steps
        done = min(max(step + 1 - first, 0) / max(steps - first, 1), 1.0)
        down = (1 - math.cos(math.pi * done)) / 2 if self.kind == "cosine" else done
        return 1 - (1 - self.final) * down


@dataclass(frozen=True, kw_only=True)
class CheckpointRecipe:
    """Save what a resume needs.

    Attributes:
        every: steps between checkpoints; there is one at the end too.
        keep: how many of the latest to keep.
        asynchronous: go on training while a copy of the state is written. The checkpoint counts
            once all of it is on disk; a failure to write is raised then.
    """

    every: int = 500
    keep: int = 2
    asynchronous: bool = False

    def __post_init__(self) -> None:
        _at_least(1, every=self.every, keep=self.keep)


@dataclass(frozen=True, kw_only=True)
class LogRecipe:
    """What to write down, and when.

    Attributes:
        every: steps between lines of the log.
        heldout_every: steps between held-out losses; there is one at the end too, with None alone.
        heldout_tokens: how many tokens of held-out documents it is taken on.
        tensorboard: also write TensorBoard's files.
        progress: draw a bar.
        peak_flops: what one device can do a second, for model FLOPs utilisation; None for what is
            known of the device's name, if anything is.
    """

    every: int = 10
    heldout_every: int | None = 250
    heldout_tokens: int = 65536
    tensorboard: bool = True
    progress: bool = True
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        _at_least(
            1,
            every=self.every,
            heldout_every=self.heldout_every,
            heldout_tokens=self.heldout_tokens,
            peak_flops=self.peak_flops,
        )


@dataclass(frozen=True, kw_only=True)
class GuardRecipe:
    """What is a bad step, and what is done about it.

    A step is bad if its loss or the norm of its gradient is not finite. With `spike`, it is bad too
    if its loss is more than `spike` deviations above the median of the last `window` steps that
    were taken, and so many were: a deviation is 1.4826 times the median distance from the median
    (a normal law's standard deviation), 0.01 nats at the least.

    Attributes:
        action: "stop" ends the run before the bad step is taken; "skip" goes on without it:
            weights, moments and the losses looked back at stay as they are, the schedule goes on.
        spike: deviations; None for no such rule.
        window: steps looked back at.
        most: so many bad steps in a row end the run after all.
    """

    action: Literal["stop", "skip"] = "stop"
    spike: float | None = None
    window: int = 64
    most: int = 8

    def __post_init__(self) -> None:
        check_choices(self)
        _at_least(1, window=self.window, most=self.most)
        if self.spike is not None and not self.spike > 0:
            raise ValueError(f"spike: expected more than 0 or None, got {self.spike}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training run.

    Attributes:
        name: of the recipe.
        model, data, optimizer, schedule, guard, checkpoint, log: see their classes.
        steps: optimizer steps.
        batch_tokens: tokens of one step, over all processes.
        micro_batch_tokens: tokens of one forward pass of one process (of one group of
            context_parallel ones); None for one pass a step. The gradient is accumulated over
            batch_tokens / (micro_batch_tokens · processes / context_parallel) passes.
        precision: "bfloat16" is autocast over float32 parameters; "auto" takes it where the device
            multiplies it natively, else "float32".
        parallel: with several processes, "ddp" copies the model to each, "fsdp" spreads it
            (`fully_shard`); "auto" is "ddp".
        context_parallel: so many processes, neighbours, share each forward pass: its tokens lie on
            them, for sequences longer than one device's memory. A divisor of their number.
        initialisation: "whole" makes the model on each device, one draw after the other. "meta"
            makes each process's part of each parameter alone, drawn by (seed, its module's name):
            for models that no device can hold. Other numbers, the same law.
        activation_checkpointing: keep each block's input alone and compute the block again in the
            backward pass.
        compile: a backend of `torch.compile` for the blocks, for example "inductor"; None for none.
        fused: RMSNorm, SwiGLU, and the head with its loss by liger-kernel (CUDA).
        device: "auto" is CUDA where there is one.
        seed: of the start, the order of the data and any randomness in the model.
    """

    name: str
    model: ModelRecipe
    data: DataRecipe
    steps: int
    batch_tokens: int
    micro_batch_tokens: int | None = None
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    precision: Precision = "auto"
    parallel: Parallel = "auto"
    context_parallel: int = 1
    initialisation: Initialisation = "whole"
    activation_checkpointing: bool = False
    compile: str | None = None
    fused: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    guard: GuardRecipe = field(default_factory=GuardRecipe)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    log: LogRecipe = field(default_factory=LogRecipe)

    def __post_init__(self) -> None:
        check_choices(self)
        _at_least(1, steps=self.steps, context_parallel=self.context_parallel)
        _at_least(0, seed=self.seed)
        _at_least(2, batch_tokens=self.batch_tokens)
        self.model.overrides()
        if self.batch_tokens % self.row_tokens:
            raise ValueError(
                f"micro_batch_tokens: expected a divisor of batch_tokens = {self.batch_tokens}, "
                f"got {self.micro_batch_tokens}"
            )
        if self.row_tokens < self.data.context_length:
            raise ValueError(
                f"data.context_length: expected at most the {self.row_tokens} tokens of one "
                f"forward pass, got {self.data.context_length}"
            )
        if self.row_tokens < 2 * self.context_parallel:
            raise ValueError(
                f"context_parallel: expected at most half the {self.row_tokens} tokens of one "
                f"forward pass, got {self.context_parallel}"
            )
        used = self.schedule.warmup(self.batch_tokens) + (self.schedule.decay_steps or 0)
        if used > self.steps:
            raise ValueError(
                f"schedule: expected warm-up and decay within steps = {self.steps}, got {used}"
            )

    @property
    def row_tokens(self) -> int:
        """Tokens of one forward pass."""
        return self.batch_tokens if self.micro_batch_tokens is None else self.micro_batch_tokens

    def rate(self, step: int) -> float:
        """The learning rate at step 0 ≤ step < steps."""
        share = self.schedule.share(step, self.steps, self.batch_tokens)
        return self.optimizer.learning_rate * share

    def passes(self, processes: int) -> int:
        """Forward passes of each process in a step. Raises ValueError on an uneven share."""
        groups, rest = divmod(processes, self.context_parallel)
        if rest:
            raise ValueError(
                f"context_parallel: expected a divisor of the number of processes, {processes}, "
                f"got {self.context_parallel}"
            )
        rows = self.batch_tokens // self.row_tokens
        if rows % groups:
            whole = "" if self.micro_batch_tokens else "; give micro_batch_tokens"
            shared = f" / {self.context_parallel}" if self.context_parallel > 1 else ""
            raise ValueError(
                f"batch_tokens: expected a multiple of micro_batch_tokens · processes = "
                f"{self.row_tokens} · {processes}{shared}, got {self.batch_tokens}{whole}"
            )
        return rows // groups

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return _plain(dataclasses.asdict(self))

    def course(self) -> dict[str, Any]:
        """What the run's numbers hang on, flat; fingerprints stand for the corpus and the start.

        How the work is spread over processes, computed, logged and saved changes nothing but
        rounding.
        """
        values = self.to_dict()
        for name in _NO_MATTER:
            del values[name]
        values["micro_batch_tokens"] = self.row_tokens
        values["data"] = {"context_length": self.data.context_length}
        del values["model"]["start"]  # its digest stands for it, as the corpus's does
        return dict(_flat(values))


_NO_MATTER = (
    "name",
    "parallel",
    "context_parallel",
    "device",
    "activation_checkpointing",
    "compile",
    "fused",
    "checkpoint",
    "log",
)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            items += _flat(value, f"{prefix}{key}.")
        else:
            items.append((prefix + key, value))
    return items
