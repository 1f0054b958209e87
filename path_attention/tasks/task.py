"""What a synthetic task is: a frozen configuration and a pure function from random numbers.

Everything random comes as uniform numbers from an explicit generator; a task turns them into
sequences by arithmetic on their own device. So the same seed gives the same sequences whatever else
is trained beside it, and a training step never waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # a label that is no target

# PyTorch's CPU generator reads the low 32 bits of a seed, so the ranges are apart in those.
SEEDS = 2**30
_STARTS = 2**30
_TESTS = 2**31


class Batch(NamedTuple):
    """Sequences with their targets; int64, each `[N, T]`.

    labels: the class that the model has to name at this token, or −100.
    level: how hard the target is, in the task's own `levels`; anything where there is none.
    """

    tokens: Tensor
    labels: Tensor
    level: Tensor


class Scores(NamedTuple):
    """What counts in a measurement, each `[N, T]`: bool, bool, int64."""

    errors: Tensor
    counted: Tensor
    level: Tensor


@dataclass(frozen=True, kw_only=True)
class Task:
    """A synthetic task.

    Attributes:
        name: of the task.
        solved_error: the greatest share of errors on every check with which it counts as solved.
        unit: what one count of a measurement is.
        hardest_only: solved is judged on the highest level of a check, not on all of it.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    solved_error: ClassVar[float] = 0.0
    hardest_only: ClassVar[bool] = False

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Tokens and classes share one numbering below this."""
        raise NotImplementedError

    @property
    def uniforms(self) -> int:
        """How many random numbers a sequence takes."""
        raise NotImplementedError

    @property
    def levels(self) -> tuple[str, ...]:
        """What each level of difficulty is called, from the least."""
        raise NotImplementedError

    @property
    def curriculum(self) -> tuple[int, int] | None:
        """The least and the greatest `longest` of `build`; None if it has no say."""
        return None

    def build(self, u: Tensor, longest: Tensor | None = None) -> Batch:
        """Sequences from uniform numbers.

        Args:
            u: `[N, uniforms]` in [0, 1).
            longest: int64 scalar on u's device: targets beyond this are left out (a curriculum).
        """
        raise NotImplementedError

    def score(self, predicted: Tensor, batch: Batch) -> Scores:
        """What counts, given the class named at each token, int64 `[N, T]`."""
        counted = batch.labels != IGNORED
        return Scores((predicted != batch.labels) & counted, counted, batch.level)

    def tests(self) -> tuple[TestSet, ...]:
        """The published tests, each on sequences that no training seed makes."""
        raise NotImplementedError

    def checks(self) -> tuple[TestSet, ...]:
        """Smaller tests during training: the same kinds, on other sequences."""
        raise NotImplementedError

    def sample(self, generator: torch.Generator, count: int) -> Batch:
        """This many sequences, on the generator's device."""
        u = torch.rand(count, self.uniforms, generator=generator, device=generator.device)
        return self.build(u)


class TestSet(NamedTuple):
    """Sequences to measure on: which task, how many, and which of the test seeds."""

    __test__ = False  # no test case, for pytest

    name: str
    task: Any
    sequences: int
    seed: int


def train_generator(seed: int, device: torch.device | str) -> torch.Generator:
    """The stream of training sequences of a seed. Raises ValueError on a seed out of range."""
    return torch.Generator(device).manual_seed(_checked(seed))


def start_seed(seed: int) -> int:
    """The seed of the parameters' start: its numbers are not those of the sequences."""
    return _STARTS + _checked(seed)


def held_out_generator(seed: int, device: torch.device | str) -> torch.Generator:
    """The stream of a test's sequences: no training seed makes it."""
    return torch.Generator(device).manual_seed(_TESTS + _checked(seed))


def choose(u: Tensor, count: int | Tensor) -> Tensor:
    """int64 in [0, count) from uniform numbers in [0, 1)."""
    return (u * count).long().clamp(max=count - 1)  # a product may round up to count


def octaves(distance: Tensor, count: int) -> Tensor:
    """⌊log2 distance⌋, at most count − 1; distance ≥ 1, int64."""
    edges = 2 ** torch.arange(1, count, device=distance.device)
    return (distance[..., None] >= edges).sum(-1)


def octave_names(unit: str, count: int) -> tuple[str, ...]:
    """What `octaves` calls its levels."""
    first = [f"{2**n}–{2 ** (n + 1) - 1} {unit}" for n in range(count - 1)]
    return (
        *(name.replace(f"1–1 {unit}", f"1 {unit}") for name in first),
        f"{2 ** (count - 1)}+ {unit}",
    )


def check_range(name: str, value: float, low: float, high: float | None = None) -> None:
    """Raise ValueError, naming the field, unless low ≤ value (≤ high)."""
    if not value >= low or (high is not None and not value <= high):
        wanted = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name}: expected {wanted}, got {value}")


def _checked(seed: int) -> int:
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed: expected 0 to {SEEDS - 1}, got {seed}")
    return seed
