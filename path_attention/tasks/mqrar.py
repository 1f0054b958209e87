"""MQRAR-N: a key's N-th last value, where keys are assigned again and again.

Source: arXiv 2505.16381 §4.1 (multi-query repeated associative recall). The layout is open there:
it is MQAR's (arXiv 2312.04927), in which a query is a key, and the answer is named at that key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from path_attention.tasks.task import (
    IGNORED,
    Batch,
    Task,
    TestSet,
    check_range,
    choose,
    octave_names,
    octaves,
)

FILLER = 0
_LEVELS = 9


@dataclass(frozen=True, kw_only=True)
class Mqrar(Task):
    """Pairs of tokens: a key and the value assigned to it, or a key that is asked for and a filler.

    Each pair asks with probability p_query; keys and values are uniform. The answer at a key that
    is asked for is the value of its N-th last assignment before; with fewer than N so far it is no
    target. Difficulty: tokens back to that assignment.

    >>> task = Mqrar(n_back=2, pairs=5, keys=2, values=3)
    >>> u = torch.tensor([[0.9, 0.0, 0.0], [0.9, 0.0, 0.9], [0.9, 0.9, 0.4], [0.1, 0.0, 0.9],
    ...                   [0.1, 0.9, 0.9]])  # asks, key, value
    >>> batch = task.build(u.flatten()[None])
    >>> batch.tokens[0].tolist()  # 1 = 3, 1 = 5, 2 = 4, what was 1 before? what was 2 before?
    [1, 3, 1, 5, 2, 4, 1, 0, 2, 0]
    >>> batch.labels[0].tolist()  # 1 was 3 before; 2 had one assignment only
    [-100, -100, -100, -100, -100, -100, 3, -100, -100, -100]

    Attributes:
        n_back: N; 1 asks for the latest value.
        pairs: in a sequence of twice as many tokens.
        keys, values: how many there are.
        p_query: share of pairs that ask.
    """

    name = "mqrar"
    unit = "queries"
    solved_error = 0.001

    n_back: int = 1
    pairs: int = 384
    keys: int = 32
    values: int = 32
    p_query: float = 0.5

    def __post_init__(self) -> None:
        check_range("n_back", self.n_back, 1)
        check_range("pairs", self.pairs, self.n_back + 1)
        check_range("keys", self.keys, 1)
        check_range("values", self.values, 2)
        check_range("p_query", self.p_query, 0, 1)

    @property
    def length(self) -> int:
        return 2 * self.pairs

    @property
    def vocab_size(self) -> int:
        return 1 + self.keys + self.values

    @property
    def uniforms(self) -> int:
        return 3 * self.pairs

    @property
    def levels(self) -> tuple[str, ...]:
        return octave_names("tokens back", _LEVELS)

    def build(self, u: Tensor, longest: Tensor | None = None) -> Batch:
        asks_u, key_u, value_u = u.unflatten(1, (self.pairs, 3)).unbind(2)
        asks = asks_u < self.p_query
        key, value = choose(key_u, self.keys), choose(value_u, self.values)
        place = torch.arange(self.pairs, device=u.device).expand_as(key)
        same = key[:, :, None] == torch.arange(self.keys, device=u.device)  # [N, pairs, keys]
        so_far = (same & ~asks[:, :, None]).long().cumsum(1)
        so_far = so_far.gather(2, key[:, :, None]).squeeze(2)  # this pair's own among them
        # A key's assignments in order, one row a key; what is asked goes to a slot behind all.
        slot = torch.where(asks, self.keys * self.pairs, key * self.pairs + so_far - 1)
        when = place.new_zeros(len(u), self.keys * self.pairs + 1).scatter(1, slot, place)
        wanted = so_far - self.n_back
        target = asks & (wanted >= 0)
        then = when.gather(1, key * self.pairs + wanted.clamp(min=0))
        answer = 1 + self.keys + value.gather(1, then)
        second = torch.where(asks, FILLER, 1 + self.keys + value)
        label = torch.where(target, answer, IGNORED)
        level = octaves((2 * (place - then)).clamp(min=1), _LEVELS)
        return Batch(
            torch.stack([1 + key, second], 2).flatten(1),
            torch.stack([label, torch.full_like(label, IGNORED)], 2).flatten(1),
            torch.stack([level, torch.zeros_like(level)], 2).flatten(1),
        )

    def tests(self) -> tuple[TestSet, ...]:
        return (TestSet("in_distribution", self, 4_000, 0),)

    def checks(self) -> tuple[TestSet, ...]:
        return (TestSet("in_distribution", self, 100, 1),)
