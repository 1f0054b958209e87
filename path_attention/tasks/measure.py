"""Errors of replicas on test sequences, counted on the device and read once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from path_attention.tasks.replicas import Replicas
from path_attention.tasks.task import Task, TestSet, held_out_generator

_DRAWN_AT_ONCE = 256  # sequences; fixed, since a GPU's random numbers hang on how many are drawn
_TOKENS_AT_ONCE = {"cpu": 2**16, "cuda": 2**20}  # of one forward pass


class Counts(NamedTuple):
    """Errors among what was counted, by level of difficulty."""

    test: str
    levels: tuple[str, ...]
    errors: list[int]
    counted: list[int]

    @property
    def share(self) -> float:
        """Errors over all levels."""
        return sum(self.errors) / max(sum(self.counted), 1)

    @property
    def hardest_share(self) -> float:
        """Errors on the highest level that something was counted on."""
        seen = [(e, n) for e, n in zip(self.errors, self.counted, strict=True) if n]
        return seen[-1][0] / seen[-1][1] if seen else 1.0

    def rows(self) -> list[dict[str, Any]]:
        """A flat row for each level that something was counted on."""
        levels = zip(self.levels, self.errors, self.counted, strict=True)
        return [
            {"test": self.test, "level": level, "errors": errors, "counted": counted}
            for level, errors, counted in levels
            if counted
        ]


@torch.no_grad()
def measure(
    replicas: Replicas, tests: tuple[TestSet, ...], dtype: torch.dtype | None
) -> list[list[Counts]]:
    """For each replica, its counts on each test; every replica reads the same sequences.

    dtype: of autocast; None for none.
    """
    found = [_measure_one(replicas, test, dtype) for test in tests]
    return [[of_test[r] for of_test in found] for r in range(replicas.count)]


def _measure_one(replicas: Replicas, test: TestSet, dtype: torch.dtype | None) -> list[Counts]:
    task: Task = test.task
    device, R, levels = replicas.flat.device, replicas.count, task.levels
    generator = held_out_generator(test.seed, device)
    at_once = _TOKENS_AT_ONCE.get(device.type, 2**16)
    rows = max(1, at_once // (R * task.length))
    totals = torch.zeros(2, R, len(levels), dtype=torch.int64, device=device)
    for start in range(0, test.sequences, _DRAWN_AT_ONCE):
        drawn = task.sample(generator, _DRAWN_AT_ONCE)
        left = min(_DRAWN_AT_ONCE, test.sequences - start)
        for first in range(0, left, rows):
            piece = (x[first : min(first + rows, left)].repeat(R, 1) for x in drawn)
            batch = type(drawn)(*piece)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                predicted = replicas.logits(batch.tokens).argmax(-1)
            scores = task.score(predicted, batch)
            level = scores.level.reshape(R, -1)
            for total, what in zip(totals, (scores.errors, scores.counted), strict=True):
                total.scatter_add_(1, level, what.reshape(R, -1).long())
    errors, counted = totals.tolist()
    return [Counts(test.name, levels, errors[r], counted[r]) for r in range(R)]


def is_solved(task: Task, checks: list[Counts]) -> bool:
    """Whether these checks call a model's task solved."""
    shares = (c.hardest_share if task.hardest_only else c.share for c in checks)
    return all(share <= task.solved_error for share in shares)


def losses(logits: Tensor, labels: Tensor, replicas: int, ignored: int) -> Tensor:
    """Each replica's mean cross-entropy over its targets, float32 `[R]`."""
    flat = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=ignored, reduction="none"
    )
    targets = (labels != ignored).view(replicas, -1).sum(1)
    return flat.view(replicas, -1).sum(1) / targets.clamp(min=1)
