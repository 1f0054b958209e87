"""Flip-flop: remember one bit over distractors. Source: arXiv 2306.00946 (FFLM).

A sequence is pairs of an instruction and a bit: write stores its bit, ignore's bit means nothing,
read's bit is the last one written. The model names that bit at every read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from path_attention.tasks.task import (
    IGNORED,
    Batch,
    Task,
    TestSet,
    check_range,
    octave_names,
    octaves,
)

WRITE, READ, IGNORE, ZERO, ONE = range(5)
_LEVELS = 9


@dataclass(frozen=True, kw_only=True)
class FlipFlop(Task):
    """The flip-flop language FFL(p_ignore).

    The first instruction writes and the last reads; each other one ignores with probability
    p_ignore, else it writes or reads, each as likely. Written and ignored bits are fair coins.
    Difficulty: instructions since the last write.

    >>> task = FlipFlop(pairs=4, p_ignore=0.5)
    >>> u = torch.tensor([[0.0, 0.9, 0.1, 0.2, 0.9, 0.0, 0.7, 0.3]])  # instruction, bit, …
    >>> batch = task.build(u)
    >>> ["wri01"[token] for token in batch.tokens[0]]  # a read's bit is the one written
    ['w', '1', 'i', '0', 'r', '1', 'r', '1']
    >>> batch.labels[0].tolist()  # named at the instruction
    [-100, -100, -100, -100, 4, -100, 4, -100]

    Attributes:
        pairs: instructions in a sequence of twice as many tokens.
        p_ignore: share of ignored instructions.
        sparse_sequences: sequences of the sparse test; each has 3.5 reads on average.
    """

    name = "flip_flop"
    unit = "reads"

    pairs: int = 256
    p_ignore: float = 0.8
    sparse_sequences: int = 160_000

    def __post_init__(self) -> None:
        check_range("pairs", self.pairs, 2)
        check_range("p_ignore", self.p_ignore, 0, 1)
        check_range("sparse_sequences", self.sparse_sequences, 1)

    @property
    def length(self) -> int:
        return 2 * self.pairs

    @property
    def vocab_size(self) -> int:
        return 5

    @property
    def uniforms(self) -> int:
        return 2 * self.pairs

    @property
    def levels(self) -> tuple[str, ...]:
        return octave_names("steps since the write", _LEVELS)

    def build(self, u: Tensor, longest: Tensor | None = None) -> Batch:
        instruction_u, bit_u = u.unflatten(1, (self.pairs, 2)).unbind(2)
        place = torch.arange(self.pairs, device=u.device)
        kept = self.p_ignore + (1 - self.p_ignore) / 2
        instruction = torch.where(instruction_u < kept, WRITE, READ)
        instruction = torch.where(instruction_u < self.p_ignore, IGNORE, instruction)
        instruction = torch.where(place == 0, WRITE, instruction)
        instruction = torch.where(place == self.pairs - 1, READ, instruction)
        last_write = torch.where(instruction == WRITE, place, 0).cummax(1).values
        drawn = torch.where(bit_u < 0.5, ZERO, ONE)
        reads = instruction == READ
        bit = torch.where(reads, drawn.gather(1, last_write), drawn)
        nothing = torch.full_like(bit, IGNORED)
        level = octaves((place - last_write).clamp(min=1), _LEVELS)
        return Batch(
            torch.stack([instruction, bit], 2).flatten(1),
            torch.stack([torch.where(reads, bit, IGNORED), nothing], 2).flatten(1),
            torch.stack([level, torch.zeros_like(level)], 2).flatten(1),
        )

    def tests(self) -> tuple[TestSet, ...]:
        return self._sets(16_000, self.sparse_sequences, 4_000, seed=0)

    def checks(self) -> tuple[TestSet, ...]:
        return self._sets(250, 2_500, 100, seed=3)

    def _sets(self, own: int, sparse: int, dense: int, *, seed: int) -> tuple[TestSet, ...]:
        return (
            TestSet("in_distribution", self, own, seed),
            TestSet("sparse", replace(self, p_ignore=0.98), sparse, seed + 1),
            TestSet("dense", replace(self, p_ignore=0.1), dense, seed + 2),
        )
