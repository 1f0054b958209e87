"""Finite groups as multiplication tables, built from permutations, and sets that generate them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

Permutation = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """A finite group; its elements are numbered, the identity is 0.

    Attributes:
        name: of the group.
        table: table[a][b] is the element a·b.
        kinds: named sets of elements that generate it.
    """

    name: str
    table: tuple[tuple[int, ...], ...]
    kinds: dict[str, tuple[int, ...]]

    @property
    def order(self) -> int:
        return len(self.table)

    def __hash__(self) -> int:
        return hash(self.name)


def permutation_group(name: str, size: int, *, even: bool) -> Group:
    """S_size, or A_size of the even permutations: a·b is a after b.

    Generators: "all"; "swaps" of two (of S_size); "three_cycles".
    """
    elements = [p for p in itertools.permutations(range(size)) if not even or _is_even(p)]
    number = {p: n for n, p in enumerate(elements)}  # the identity is the first in this order
    table = tuple(
        tuple(number[tuple(a[b[x]] for x in range(size))] for b in elements) for a in elements
    )
    moved = [sum(x != n for n, x in enumerate(p)) for p in elements]
    kinds = {
        "all": tuple(range(len(elements))),
        "swaps": tuple(n for n, m in enumerate(moved) if m == 2),
        "three_cycles": tuple(n for n, m in enumerate(moved) if m == 3),
    }
    return Group(name, table, {k: v for k, v in kinds.items() if v and _generate(table, v)})


def cyclic_group(name: str, order: int) -> Group:
    """Z_order, sums modulo the order. Generators: "all"; "steps", one up and one down."""
    table = tuple(tuple((a + b) % order for b in range(order)) for a in range(order))
    return Group(name, table, {"all": tuple(range(order)), "steps": (1, order - 1)})


@functools.cache
def find_group(name: str) -> Group:
    """The group of this name: "A5", "S5", "S3" or "Z60". Raises ValueError on another."""
    if name == "Z60":
        return cyclic_group(name, 60)
    if name not in GROUPS:
        raise ValueError(f"group: expected one of {sorted(GROUPS)}, got {name!r}")
    return permutation_group(name, int(name[1:]), even=name[0] == "A")


GROUPS = ("A5", "S5", "S3", "Z60")


@functools.cache
def table_of(group: Group, device: torch.device) -> Tensor:
    """The multiplication table on a device, int64 `[order, order]`."""
    return torch.tensor(group.table, device=device)


@functools.cache
def generators_of(group: Group, kind: str, device: torch.device) -> Tensor:
    """A set of generators on a device, int64 `[count]`."""
    return torch.tensor(group.kinds[kind], device=device)


def prefix_products(elements: Tensor, table: Tensor) -> Tensor:
    """x_1, x_1·x_2, …, by a scan of ⌈log2 T⌉ rounds; int64 `[N, T]`."""
    reach = 1
    while reach < elements.shape[1]:
        longer = table[elements[:, :-reach], elements[:, reach:]]
        elements = torch.cat([elements[:, :reach], longer], 1)
        reach *= 2
    return elements


class Completions:
    """For each element g, the words of a fixed number of generators whose product undoes g.

    Attributes:
        letters: of such a word: the fewest with which every element has one.
        words: int64 `[order, most, letters]`, places in the generator set; what is left is 0.
        counts: int64 `[order]`, how many each element has.
    """

    def __init__(self, group: Group, kind: str) -> None:
        generators, table = group.kinds[kind], group.table
        products: list[tuple[tuple[int, ...], int]] = [((), 0)]
        for letters in range(1, 7):
            products = [
                ((*word, n), table[p][g]) for word, p in products for n, g in enumerate(generators)
            ]
            if len({p for _, p in products}) == group.order:
                break
            if len(products) * len(generators) > 2**20:
                letters = 7
                break
        else:
            letters = 7
        if letters == 7:
            raise ValueError(
                f"generators: expected a set of {group.name} of which some fixed number of letters "
                f"reaches every element, got {kind!r}"
            )
        inverse = [row.index(0) for row in table]
        undo: list[list[tuple[int, ...]]] = [[] for _ in range(group.order)]
        for word, product in products:
            undo[inverse[product]].append(word)
        self.letters = letters
        most = max(len(words) for words in undo)
        self.counts = torch.tensor([len(words) for words in undo])
        filler = (0,) * letters
        self.words = torch.tensor([words + [filler] * (most - len(words)) for words in undo])


@functools.cache
def completions_of(group: Group, kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """`Completions` on a device: words and counts."""
    found = Completions(group, kind)
    return found.words.to(device), found.counts.to(device)


def _is_even(p: Permutation) -> bool:
    return sum(p[a] > p[b] for a in range(len(p)) for b in range(a + 1, len(p))) % 2 == 0


def _generate(table: tuple[tuple[int, ...], ...], generators: tuple[int, ...]) -> bool:
    reached, edge = {0}, [0]
    while edge:
        edge = [p for p in {table[a][g] for a in edge for g in generators} if p not in reached]
        reached.update(edge)
    return len(reached) == len(table)
