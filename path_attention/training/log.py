"""What a run writes down as it goes: log.jsonl, TensorBoard's files, the terminal."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rich.progress import TextColumn

from path_attention.training.processes import Processes
from path_attention.training.progress import console, progress_bar, say
from path_attention.training.recipe import LogRecipe


class RunLog:
    """A context manager; writes in the first process only.

    log.jsonl has one object a line: `{"step", "loss", "gradient_norm", "learning_rate", "tokens",
    "tokens_per_second", "seconds"}` every `recipe.every` steps, `{"step", "heldout_loss"}`, and
    `{"step", "event"}`. Steps count from 1: a line tells of the state after that step. Lines past
    the step that a run resumes from are dropped, since those steps are taken again.

    Args:
        folder: of the run.
        recipe: what to write.
        steps: the run's last step.
        start: the step that it starts after.
        processes: of the run.
    """

    def __init__(
        self, folder: Path, recipe: LogRecipe, *, steps: int, start: int, processes: Processes
    ) -> None:
        self.recipe = recipe
        self.first = processes.first
        self.steps = steps
        self._since = (time.perf_counter(), 0)  # when the last line was, tokens since
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

    def step(
        self, step: int, *, loss: float, gradient_norm: float, learning_rate: float, tokens: int
    ) -> None:
        """After a step of `tokens` tokens. Every `every` steps, and at the last, it is written."""
        now = time.perf_counter()
        before, count = self._since
        count += tokens
        self._since = (before, count)
        if not self.first:
            return
        speed = count / (now - before)
        status = f"loss {loss:.4f}  {speed:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, status=status)
        if step % self.recipe.every and step != self.steps:
            return
        self._since = (now, 0)
        self._write(
            {
                "step": step,
                "loss": loss,
                "gradient_norm": gradient_norm,
                "learning_rate": learning_rate,
                "tokens": step * tokens,
                "tokens_per_second": round(speed, 1),
                "seconds": round(now - before, 4),
            }
        )
        if self.recipe.progress and not console.is_terminal:
            say(f"step {step}/{self.steps}  {status}")

    def heldout(self, step: int, loss: float) -> None:
        """A held-out loss after `step` steps."""
        if self.first:
            self._write({"step": step, "heldout_loss": loss})
            if self.recipe.progress:
                say(f"step {step}  held-out loss {loss:.4f}")

    def pause(self) -> None:
        """Leave the time since the last line out of the speed (held-out losses, checkpoints)."""
        self._since = (time.perf_counter(), 0)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in line.items():
                if name not in ("step", "event"):
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
