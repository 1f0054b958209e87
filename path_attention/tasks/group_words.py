"""Words in a group: the product of what was read so far. Source: arXiv 2404.08819 (A5, S5, Z60).

Over a group that is not solvable (A5, S5) this is complete for NC¹, which attention with a fixed
depth and a position encoding that ignores the tokens is not known to reach; over S3 and Z60 it is
not that hard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from path_attention.tasks.groups import (
    completions_of,
    find_group,
    generators_of,
    prefix_products,
    table_of,
)
from path_attention.tasks.task import IGNORED, Batch, Scores, Task, TestSet, check_range, choose


@dataclass(frozen=True, kw_only=True)
class GroupWords(Task):
    """Words x_1 … x_n over a set of generators of a group.

    form "prefix": at every token the model names x_1 ⋯ x_t, one of the group's elements. A word is
    right up to n if all its prefixes up to n are; level n − 1 is length n.

    >>> task = GroupWords(group="S3", generators="swaps", letters=4)
    >>> find_group("S3").kinds["swaps"]  # these elements are tokens 0, 1, 2; token 3 starts
    (1, 2, 5)
    >>> batch = task.build(torch.tensor([[0.0, 0.0, 0.9, 0.4]]))
    >>> batch.tokens[0].tolist()
    [3, 0, 0, 2, 1]
    >>> batch.labels[0].tolist()  # a swap done twice is undone
    [-100, 1, 0, 5, 3]

    form "identity": the word's length is uniform up to `letters`, a mark follows it, and there the
    model says whether the product is the identity. Half of the words are drawn freely (1 in |G| of
    these is the identity), the other half end on letters that make it so, all such ends as likely.

    >>> task = GroupWords(group="A5", generators="three_cycles", form="identity", letters=5)
    >>> batch = task.build(torch.tensor([[0.4, 0.1, 0.5, 0.0, 0.3, 0.9, 0.2, 0.8]]))
    >>> batch.tokens[0].tolist()  # the start 20, three letters, the mark 21, the filler 22
    [20, 0, 7, 4, 21, 22, 22]
    >>> batch.labels[0].tolist()
    [-100, -100, -100, -100, 1, -100, -100]

    A token stands before the first letter: without one, every word of one letter repeated would be
    the same to a layer of attention, which can only average equal values.

    Attributes:
        group: "A5", "S5", "S3" or "Z60".
        generators: which elements are letters: "all", "swaps", "three_cycles", "steps".
        form: "prefix" or "identity".
        letters: the longest word.
        test_letters: the longest word of the test beyond training.
    """

    name = "group_words"
    unit = "words"
    solved_error = 0.1
    hardest_only = True

    group: str = "S5"
    generators: str = "swaps"
    form: Literal["prefix", "identity"] = "prefix"
    letters: int = 20
    test_letters: int = 40

    def __post_init__(self) -> None:
        kinds = find_group(self.group).kinds
        if self.generators not in kinds:
            raise ValueError(
                f"generators: expected one of {sorted(kinds)} of {self.group}, "
                f"got {self.generators!r}"
            )
        if self.form not in ("prefix", "identity"):
            raise ValueError(f"form: expected 'prefix' or 'identity', got {self.form!r}")
        check_range("letters", self.letters, self._shortest)
        check_range("test_letters", self.test_letters, self.letters)

    @property
    def _shortest(self) -> int:
        if self.form == "prefix":
            return 2
        words, _ = completions_of(find_group(self.group), self.generators, torch.device("cpu"))
        return max(2, words.shape[2])

    @property
    def length(self) -> int:
        return 1 + self.letters + (self.form == "identity")

    @property
    def vocab_size(self) -> int:
        group = find_group(self.group)
        return max(len(group.kinds[self.generators]) + 3, group.order)

    @property
    def uniforms(self) -> int:
        return self.letters if self.form == "prefix" else self.letters + 3

    @property
    def levels(self) -> tuple[str, ...]:
        return tuple(f"{n} letters" for n in range(1, self.letters + 1))

    @property
    def curriculum(self) -> tuple[int, int] | None:
        return self._shortest, self.letters

    def build(self, u: Tensor, longest: Tensor | None = None) -> Batch:
        group = find_group(self.group)
        if self.form == "identity":
            return self._identity_words(u, longest)
        generators = generators_of(group, self.generators, u.device)
        letters = choose(u, len(generators))
        products = prefix_products(generators[letters], table_of(group, u.device))
        labels = pad(products, (1, 0), value=IGNORED)
        place = torch.arange(self.length, device=u.device)
        if longest is not None:
            labels = labels.masked_fill(place > longest, IGNORED)
        level = (place - 1).clamp(min=0).expand_as(labels)
        return Batch(pad(letters, (1, 0), value=len(generators)), labels, level)

    def _identity_words(self, u: Tensor, longest: Tensor | None) -> Batch:
        group, kind = find_group(self.group), self.generators
        table, generators = table_of(group, u.device), generators_of(group, kind, u.device)
        ends, counts = completions_of(group, kind, u.device)
        place = torch.arange(self.letters, device=u.device)
        length_u, closed_u, end_u = u[:, :3].unbind(1)
        shortest = self._shortest
        most = self.letters if longest is None else longest
        length = shortest + choose(length_u, most - shortest + 1)  # [N]
        letters = choose(u[:, 3:], len(generators))
        products = prefix_products(generators[letters], table)
        free = (length - ends.shape[2])[:, None]  # letters before the end that closes the word
        before = products.gather(1, (free - 1).clamp(min=0)).squeeze(1)
        before = torch.where(free[:, 0] > 0, before, 0)
        end = ends[before, choose(end_u, counts[before])]  # [N, letters of an end]
        closing = end.gather(1, (place - free).clamp(0, ends.shape[2] - 1))
        closed = (closed_u < 0.5)[:, None] & (place >= free)
        letters = torch.where(closed, closing, letters)
        product = prefix_products(generators[letters], table).gather(1, length[:, None] - 1)
        start = len(generators)
        place = torch.arange(self.length, device=u.device)
        mark = length[:, None] + 1
        tokens = pad(pad(letters, (1, 0), value=start), (0, 1))
        tokens = torch.where(place == mark, start + 1, tokens)
        tokens = torch.where(place > mark, start + 2, tokens)
        labels = torch.where(place == mark, (product == 0).long(), IGNORED)
        return Batch(tokens, labels, (length[:, None] - 1).expand_as(tokens))

    def score(self, predicted: Tensor, batch: Batch) -> Scores:
        if self.form == "identity":
            return super().score(predicted, batch)
        wrong, counted, level = super().score(predicted, batch)
        return Scores(wrong.long().cummax(1).values.bool() & counted, counted, level)

    def tests(self) -> tuple[TestSet, ...]:
        beyond = replace(self, letters=self.test_letters)
        return (
            TestSet("in_distribution", self, 20_000, 0),
            TestSet("beyond_training", beyond, 20_000, 1),
        )

    def checks(self) -> tuple[TestSet, ...]:
        return (TestSet("in_distribution", self, 2_000, 2),)
