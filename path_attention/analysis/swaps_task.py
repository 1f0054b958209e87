"""The task of the construction as one to train on: five items under swaps, asked after each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

import torch
from torch import Tensor

from path_attention.analysis.construction import (
    ASK,
    CLAIM,
    ITEMS,
    NO,
    SWAP,
    SWAPS,
    VOCABULARY,
    YES,
)
from path_attention.tasks.groups import find_group, prefix_products, table_of
from path_attention.tasks.task import IGNORED, Batch, Task, TestSet, check_range, choose

_START = (*range(ITEMS), NO)  # before the first swap
_EACH = 3  # tokens of a swap: itself, a question, a claim
_DRAWS = 5  # random numbers of a swap: which one, p, q, x, whether the claim is right
_SEQUENCES = 4  # of a test at least: answers along one sequence hang together
_ORDERS = tuple(permutations(range(ITEMS)))  # items by position, of each element of S5 by number


@dataclass(frozen=True, kw_only=True)
class TrackedSwaps(Task):
    """Sequences as `construction.make_sequence` makes them with a question and a claim each swap.

    The items' order after t swaps is a prefix product in S5: a position p then holds the item that
    stood before at the position that swap t exchanged p with.

    Attributes:
        swaps: of a sequence.
        first: after this swap and later ones answers are targets.
    """

    name = "tracked_swaps"
    unit = "answers"
    solved_error = 0.01

    swaps: int = 16
    first: int = 1

    def __post_init__(self) -> None:
        check_range("swaps", self.swaps, 1)
        check_range("first", self.first, 1, self.swaps)

    @property
    def length(self) -> int:
        return len(_START) + _EACH * self.swaps

    @property
    def vocab_size(self) -> int:
        return VOCABULARY

    @property
    def uniforms(self) -> int:
        return _DRAWS * self.swaps

    @property
    def levels(self) -> tuple[str, ...]:
        return ("questions", "claims")

    @property
    def curriculum(self) -> tuple[int, int]:
        return 1, self.swaps

    def build(self, u: Tensor, longest: Tensor | None = None) -> Batch:
        N, device = u.shape[0], u.device
        swap_u, p_u, q_u, x_u, right_u = u.unflatten(1, (self.swaps, _DRAWS)).unbind(2)
        drawn = choose(swap_u, len(SWAPS))
        p, q, x = (choose(part, ITEMS) for part in (p_u, q_u, x_u))
        start, elements, orders = _constants(device)
        products = prefix_products(elements[drawn], table_of(find_group("S5"), device))
        orders = orders[products]  # [N, swaps, ITEMS]
        at_p, at_q = (orders.gather(2, y[..., None]).squeeze(2) for y in (p, q))
        x = torch.where(right_u < 0.5, at_q, x)
        tokens = torch.stack([SWAP + drawn, ASK + p, CLAIM + q * ITEMS + x], 2)
        decided = torch.where(at_q == x, YES, NO)
        answers = torch.stack([torch.full_like(p, IGNORED), at_p, decided], 2)
        place = torch.arange(1, self.swaps + 1, device=device)
        outside = place < self.first
        if longest is not None:
            outside = outside | (place > longest)
        answers = answers.masked_fill(outside[:, None], IGNORED)
        start = start.expand(N, -1)
        labels = torch.cat([torch.full_like(start, IGNORED), answers.flatten(1)], 1)
        level = (torch.arange(self.length, device=device) - len(_START)) % _EACH == _EACH - 1
        tokens = torch.cat([start, tokens.flatten(1)], 1)
        return Batch(tokens, labels, level.long().expand_as(labels))

    def tests(self) -> tuple[TestSet, ...]:
        return (TestSet("in_distribution", self, 1000, 0),)

    def checks(self) -> tuple[TestSet, ...]:
        return (TestSet("in_distribution", self, 100, 1),)

    def parts(self, ends: Sequence[int], answers: int) -> tuple[TestSet, ...]:
        """Tests by number of swaps: part n asks after more than ends[n − 1] and up to ends[n].

        Args:
            ends: rising, from 1 on.
            answers: at least so many of each kind are counted in a part.

        Raises:
            ValueError: naming the argument, what came, and what was expected.
        """
        if not ends or not all(a < b for a, b in pairwise((0, *ends))):
            raise ValueError(f"ends: expected rising numbers from 1 on, got {list(ends)}")
        check_range("answers", answers, 1)
        parts = []
        for seed, (before, end) in enumerate(pairwise((0, *ends)), 2):
            task = replace(self, swaps=end, first=before + 1)
            sequences = max(-(-answers // (end - before)), _SEQUENCES)
            parts.append(TestSet(str(end), task, sequences, seed))
        return tuple(parts)


@functools.cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of the start, the element of S5 that each swap is, and `_ORDERS`, on a device."""
    swapped = [tuple({a: b, b: a}.get(p, p) for p in range(ITEMS)) for a, b in SWAPS]
    elements = [_ORDERS.index(order) for order in swapped]
    start, elements, orders = (torch.tensor(x, device=device) for x in (_START, elements, _ORDERS))
    return start, elements, orders
