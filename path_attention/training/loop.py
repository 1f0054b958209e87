"""The training loop: one process on a CPU, or many under `torchrun`, by the same path."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from path_attention.models import PathAttentionConfig
from path_attention.nn.attention import check_can_split
from path_attention.ops.context_split import ContextSplit
from path_attention.training.checkpoint import Checkpoints
from path_attention.training.corpus import TokenCorpus, build, summary
from path_attention.training.export import MODEL_CONFIG, export_model, write_card
from path_attention.training.flops import peak_flops
from path_attention.training.guard import Guard
from path_attention.training.lock import lock_if_free
from path_attention.training.log import RunLog, read_log
from path_attention.training.mixture import CorpusMixture, pack_rows
from path_attention.training.model import build_model, start_config, start_digest
from path_attention.training.objective import Objective
from path_attention.training.processes import (
    Processes,
    choose_precision,
    share_context,
    start_processes,
    synchronise_gradients,
)
from path_attention.training.progress import say
from path_attention.training.recipe import DataRecipe, OptimizerRecipe, Recipe
from path_attention.training.rows import Row, Rows, RowsAhead
from path_attention.training.signals import stop_signals

Resume = Literal["auto", "never", "must"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: the steps taken in all.
        signal: what told it to stop, in its last step too, when there was nothing left to stop.
    """

    step: int
    signal: signal.Signals | None = None


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: Resume = "auto",
    objective: Objective | None = None,
) -> Outcome:
    """Train, or go on training, in folder `out`.

    The folder gets recipe.json, model_config.json, log.jsonl, tensorboard/, checkpoints/ and, when
    the last step is taken, model/ (for `from_pretrained`), card.json and README.md. SIGINT or
    SIGTERM saves a checkpoint after the step at hand and returns; a second one ends the process at
    once.

    Args:
        recipe: what to do.
        out: the run's folder.
        resume: "auto" goes on from the latest checkpoint if there is one, "must" demands one,
            "never" demands that there is none.
        objective: what to minimise; None for next-token cross-entropy on all parameters.

    Raises:
        ValueError: a contradiction in the recipe or with what `out` holds; another run in `out`;
            no usable corpus.
        OSError: the disk is full or can't be read; checkpoints already written are kept.
        FloatingPointError: a bad step (`GuardRecipe`); names it and its documents.
    """
    out = Path(out)
    with ExitStack() as held, start_processes(recipe.device) as processes:
        recipe.passes(processes.count)
        processes = share_context(processes, recipe.context_parallel)
        with processes.first_does():
            _check_resume(out, resume)
            corpus = open_corpus(recipe.data, recipe.log.progress and processes.first)
            if processes.first and not held.enter_context(lock_if_free(out / "train.lock", 5.0)):
                raise ValueError(f"out: expected a folder in which no run trains, {out} has one")
        return _Run(recipe, out, corpus, processes, objective).go()


def open_corpus(data: DataRecipe, progress: bool = True) -> TokenCorpus | CorpusMixture:
    """The corpus of a recipe, built if it is not there yet; or its mixture."""
    if data.mixture:
        return CorpusMixture.open(data.mixture)
    if data.corpus is None:
        return build(data.build, progress=progress)
    if not (data.corpus / "corpus.json").exists():
        return build(data.build, data.corpus, progress=progress)
    corpus = TokenCorpus.open(data.corpus)
    if progress:
        say(f"{summary(corpus.info)} (found in {data.corpus})")
    return corpus


