"""A conversion's recipe: the student, its start, and three stages with a token budget each.

Published (arXiv 2505.16381, after RADLADS, arXiv 2505.03005): attention outputs over 100M tokens
at a length of 512, cosine from 1e-3 to 1e-5, batches of 32; divergence over 3B tokens; then
pretraining over 21B tokens of text, code and mathematics as 1:1:1. Open there, and chosen here:

- Stage 2 and 3: peaks of 3e-4 and 3e-4, cosine to a tenth, a warm-up of 2 %, a context of 2048 and
  4096 tokens, half a million and a million tokens a step, all parameters trained, full divergence
  at temperature 1.
- Stage 1 trains all of the attention layers, no weight decay anywhere.
- The start: see `starts`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from path_attention.conversion.lora import LoraRecipe
from path_attention.conversion.objectives import Choices, Trainable
from path_attention.conversion.starts import Directions, StartRule
from path_attention.training.mixture import parse_part, whole_weights
from path_attention.training.recipe import (
    CheckpointRecipe,
    GuardRecipe,
    LogRecipe,
    Parallel,
    Precision,
    check_choices,
)

_EXCHANGED = ("path", "path_fox")
Target = Literal["path", "path_fox", "fox", "rope"]


@dataclass(frozen=True, kw_only=True)
class StageRecipe:
    """One stage.

    Attributes:
        tokens: the budget, rounded up to whole steps; 0 leaves the stage out.
        context_length: longest piece of a document, in tokens.
        batch_tokens: tokens of a step, over all processes.
        micro_batch_tokens: tokens of one forward pass of one process; None for a whole step.
        learning_rate: the peak.
        final: what is left of it at the last step (cosine).
        warmup: the share of the budget that warms up.
        weight_decay: of matrices.
        trainable: "all"; "attention": the attention layers; "encoding": w, β and gates alone;
            "lora": these, and low-rank updates of the other matrices.
        temperature, top_k: of the divergence (stage "logits").
        relative: divide each layer's error by the teacher's mean square (stage "attention").
    """

    tokens: int
    context_length: int
    batch_tokens: int
    micro_batch_tokens: int | None = None
    learning_rate: float = 3e-4
    final: float = 0.1
    warmup: float = 0.02
    weight_decay: float = 0.0
    trainable: Trainable = "all"
    temperature: float = 1.0
    top_k: int | None = None
    relative: bool = False

    def __post_init__(self) -> None:
        check_choices(self)
        if self.tokens < 0:
            raise ValueError(f"tokens: expected at least 0, got {self.tokens}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup: expected a share in [0, 1], got {self.warmup}")
        if not self.temperature > 0:
            raise ValueError(f"temperature: expected a number above 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: expected at least 1 or None, got {self.top_k}")

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return -(-self.tokens // self.batch_tokens)


def _attention_stage() -> StageRecipe:
    return StageRecipe(
        tokens=100_000_000,
        context_length=512,
        batch_tokens=32 * 512,
        learning_rate=1e-3,
        final=1e-2,
        trainable="attention",
    )


def _logits_stage() -> StageRecipe:
    return StageRecipe(
        tokens=3_000_000_000,
        context_length=2048,
        batch_tokens=1 << 19,
        micro_batch_tokens=1 << 14,
    )


def _pretraining_stage() -> StageRecipe:
    return StageRecipe(
        tokens=21_000_000_000,
        context_length=4096,
        batch_tokens=1 << 20,
        micro_batch_tokens=1 << 14,
    )


@dataclass(frozen=True, kw_only=True)
class ReportRecipe:
    """What a conversion is measured on, teacher beside student.

    Attributes:
        tokens: held-out tokens that the model before and after each stage is measured on.
        context: longest piece of them.
        lengths: tokens of context for perplexity by length of the last model, on every corpus that
            has documents as long.
        targets, windows: of perplexity by length.
        suites: of `path-attention evaluate`, on the last model; None for those that need nothing
            fetched (phonebook, variable_assignment), and with data_dir zero_shot.
        suite_lengths: tokens of context of suites that are made to lengths.
        samples: of each of their tasks and lengths.
        limit: documents of each task of the others.
        data_dir: a folder of `path-attention evaluate fetch`; None: the hub.
        background: text that ruler and babilong hide facts in.
        prompts: that both models answer greedily; as chats where the tokenizer has a template.
        new_tokens: the most of an answer.
    """

    tokens: int = 1 << 17
    context: int = 2048
    lengths: tuple[int, ...] = (512, 2048, 8192, 32768)
    targets: int = 128
    windows: int = 16
    suites: tuple[str, ...] | None = None
    suite_lengths: tuple[int, ...] = (512, 2048, 8192)
    samples: int = 50
    limit: int | None = None
    data_dir: Path | None = None
    background: tuple[str, ...] = ()
    prompts: tuple[str, ...] = (
        "What is the capital of France, and what is it known for?",
        "Write a Python function that returns the n-th Fibonacci number.",
        "Anna has 3 apples, buys 4 more and gives 2 to Tom. How many has she left? Explain.",
    )
    new_tokens: int = 96

    def __post_init__(self) -> None:
        for name in ("tokens", "context", "targets", "windows", "samples", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"report.{name}: expected at least 1, got {getattr(self, name)}")
        if list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"report.lengths: expected rising numbers, got {self.lengths}")

    @property
    def scores(self) -> bool:
        """Whether anything is measured beside what a stage did."""
        return bool(self.lengths or self.prompts) or self.suites != ()


NO_SCORES = ReportRecipe(lengths=(), suites=(), prompts=())


@dataclass(frozen=True, kw_only=True)
class ConversionRecipe:
    """A whole conversion; its defaults are the published budgets.

    Attributes:
        to: the student's encoding: "path", "path_fox", "fox"; "rope" trains the teacher on, as a
            control.
        start: where w, β and gates start: near_zero, one, rope_decay, exchange (`starts`).
        exchange: with start "exchange": the share of the first stage's steps after which RoPE is
            gone.
        directions: where w starts: "random", or "keys".
        direction_rank: of w's projection; None for a full one, advised with few key heads.
        attention, logits, pretraining: the stages, in this order.
        lora: of stages with trainable "lora".
        data: corpora, each "FOLDER=WEIGHT" (whole numbers are ratios; shares must sum to 1), made
            with the teacher's tokenizer.
        stage_data: corpora of the first two stages, where they are others.
        report: what the report measures (`ReportRecipe`).
        precision, parallel, activation_checkpointing, compile, device, seed, guard, checkpoint,
            log: as in `Recipe`.
        workers: threads that make rows.
        check_memory: refuse a stage whose estimate (`memory`) is beyond the device; without, it is
            told alone.
    """

    to: Target = "path_fox"
    start: StartRule = "near_zero"
    exchange: float = 0.5
    directions: Directions = "random"
    direction_rank: int | None = 32
    attention: StageRecipe = field(default_factory=_attention_stage)
    logits: StageRecipe = field(default_factory=_logits_stage)
    pretraining: StageRecipe = field(default_factory=_pretraining_stage)
    lora: LoraRecipe = field(default_factory=LoraRecipe)
    data: tuple[str, ...] = ()
    stage_data: tuple[str, ...] = ()
    report: ReportRecipe = field(default_factory=ReportRecipe)
    precision: Precision = "auto"
    parallel: Parallel = "auto"
    activation_checkpointing: bool = False
    compile: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    workers: int = 2
    check_memory: bool = True
    guard: GuardRecipe = field(default_factory=lambda: GuardRecipe(action="skip"))
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    log: LogRecipe = field(default_factory=LogRecipe)

    def __post_init__(self) -> None:
        check_choices(self)
        for specifications in (self.data, self.stage_data):
            if specifications:
                whole_weights([weight for _, weight in map(parse_part, specifications)])
        if self.to == "rope" and (self.attention.tokens or self.logits.tokens):
            raise ValueError(
                "to: expected another encoding to distil into, got 'rope'; leave out the first two "
                "stages (tokens 0) to train the teacher on"
            )
        if self.attention.tokens and self.attention.trainable not in ("attention", "encoding"):
            raise ValueError(
                "attention.trainable: expected 'attention' or 'encoding', got "
                f"{self.attention.trainable!r}"
            )
        if self.start == "exchange" and (self.to not in _EXCHANGED or not self.stages()):
            raise ValueError(
                f"start: expected 'exchange' with one of {list(_EXCHANGED)} and a stage that "
                f"trains, got it with {self.to!r} and {len(self.stages())} stages"
            )

    def stages(self) -> list[tuple[str, StageRecipe]]:
        """The stages with a budget, by name, in their order."""
        named = {
            "attention": self.attention,
            "logits": self.logits,
            "pretraining": self.pretraining,
        }
        return [(name, stage) for name, stage in named.items() if stage.tokens]

    def corpora(self, stage: str) -> tuple[str, ...]:
        """What a stage is trained on. Raises ValueError if that is nothing."""
        chosen = self.data if stage == "pretraining" or not self.stage_data else self.stage_data
        if not chosen:
            raise ValueError(f"data: expected corpora for stage {stage!r}, got none")
        return chosen

    def choices(self, stage: str) -> Choices:
        """What a stage's objective trains."""
        first = self.stages()[0][0] == stage and self.start == "exchange"
        recipe: StageRecipe = getattr(self, stage)
        exchange = self.exchange if first else None
        return Choices(trainable=recipe.trainable, lora=self.lora, exchange=exchange)


