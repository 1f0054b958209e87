"""Keys, values and gates, and their gradients, on their way round the processes of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from path_attention.ops.context_split import ContextSplit


class Block(NamedTuple):
    """What travels: the tails of one process's two runs."""

    k: Tensor
    v: Tensor
    decay: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> Block:
        decay = None if self.decay is None else change(self.decay)
        return Block(change(self.k), change(self.v), decay)

    def add(self, other: Block) -> None:
        """In place."""
        self.k.add_(other.k)
        self.v.add_(other.v)
        if self.decay is not None and other.decay is not None:
            self.decay.add_(other.decay)


class Ring:
    """Blocks travel from each process to the next; the next one is on its way during the work."""

    def __init__(self, split: ContextSplit, own: Block) -> None:
        self.split = split
        self.block = own.map(Tensor.contiguous)
        self.passed = 0
        self.waiting: tuple[Block, list[Any]] | None = None

    def rounds(self) -> Iterator[tuple[int, Block]]:
        """(whose, block) of each process, this one's first."""
        count, rank = self.split.count, self.split.rank
        for step in range(count):
            owner = (rank - step) % count
            on_its_way = None
            if step < count - 1:
                on_its_way = self._exchange(self.block, (owner - 1) % count)
            yield owner, self.block
            if on_its_way is not None:
                self.block = _arrived(on_its_way)

    def pass_on(self, grad: Block) -> None:
        """Add to this gradient of the block at hand what has arrived for it, and send it on."""
        if self.waiting is not None:
            grad.add(_arrived(self.waiting))
        self.passed += 1
        owner = (self.split.rank - self.passed) % self.split.count  # of what comes in exchange
        alone = self.split.count == 1
        self.waiting = (grad, []) if alone else self._exchange(grad, owner, len(grad))

    def home(self) -> Block:
        """The gradient of this process's own block, after the last round."""
        assert self.waiting is not None
        return _arrived(self.waiting)

    def _exchange(self, block: Block, owner: int, first_tag: int = 0) -> tuple[Block, list[Any]]:
        """Send `block` to the next process; receive the previous one's, which is `owner`'s."""
        split = self.split
        group = split.group
        assert group is not None
        tokens = sum(map(split.tail, split.runs_of(owner)))
        into = block.map(lambda x: x.new_empty(x.shape[0], tokens, *x.shape[2:]))
        after = dist.get_global_rank(group, (split.rank + 1) % split.count)
        before = dist.get_global_rank(group, (split.rank - 1) % split.count)
        todo = []
        for tag, (mine, theirs) in enumerate(zip(block, into, strict=True), first_tag):
            if mine is not None and mine.numel():
                todo.append(dist.P2POp(dist.isend, mine, after, group, tag))
            if theirs is not None and theirs.numel():
                todo.append(dist.P2POp(dist.irecv, theirs, before, group, tag))
        return into, dist.batch_isend_irecv(todo) if todo else []


def _arrived(exchange: tuple[Block, list[Any]]) -> Block:
    block, works = exchange
    for work in works:
        work.wait()
    return block


class Pair(NamedTuple):
    """Queries of one of this process's runs and keys of an earlier run that is at hand."""

    slot: int  # which of the two
    rows: slice  # of the heads
    columns: slice  # of the tails at hand
    step: int  # how many runs lie between


def pairs(split: ContextSplit, owner: int) -> list[Pair]:
    """The meetings of this process's heads with the tails of process `owner`."""
    found, row = [], 0
    for slot, run in enumerate(split.runs):
        rows = slice(row, row + split.head(run))
        row, column = rows.stop, 0
        for other in split.runs_of(owner):
            columns = slice(column, column + split.tail(other))
            column = columns.stop
            if other in split.reach(run):
                found.append(Pair(slot, rows, columns, run - 1 - other))
    return found
