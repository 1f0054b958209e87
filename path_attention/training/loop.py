"""The training loop: one process on a CPU, or many under `torchrun`, by the same path."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.training.checkpoint import Checkpoints
from path_attention.training.corpus import TokenCorpus, build, summary
from path_attention.training.export import export_model, write_card
from path_attention.training.log import RunLog, read_log
from path_attention.training.processes import (
    Processes,
    choose_precision,
    spread,
    start_processes,
    synchronise_gradients,
)
from path_attention.training.progress import say
from path_attention.training.recipe import DataRecipe, OptimizerRecipe, Recipe
from path_attention.training.rows import PackedRows, Row

Resume = Literal["auto", "never", "must"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: the steps taken in all.
        signal: what stopped it early; None if it finished.
    """

    step: int
    signal: signal.Signals | None = None


def train(recipe: Recipe, out: str | Path, *, resume: Resume = "auto") -> Outcome:
    """Train, or go on training, in folder `out`.

    The folder gets recipe.json, log.jsonl, tensorboard/, checkpoints/ and, when the last step is
    taken, model/ (for `from_pretrained`), card.json and README.md. SIGINT or SIGTERM saves a
    checkpoint after the step at hand and returns; a second one ends the process at once.

    Args:
        recipe: what to do.
        out: the run's folder.
        resume: "auto" goes on from the latest checkpoint if there is one, "must" demands one,
            "never" demands that there is none.

    Raises:
        ValueError: a contradiction in the recipe or with what `out` holds; no usable corpus.
        OSError: the disk is full or can't be read; checkpoints already written are kept.
        FloatingPointError: the loss or gradient is not finite; names the step.
    """
    out = Path(out)
    with start_processes(recipe.device) as processes:
        recipe.passes(processes.count)
        with processes.first_does():
            _check_resume(out, resume)
            corpus = open_corpus(recipe.data, recipe.log.progress and processes.first)
        return _Run(recipe, out, corpus, processes).go()


def open_corpus(data: DataRecipe, progress: bool = True) -> TokenCorpus:
    """The corpus of a recipe, built if it is not there yet."""
    if data.corpus is None:
        return build(data.build, progress=progress)
    if not (data.corpus / "corpus.json").exists():
        return build(data.build, data.corpus, progress=progress)
    corpus = TokenCorpus.open(data.corpus)
    if progress:
        say(f"{summary(corpus.info)} (found in {data.corpus})")
    return corpus


def model_config(recipe: Recipe, corpus: TokenCorpus) -> PathAttentionConfig:
    """The configuration of a recipe's model, vocabulary and special tokens those of the corpus.

    Raises:
        ValueError: a bad size or name; a vocabulary smaller than the tokenizer's.
    """
    tokenizer = corpus.tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": corpus.vocab_size,
        "max_position_embeddings": recipe.data.context_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = PathAttentionConfig.from_preset(
        recipe.model.preset, **{**fields, **recipe.model.overrides()}
    )
    if config.vocab_size < corpus.vocab_size:
        raise ValueError(
            f"model.options: expected a vocab_size of at least the tokenizer's "
            f"{corpus.vocab_size}, got {config.vocab_size}"
        )
    return config