def _scaled(attention: int, logits: int, pretraining: int, **fields: object) -> ConversionRecipe:
    recipe = ConversionRecipe()
    stages = {
        name: dataclasses.replace(getattr(recipe, name), tokens=tokens, **extra)
        for name, tokens, extra in (
            ("attention", attention, {}),
            ("logits", logits, {"batch_tokens": 1 << 17}),
            ("pretraining", pretraining, {"batch_tokens": 1 << 18}),
        )
    }
    return dataclasses.replace(recipe, **stages, **fields)  # pyright: ignore


def budget(name: str) -> ConversionRecipe:
    """A recipe by its budget: "published", "small", "lora" or "none" (weights and start alone).

    Raises ValueError on another name.
    """
    if name == "published":
        return ConversionRecipe()
    if name == "small":  # an hour of one large GPU for 135M parameters
        return _scaled(20_000_000, 100_000_000, 0)
    if name == "lora":  # small, and no state of AdamW for most of the model
        recipe = _scaled(20_000_000, 40_000_000, 0)
        return dataclasses.replace(
            recipe, logits=dataclasses.replace(recipe.logits, trainable="lora")
        )
    if name == "none":
        return _scaled(0, 0, 0, report=NO_SCORES)
    raise ValueError(f"budget: expected one of {list(BUDGETS)}, got {name!r}")


BUDGETS = ("published", "small", "lora", "none")
