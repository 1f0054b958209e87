"""What a run writes down as it goes: log.jsonl, TensorBoard's files, the terminal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import TextColumn

from path_attention.training.processes import Processes
from path_attention.training.progress import console, progress_bar, say
from path_attention.training.recipe import LogRecipe


class RunLog:
    """A context manager; writes in the first process only.

    log.jsonl has one object a line: `{"step", "loss", "gradient_norm", "learning_rate", "tokens",
    "tokens_per_second", "seconds", …}` every `recipe.every` steps, `{"step", "heldout_loss"}`, and
    `{"step", "event", …}`. Steps count from 1: a line tells of the state after that step. Lines
    past the step that a run resumes from are dropped, since those steps are taken again.

    A step's line also has what its time went to, summed over the steps since the line before, of
    the first process: `seconds_data` (waiting for rows), `seconds_compute` (forward and backward,
    until the loss is known) and `seconds_update` (clipping and optimizer; on CUDA its kernels
    finish during the next step's compute). Where the device's peak is known, `mfu`: the model FLOPs
    (`flops.ModelFlops`) over seconds · processes · peak. On CUDA `peak_memory_gb`: the most memory
    allocated since the line before, by the first process, in 10⁹ bytes.

    Args:
        folder: of the run.
        recipe: what to write.
        steps: the run's last step.
        start: the step that it starts after.
        processes: of the run.
        peak: FLOPs a second of one process's device; None for no utilisation.
    """

    def __init__(
        self,
        folder: Path,
        recipe: LogRecipe,
        *,
        steps: int,
        start: int,
        processes: Processes,
        peak: float | None = None,
    ) -> None:
        self.recipe = recipe
        self.first = processes.first
        self.steps = steps
        self.peak = None if peak is None else peak * processes.count
        self.cuda = processes.device.type == "cuda"
        self._paused = 0.0  # since the last line
        self._begin()
        if not self.first:
            return
        path = folder / "log.jsonl"
        _drop_after(path, start)
        self._file = open(path, "a")  # noqa: SIM115
        self._board = None
        if recipe.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
        self._bar = progress_bar(TextColumn("{task.fields[status]}"), enabled=recipe.progress)
        self._task = self._bar.add_task("train", total=steps, completed=start, status="")
        if start:
            self._write({"step": start, "event": "resumed"})

    def __enter__(self) -> RunLog:
        if self.first:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.first:
            self._bar.stop()
            self._file.close()
            if self._board is not None:
                self._board.close()

    def part(self, name: str, seconds: float) -> None:
        """A part of a step's time."""
        self._parts[name] = self._parts.get(name, 0.0) + seconds

    def step(
        self,
        step: int,
        *,
        loss: float,
        gradient_norm: float,
        learning_rate: float,
        tokens: int,
        flops: float = 0.0,
    ) -> None:
        """After a step of `tokens` tokens. Every `every` steps, and at the last, it is written."""
        self._tokens += tokens
        self._flops += flops
        if not self.first:
            return
        seconds = time.perf_counter() - self._start - self._paused
        speed = self._tokens / seconds
        utilisation = None if self.peak is None else self._flops / (seconds * self.peak)
        status = f"loss {loss:.4f}  {speed:,.0f} tokens/s"
        if utilisation is not None:
            status += f"  MFU {utilisation:.1%}"
        self._bar.update(self._task, completed=step, status=status)
        if step % self.recipe.every and step != self.steps:
            return
        line: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "gradient_norm": gradient_norm,
            "learning_rate": learning_rate,
            "tokens": step * tokens,
            "tokens_per_second": round(speed, 1),
            "seconds": round(seconds, 4),
        }
        line |= {f"seconds_{name}": round(value, 4) for name, value in self._parts.items()}
        if utilisation is not None:
            line["mfu"] = round(utilisation, 4)
        if self.cuda:
            line["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
            torch.cuda.reset_peak_memory_stats()
        self._begin()
        self._write(line)
        if self.recipe.progress and not console.is_terminal:
            say(f"step {step}/{self.steps}  {status}")

    def _begin(self) -> None:
        self._start, self._paused, self._tokens, self._flops = time.perf_counter(), 0.0, 0, 0.0
        self._parts: dict[str, float] = {}

    def event(self, step: int, event: str, **more: Any) -> None:
        """Something that happened at a step, in the log and on the terminal."""
        if self.first:
            self._write({"step": step, "event": event, **more})
            say(f"step {step}  {event}")

    def heldout(self, step: int, loss: float) -> None:
        """A held-out loss after `step` steps."""
        if self.first:
            self._write({"step": step, "heldout_loss": loss})
            if self.recipe.progress:
                say(f"step {step}  held-out loss {loss:.4f}")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The time of what is done inside is no part of a step's (held-out losses, checkpoints)."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in line.items():
                if name != "step" and isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, line["step"])


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log.jsonl; a last line that was cut short is left out."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _drop_after(path: Path, step: int) -> None:
    kept = [line for line in read_log(path) if line["step"] <= step]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(partial, path)