def build_optimizer(model: nn.Module, recipe: OptimizerRecipe) -> torch.optim.AdamW:
    """AdamW whose weight decay leaves out norms, biases and gains."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=recipe.learning_rate,
        betas=recipe.betas,
        eps=recipe.eps,
        fused=True,
    )


class _Run:
    """One run: everything that stays the same from step to step."""

    def __init__(
        self, recipe: Recipe, out: Path, corpus: TokenCorpus, processes: Processes
    ) -> None:
        self.recipe = recipe
        self.out = out
        self.corpus = corpus
        self.processes = processes
        self.dtype = choose_precision(recipe.precision, processes.device)
        self.passes = recipe.passes(processes.count)
        self.rows = PackedRows(
            corpus,
            "train",
            context_length=recipe.data.context_length,
            row_tokens=recipe.row_tokens,
            seed=recipe.seed,
        )
        self.heldout = self._heldout_rows()
        self.config = model_config(recipe, corpus)
        torch.manual_seed(recipe.seed)
        model = cast(nn.Module, PathAttentionForCausalLM(self.config))
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model = spread(model.to(processes.device), recipe.parallel, processes)
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        course = {
            **recipe.course(),
            "precision": str(self.dtype).removeprefix("torch."),
            "corpus": corpus.fingerprint,
        }
        self.checkpoints = Checkpoints(
            out / "checkpoints",
            keep=recipe.checkpoint.keep,
            course=course,
            processes=processes,
        )

    def go(self) -> Outcome:
        """Take the steps that are left; export the model after the last."""
        recipe = self.recipe
        start = self.checkpoints.load_latest(self.model, self.optimizer)
        self._announce(start)
        if start == recipe.steps and (self.out / "card.json").exists():
            return Outcome(start)
        log = RunLog(
            self.out, recipe.log, steps=recipe.steps, start=start, processes=self.processes
        )
        with log, _stop_signals() as stop:
            for step in range(start, recipe.steps):
                asked = self._step(step, log, stop.received)
                self._after_step(step + 1, log, stopping=asked is not None)
                if asked is not None and step + 1 < recipe.steps:
                    return self._interrupted(step + 1, asked)
        self._finish()
        return Outcome(recipe.steps)

    def _step(self, step: int, log: RunLog, stop: int | None) -> int | None:
        """One optimizer step. Returns the signal that any process received, or None."""
        recipe, processes = self.recipe, self.processes
        first = step * self.passes * processes.count + processes.rank
        rows = [self.rows.row(first + n * processes.count) for n in range(self.passes)]
        (targets,) = processes.sum(sum(row.targets for row in rows))
        _reseed(recipe.seed, step, processes.rank)
        total = torch.zeros((), device=processes.device)
        for n, row in enumerate(rows):
            synchronise_gradients(self.model, n == self.passes - 1)
            # gradients are averaged over processes, so each divides by its share of the targets
            loss = self._loss(row, targets / processes.count)
            loss.backward()
            total += loss.detach()
        summed, highest = processes.sum(total, stop or 0)
        loss = summed / processes.count
        if not math.isfinite(loss):
            self._not_finite("loss", loss, step, rows)
        norm = self._clip()
        if not math.isfinite(norm):
            self._not_finite("gradient's norm", norm, step, rows)
        rate = recipe.optimizer.learning_rate * recipe.schedule.share(step, recipe.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        log.step(
            step + 1,
            loss=loss,
            gradient_norm=norm,
            learning_rate=rate,
            tokens=recipe.batch_tokens,
        )
        if not highest:
            return None
        return stop or signal.SIGTERM  # another process's signal ends this one's run too

    def _loss(self, row: Row, divisor: float) -> torch.Tensor:
        """The row's cross-entropy in nats, summed over its targets, divided by `divisor`."""
        device = self.processes.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.model(
                input_ids=row.input_ids.to(device),
                labels=row.labels.to(device),
                packing=row.packing.to(device),
                num_items_in_batch=divisor,
                use_cache=False,
            ).loss

    def _clip(self) -> float:
        clip = self.recipe.optimizer.clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if clip is None else clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _after_step(self, done: int, log: RunLog, *, stopping: bool) -> None:
        recipe = self.recipe
        last = done == recipe.steps
        every = recipe.log.heldout_every
        if self.heldout is not None and (last or (every is not None and done % every == 0)):
            log.heldout(done, self.heldout_loss())
            log.pause()
        if last or stopping or done % recipe.checkpoint.every == 0:
            self.checkpoints.save(done, self.model, self.optimizer)
            log.pause()

    def _heldout_rows(self) -> PackedRows | None:
        tokens = self.corpus.info["heldout_tokens"]
        if not tokens:
            return None
        return PackedRows(
            self.corpus,
            "heldout",
            context_length=self.recipe.data.context_length,
            row_tokens=min(self.recipe.row_tokens, tokens),
            seed=self.corpus.info["recipe"]["seed"],
        )

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Mean cross-entropy in nats a token over the same held-out tokens each time."""
        heldout, processes = self.heldout, self.processes
        assert heldout is not None
        tokens = min(self.recipe.log.heldout_tokens, heldout.epoch_tokens)
        count = max(tokens // heldout.row_tokens, 1)
        self.model.eval()
        total, targets = torch.zeros((), device=processes.device), 0
        for first in range(0, count, processes.count):  # all processes take part in each pass
            number = first + processes.rank
            row = heldout.row(min(number, count - 1))
            loss = self._loss(row, 1.0)
            if number < count:
                total += loss
                targets += row.targets
        self.model.train()
        total, targets = processes.sum(total, targets)
        return total / targets

    def _not_finite(self, what: str, value: float, step: int, rows: list[Row]) -> None:
        numbers = sorted({number for row in rows for number in row.documents})
        names = [self.corpus.names[number] for number in numbers[:3]]
        raise FloatingPointError(
            f"the {what} is {value} at step {step + 1}, on {len(numbers)} documents such as "
            f"{names}; the step was not taken (checkpoints: steps {self.checkpoints.steps()}). "
            "Lower optimizer.learning_rate, lengthen schedule.warmup_steps or look at the documents"
        )

    def _announce(self, start: int) -> None:
        recipe = self.recipe
        if not self.processes.first:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "recipe.json").write_text(json.dumps(recipe.to_dict(), indent=1) + "\n")
        if recipe.log.progress:
            dtype = str(self.dtype).removeprefix("torch.")
            say(
                f"{recipe.name}: {self.parameters:,} parameters, {recipe.steps} steps of "
                f"{recipe.batch_tokens:,} tokens, {self.processes.count} × "
                f"{self.processes.device.type} in {dtype}"
                + (f"; resumed after step {start}" if start else "")
            )
            if self.heldout is None:
                say("the corpus holds no documents out: no held-out loss")

    def _interrupted(self, step: int, number: int) -> Outcome:
        if self.processes.first:
            say(
                f"stopped by {signal.Signals(number).name} after step {step}, saved; "
                "the same command goes on from here"
            )
        return Outcome(step, signal.Signals(number))

    def _finish(self) -> None:
        export_model(self.model, self.config, self.corpus, self.out / "model", self.processes)
        if self.processes.first:
            write_card(
                self.out,
                recipe=self.recipe,
                config=self.config,
                corpus=self.corpus,
                processes=self.processes,
                dtype=self.dtype,
                parameters=self.parameters,
                log=read_log(self.out / "log.jsonl"),
            )
            if self.recipe.log.progress:
                say(f"{self.recipe.name}: finished, {self.out / 'model'} holds the model")
        self.processes.wait()


def _check_resume(out: Path, resume: Resume) -> None:
    present = any((out / "checkpoints").glob("step-*"))
    if resume == "must" and not present:
        raise ValueError(f'resume: expected a checkpoint with "must", {out} has none')
    if resume == "never" and (present or (out / "model").exists()):
        raise ValueError(f'resume: expected a new folder with "never", {out} holds a run')


def _reseed(seed: int, step: int, rank: int) -> None:
    """Randomness is a function of (seed, step, rank): a resume has no state to restore."""
    mixed = (seed * 1_000_003 + step) * 1_000_003 + rank
    torch.manual_seed(mixed % (1 << 63))


class _Stop:
    """The first signal received, if any."""

    received: int | None = None


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Note SIGINT and SIGTERM instead of dying; after the first, they act as before again."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        stop.received = number
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()
