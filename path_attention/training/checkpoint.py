"""Checkpoints of a run: sharded, atomic, verified by hash before they are trusted.

    checkpoints/step-00000500/   __R_0.distcp of each process R, .metadata, manifest.json

Model and optimizer are saved by `torch.distributed.checkpoint`, so they load under any number of
processes. Randomness is a function of (seed, step, rank), so the step number in the manifest is all
the state that it and the data have; what the loss guard looks back at is in the manifest too.

Asynchronous saving copies the state and writes it in a thread, over a process group of its own. The
checkpoint appears under its name when every process has written its part and says so (`written`,
then `finish`, together on all processes).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from path_attention.training.processes import Processes
from path_attention.training.progress import say

MANIFEST = "manifest.json"
_NAME = "step-{:08d}"
# One process alone is no accident here; said by a thread of torch's, so not to be caught around it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


@dataclass(frozen=True)
class _Pending:
    """A checkpoint whose files are written or being written, and which has no name yet."""

    step: int
    folder: Path
    guard: dict[str, Any] | None
    writing: Future[Any] | None  # None: written


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are.
        keep: how many of the latest to keep.
        course: `Recipe.course()` and what else the numbers hang on; a resume must have the same.
        processes: of the run.
        asynchronous: whether `save` returns before all is written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        course: dict[str, Any],
        processes: Processes,
        asynchronous: bool = False,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.course = json.loads(json.dumps(course))
        self.processes = processes
        self.asynchronous = asynchronous
        self._group = None
        if asynchronous and processes.count > 1:  # the default one is the training's
            self._group = dist.new_group(backend="gloo")
        self._pending: _Pending | None = None

    def steps(self) -> list[int]:
        """The steps that there is a checkpoint of, damaged or not, in order."""
        return sorted(int(path.name.split("-")[1]) for path in self.folder.glob("step-*"))

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        guard: dict[str, Any] | None = None,
    ) -> None:
        """Save the state after `step` steps. It appears under its name when it is complete.

        An asynchronous one that is still being written is finished first.

        Raises:
            OSError: it can't be written; the checkpoints before it are left as they are.
        """
        self.finish()
        partial = self.folder / f".{_NAME.format(step)}.partial"
        if self.processes.first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.processes.wait()
        alone = self.processes.count == 1
        with self._failing(step, partial), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            states = _states(model, optimizer)
            writing = None
            if self.asynchronous:
                options: dict[str, Any] = {"process_group": self._group, "no_dist": alone}
                writing = cast("Future[Any]", async_save(states, checkpoint_id=partial, **options))
            else:
                save(states, checkpoint_id=partial, no_dist=alone)
        self._pending = _Pending(step, partial, guard, writing)
        if not self.asynchronous:
            self.finish()

    @property
    def written(self) -> bool:
        """Whether this process has written its part of a checkpoint that waits for `finish`."""
        pending = self._pending
        return pending is not None and (pending.writing is None or pending.writing.done())

    def finish(self) -> None:
        """Make the checkpoint that is being written complete, if there is one; waits for it.

        Raises:
            OSError: it can't be written; the checkpoints before it are left as they are.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._failing(pending.step, pending.folder):
            if pending.writing is not None:
                pending.writing.result()
            files = self._digests(pending.folder)
            if self.processes.first:
                self._finish(pending, files)
        self.processes.wait()

    @contextmanager
    def _failing(self, step: int, partial: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:
            if self.processes.first:
                shutil.rmtree(partial, ignore_errors=True)
            raise OSError(
                f"the checkpoint of step {step} can't be written to {self.folder}: "
                f"{_reason(error)}; kept: the checkpoints of steps {self.steps()}"
            ) from error

    def load_latest(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[int, dict[str, Any] | None]:
        """Load the latest undamaged checkpoint in place.

        Returns its step, 0 if there is none, and the guard's state that it was saved with.

        A damaged one is set aside under the name damaged-step-…, and said so.

        Raises:
            ValueError: it was made with another recipe or corpus; or every checkpoint is damaged.
        """
        steps = self.steps()
        self.processes.wait()
        for step in reversed(steps):
            path = self.folder / _NAME.format(step)
            problem = self._problem(path)
            if problem is None:
                self._check_course(path)
                states = _states(model, optimizer)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    load(states, checkpoint_id=path, no_dist=self.processes.count == 1)
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=states["model"],
                    optim_state_dict=states["optimizer"],
                )
                return step, json.loads((path / MANIFEST).read_text()).get("guard")
            if self.processes.first:
                aside = path.with_name(f"damaged-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(path, aside)
                say(
                    f"checkpoint {path} is damaged ({problem}); set aside as {aside.name}, "
                    "falling back to the one before"
                )
        if steps:
            raise ValueError(f"resume: every checkpoint in {self.folder} is damaged, none is left")
        return 0, None

    def _digests(self, partial: Path) -> dict[str, list[Any]]:
        """[size, SHA-256] of every file, each process reading its own; for the first process."""
        names = [f"__{self.processes.rank}_*"] + [".metadata"] * self.processes.first
        own = {path.name: _digest(path) for name in names for path in sorted(partial.glob(name))}
        if self.processes.count == 1:
            return own
        gathered: list[Any] = [None] * self.processes.count
        dist.all_gather_object(gathered, own)
        return {name: digest for files in gathered for name, digest in files.items()}

    def _finish(self, pending: _Pending, files: dict[str, list[Any]]) -> None:
        step, partial = pending.step, pending.folder
        manifest = {"step": step, "course": self.course, "guard": pending.guard, "files": files}
        with open(partial / MANIFEST, "w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        final = self.folder / _NAME.format(step)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / _NAME.format(old))

    def _problem(self, path: Path) -> str | None:
        """`find_damage` by all processes together."""
        found = find_damage(path, self.processes.rank, self.processes.count)
        if self.processes.count == 1:
            return found
        gathered: list[str | None] = [None] * self.processes.count
        dist.all_gather_object(gathered, found)
        return next((problem for problem in gathered if problem is not None), None)

    def _check_course(self, path: Path) -> None:
        before = json.loads((path / MANIFEST).read_text())["course"]
        changed = [
            f"{name} was {before.get(name)!r}, is {self.course.get(name)!r}"
            for name in sorted({*before, *self.course})
            if before.get(name) != self.course.get(name)
        ]
        if changed:
            raise ValueError(
                f"resume: {path} was made with another recipe: {'; '.join(changed)}. Go back to "
                "it, or choose another folder"
            )


def find_damage(path: Path, first: int = 0, stride: int = 1) -> str | None:
    """What is wrong with a checkpoint's files, every `stride`-th of them from `first` on; None if
    nothing is."""
    found = None
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        for name in sorted(files)[first::stride]:
            if _digest(path / name) != files[name]:
                size = (path / name).stat().st_size
                found = f"{name} is not what was written ({size} bytes, then {files[name][0]})"
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
    return found


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if not optimizer.state:
        get_state_dict(model, optimizer)  # which makes one by a step at rate 0, and counts that
        for state in optimizer.state.values():
            state["step"].zero_()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _digest(path: Path) -> list[Any]:
    with open(path, "rb") as file:
        total = hashlib.sha256()
        while block := file.read(1 << 22):
            total.update(block)
        return [file.tell(), total.hexdigest()]


def _reason(error: BaseException) -> str:
    """The innermost message: torch wraps each process's error."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (str(error).splitlines() or [type(error).__name__])[0]