def model_config(recipe: Recipe, corpus: TokenCorpus | CorpusMixture) -> PathAttentionConfig:
    """The configuration of a recipe's model: that of its start, or one made from the recipe, with
    the corpus's vocabulary and special tokens.

    Raises:
        ValueError: a bad size or name; a vocabulary smaller than the tokenizer's.
    """
    if recipe.model.start is not None:
        config = start_config(recipe.model)
    else:
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
        self,
        recipe: Recipe,
        out: Path,
        corpus: TokenCorpus | CorpusMixture,
        processes: Processes,
        objective: Objective | None = None,
    ) -> None:
        self.recipe = recipe
        self.objective = objective = objective or Objective()
        self.out = out
        self.corpus = corpus
        self.processes = processes
        self.dtype = choose_precision(recipe.precision, processes.device)
        self.passes = recipe.passes(processes.count)
        self.rows = pack_rows(
            corpus,
            "train",
            context_length=recipe.data.context_length,
            row_tokens=recipe.row_tokens,
            seed=recipe.seed,
        )
        self.heldout = self._heldout_rows()
        self.ahead = RowsAhead(self.rows, recipe.data.workers)
        self.config = model_config(recipe, corpus)
        if processes.context > 1:
            _check_split(self.config, objective, self.heldout, processes.context)
        self.model, self.flops, self.parameters = build_model(
            recipe, self.config, self.dtype, processes, objective
        )
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self.guard = Guard(recipe.guard)
        course = {
            **recipe.course(),
            "precision": str(self.dtype).removeprefix("torch."),
            "corpus": corpus.fingerprint,
            **objective.course(),
        }
        if recipe.model.start is not None:
            course["model.start"] = start_digest(recipe.model.start)
        self.checkpoints = Checkpoints(
            out / "checkpoints",
            keep=recipe.checkpoint.keep,
            course=course,
            processes=processes,
            asynchronous=recipe.checkpoint.asynchronous,
        )

    def go(self) -> Outcome:
        """Take the steps that are left; export the model after the last."""
        recipe = self.recipe
        start, guard = self.checkpoints.load_latest(self.model, self.optimizer)
        if guard is not None:
            self.guard.load(guard)
        self._announce(start)
        if start == recipe.steps and (self.out / "card.json").exists():
            return Outcome(start)
        peak = recipe.log.peak_flops or peak_flops(self.processes.device, self.dtype)
        log = RunLog(
            self.out,
            recipe.log,
            steps=recipe.steps,
            start=start,
            processes=self.processes,
            peak=peak,
        )
        with log, contextlib.closing(self.ahead), stop_signals() as stop:
            for step in range(start, recipe.steps):
                asked = self._step(step, log, stop.received)
                self._after_step(step + 1, log, stopping=asked is not None)
                if asked is not None and step + 1 < recipe.steps:
                    return self._interrupted(step + 1, asked)
            (told,) = self.processes.sum(stop.received or 0)  # whoever goes on after this must not
        self._finish()
        return Outcome(
            recipe.steps, signal.Signals(stop.received or signal.SIGTERM) if told else None
        )

    def _step(self, step: int, log: RunLog, stop: int | None) -> int | None:
        """One optimizer step. Returns the signal that any process received, or None."""
        recipe, processes = self.recipe, self.processes
        begun = time.perf_counter()
        rows = self.ahead.get(self._numbers(step), self._numbers(step + 1))
        log.part("data", time.perf_counter() - begun)
        begun = time.perf_counter()
        work = sum(self.flops.of(row.packing.lengths) for row in rows)
        targets, work = processes.sum(sum(row.targets for row in rows), work)
        targets, work = targets / processes.context, work / processes.context  # each row's once
        _reseed(recipe.seed, step, processes.rank)
        self.objective.begin_step(step, recipe.steps)
        losses = []
        for n, row in enumerate(rows):
            synchronise_gradients(self.model, n == self.passes - 1)
            # gradients are averaged over processes, so each divides by its share of the targets;
            # those that share a row add up, and so do their losses
            loss = self._loss(row, targets / processes.count)
            loss.backward()
            losses.append(loss.detach())
        summed, highest, written = processes.sum(
            torch.stack(losses).sum(), stop or 0, self.checkpoints.written
        )
        loss = summed / processes.count
        log.part("compute", time.perf_counter() - begun)
        begun = time.perf_counter()
        norm = self._clip()
        rate = recipe.rate(step)
        fault = self.guard.fault(loss, norm)
        if fault is None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        else:
            self._bad(step, fault, losses, log)
        self.optimizer.zero_grad(set_to_none=True)
        log.part("update", time.perf_counter() - begun)
        if fault is None:
            log.step(
                step + 1,
                loss=loss,
                gradient_norm=norm,
                learning_rate=rate,
                tokens=recipe.batch_tokens,
                flops=work,
            )
        if written == processes.count:
            self.checkpoints.finish()
        if not highest:
            return None
        return stop or signal.SIGTERM  # another process's signal ends this one's run too

    def _numbers(self, step: int) -> list[int]:
        """The rows that are this process's in a step."""
        count = self.processes.data_count
        first = step * self.passes * count + self.processes.data_rank
        return [first + n * count for n in range(self.passes)]

    def _loss(self, row: Row, divisor: float) -> torch.Tensor:
        """The row's loss (cross-entropy in nats), summed over its targets, by `divisor`.

        Of this process's tokens, if others share the row.
        """
        device, group = self.processes.device, self.processes.context_group
        if group is not None:
            packing = row.packing if len(row.packing.lengths) > 1 else None
            split = ContextSplit.of(row.input_ids.shape[1], group, packing)
            row = dataclasses.replace(row, split=split)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.objective.loss(self.model, row, divisor, device)

    def _clip(self) -> float:
        clip = self.recipe.optimizer.clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if clip is None else clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _after_step(self, done: int, log: RunLog, *, stopping: bool) -> None:
        recipe = self.recipe
        last = done == recipe.steps
        every = recipe.log.heldout_every
        if self.heldout is not None and (last or (every is not None and done % every == 0)):
            with log.pause():
                log.heldout(done, self.heldout_loss())
        if last or stopping or done % recipe.checkpoint.every == 0:
            with log.pause():
                self.checkpoints.save(done, self.model, self.optimizer, self.guard.state())
                if last or stopping:
                    self.checkpoints.finish()

    def _heldout_rows(self) -> Rows | None:
        tokens = self.corpus.info["heldout_tokens"]
        if not tokens:
            return None
        return pack_rows(
            self.corpus,
            "heldout",
            context_length=self.recipe.data.context_length,
            row_tokens=min(self.recipe.row_tokens, tokens),
            seed=self.corpus.info["recipe"]["seed"],
        )

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Mean loss (cross-entropy in nats) a token over the same held-out tokens each time."""
        heldout, processes = self.heldout, self.processes
        assert heldout is not None
        tokens = min(self.recipe.log.heldout_tokens, heldout.epoch_tokens)
        count = max(tokens // heldout.row_tokens, 1)
        self.model.eval()
        total, targets = torch.zeros((), device=processes.device), 0
        for first in range(0, count, processes.data_count):  # all take part in each pass
            number = first + processes.data_rank
            row = heldout.row(min(number, count - 1))
            loss = self._loss(row, 1.0)
            if number < count:
                total += loss
                targets += row.targets
        self.model.train()
        total, targets = processes.sum(total, targets)
        return total / (targets / processes.context)

    def _bad(self, step: int, fault: str, losses: list[torch.Tensor], log: RunLog) -> None:
        """Say which step is not taken, why, and on which documents; stop if the rule says so.

        Raises FloatingPointError, on every process.
        """
        numbers = self._suspects(step, losses)
        names = [self.corpus.names[number] for number in numbers[:3]]
        said = (
            f"{fault} at step {step + 1}, on {len(numbers)} documents such as {names}; "
            "the step was not taken"
        )
        if not self.guard.stops:
            log.event(step + 1, f"skipped: {said}", documents=numbers)
            return
        self.checkpoints.finish()
        in_a_row = f" ({self.guard.bad} bad steps in a row)" if self.guard.bad > 1 else ""
        raise FloatingPointError(
            f"{said}{in_a_row} (checkpoints: steps {self.checkpoints.steps()}). Lower "
            "optimizer.learning_rate, lengthen the schedule's warm-up or look at the documents"
        )

    def _suspects(self, step: int, losses: list[torch.Tensor]) -> list[int]:
        """The documents of the rows, of any process, whose loss is not finite.

        If all are finite: those of the row of highest mean loss, where it stands out from the
        others by half; else all of the step's.
        """
        count, rank = self.processes.data_count, self.processes.data_rank
        rows = [self.rows.row(step * self.passes * count + n) for n in range(self.passes * count)]
        values = [0.0] * len(rows)
        for n, loss in enumerate(losses):
            value = loss.item()
            values[n * count + rank] = value if math.isfinite(value) else math.inf
        values = self.processes.sum(*values)
        means = [value / max(row.targets, 1) for value, row in zip(values, rows, strict=True)]
        found = [row for row, mean in zip(rows, means, strict=True) if not math.isfinite(mean)]
        if not found:
            others = sorted(means)[:-1]
            if others and max(means) > 1.5 * others[-1]:
                found = [rows[means.index(max(means))]]
        return sorted({number for row in found or rows for number in row.documents})

    def _announce(self, start: int) -> None:
        recipe = self.recipe
        if not self.processes.first:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "recipe.json").write_text(json.dumps(recipe.to_dict(), indent=1) + "\n")
        self.config.to_json_file(self.out / MODEL_CONFIG)
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
        export_model(
            self.model,
            self.config,
            self.corpus,
            self.out / "model",
            self.processes,
            self.objective,
        )
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


def _check_split(
    config: PathAttentionConfig, objective: Objective, heldout: Rows | None, context: int
) -> None:
    check_can_split(config)
    if heldout is not None and heldout.row_tokens < 2 * context:
        raise ValueError(
            f"context_parallel: expected at most half the {heldout.row_tokens} held-out tokens, "
            f"got {context}"
        )
    if not objective.can_split:
        raise ValueError(
            f"context_parallel: expected 1 with objective {type(objective).__name__}, whose loss "
            "takes whole rows"
        )


def _check_resume(out: Path, resume: Resume) -> None:
    if resume not in get_args(Resume):
        raise ValueError(f"resume: expected one of {list(get_args(Resume))}, got {resume!r}")
    present = any((out / "checkpoints").glob("step-*"))
    if resume == "must" and not present:
        raise ValueError(f'resume: expected a checkpoint with "must", {out} has none')
    if resume == "never" and (present or (out / "model").exists()):
        raise ValueError(f'resume: expected a new folder with "never", {out} holds a run')


def _reseed(seed: int, step: int, rank: int) -> None:
    """Randomness is a function of (seed, step, rank): a resume has no state to restore."""
    mixed = (seed * 1_000_003 + step) * 1_000_003 + rank
    torch.manual_seed(mixed % (1 << 63))
