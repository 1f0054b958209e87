"""How one long sequence lies on the processes of a group, and what crosses its cuts.

docs/algorithm.md §6. R processes cut the sequence into 2R runs of (nearly) equal length; process r
holds run r and its mirror image 2R−1−r, so that causal attention is the same work for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from path_attention.ops.packing import Packing

IGNORED = -100
_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Decorator: torch.compile leaves the function, which waits for other processes, as it is."""
    return cast(_F, torch.compiler.disable(function))


class Piece(NamedTuple):
    """The part of one document that one run holds: tokens start … stop of the whole sequence."""

    document: int
    start: int
    stop: int
    before: bool  # the document began in an earlier run
    after: bool  # it goes on in the next one

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class ContextSplit:
    """The zigzag split of T tokens over the R processes of a group; build it once a batch.

    Attributes:
        group: the processes; None for this one alone (R = 1).
        rank: this process's place in the group.
        count: R.
        total: T.
        borders: where the 2R runs start and end, 2R + 1 integers.
        pieces: what documents each run holds, empty ones left out.
        packed: whether the sequence has documents of its own.
        documents: where each document starts and ends.
    """

    group: dist.ProcessGroup | None
    rank: int
    count: int
    total: int
    borders: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    packed: bool
    documents: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls,
        total: int,
        group: dist.ProcessGroup | None = None,
        cu_seqlens: Tensor | Packing | None = None,
    ) -> ContextSplit:
        """Split a sequence of `total` tokens, the same on every process.

        Args:
            total: T, at least 2 tokens a process.
            group: a process group that this process is in; None is this process alone.
            cu_seqlens: borders of the whole sequence's packed documents, or a `Packing`.

        Raises:
            ValueError: too few tokens, or borders that do not cover them.
        """
        rank, count = (
            (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        )
        if rank < 0:
            raise ValueError("group: expected one that this process is in, got another")
        if total < 2 * count:
            raise ValueError(
                f"total: expected at least 2 tokens for each of {count} processes, got {total}"
            )
        lengths: Sequence[int] = (total,)
        if cu_seqlens is not None:
            packing = cu_seqlens
            if not isinstance(packing, Packing):
                packing = Packing.from_cu_seqlens(packing, total)
            if packing.total != total:
                raise ValueError(
                    f"cu_seqlens: expected to end at total = {total}, got {packing.total}"
                )
            lengths = packing.lengths
        borders = tuple(total * n // (2 * count) for n in range(2 * count + 1))
        documents, stop = [], 0
        for length in lengths:
            documents.append((stop, stop + length))
            stop += length
        pieces = tuple(_pieces(documents, borders[n], borders[n + 1]) for n in range(2 * count))
        return cls(
            group, rank, count, total, borders, pieces, cu_seqlens is not None, tuple(documents)
        )

    @property
    def runs(self) -> tuple[int, int]:
        """The two runs that this process holds, in the order of its tokens."""
        return self.runs_of(self.rank)

    def runs_of(self, rank: int) -> tuple[int, int]:
        """The two runs of a process."""
        return rank, 2 * self.count - 1 - rank

    def length(self, run: int) -> int:
        """Tokens of a run."""
        return self.borders[run + 1] - self.borders[run]

    @property
    def tokens(self) -> int:
        """Tokens of this process."""
        return sum(self.length(run) for run in self.runs)

    def head(self, run: int) -> int:
        """How many tokens at the run's start belong to a document that began before it."""
        first = self.pieces[run][0]
        return first.tokens if first.before else 0

    def tail(self, run: int) -> int:
        """How many tokens at the run's end belong to a document that goes on behind it."""
        last = self.pieces[run][-1]
        return last.tokens if last.after else 0

    def whole(self, run: int) -> bool:
        """Whether a document crosses the run from before it to behind it."""
        return (
            len(self.pieces[run]) == 1 and self.pieces[run][0].before and self.pieces[run][0].after
        )

    def reach(self, run: int) -> list[int]:
        """The earlier runs with keys for this one's head, from the nearest to the farthest."""
        if not self.head(run):
            return []
        first = run - 1
        while self.whole(first):
            first -= 1
        return list(range(run - 1, first - 1, -1))

    def packing(self, device: torch.device | str = "cpu") -> Packing | None:
        """The borders of this process's pieces; None where the sequence has no documents."""
        lengths = [p.tokens for run in self.runs for p in self.pieces[run]]
        return self._packing("pieces", lengths, device)

    def run_packing(self, run: int, device: torch.device | str = "cpu") -> Packing | None:
        """The borders of one run's pieces; None where the sequence has no documents."""
        lengths = [piece.tokens for piece in self.pieces[run]]
        return self._packing(f"run {run}", lengths, device)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """This process's tokens of a whole sequence's `x`."""
        self._check("x", x.shape[dim], self.total)
        return torch.cat(
            [x.narrow(dim, self.borders[run], self.length(run)) for run in self.runs], dim
        )

    def take_heads(self, x: Tensor) -> Tensor:
        """x `[B, tokens, …]` of this process's tokens whose document began before their run."""
        parts = x.split([self.length(run) for run in self.runs], 1)
        heads = [part[:, : self.head(run)] for run, part in zip(self.runs, parts, strict=True)]
        return torch.cat(heads, 1)

    def put_heads(self, x: Tensor, heads: Tensor) -> None:
        """The reverse, in place."""
        first, second = self.runs
        begin = self.head(first)
        x[:, :begin] = heads[:, :begin]
        x[:, self.length(first) :][:, : self.head(second)] = heads[:, begin:]

    def take_tails(self, x: Tensor) -> Tensor:
        """x `[B, tokens, …]` of this process's tokens whose document goes on behind their run."""
        parts = x.split([self.length(run) for run in self.runs], 1)
        tails = [
            part[:, part.shape[1] - self.tail(run) :]
            for run, part in zip(self.runs, parts, strict=True)
        ]
        return torch.cat(tails, 1)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 `[1, tokens]`: each of this process's tokens' position in its document."""
        parts = [
            torch.arange(piece.start, piece.stop, device=device) - self.documents[piece.document][0]
            for run in self.runs
            for piece in self.pieces[run]
        ]
        return torch.cat(parts)[None]

    def targets(self, labels: Tensor) -> Tensor:
        """What each of this process's tokens predicts: labels shifted before the cut.

        Args:
            labels: the whole sequence's, `[B, T]`, token t the target of token t − 1; −100 is none.

        Returns:
            int64 `[B, tokens]`, aligned with this process's logits; −100 at a document's last
            token.
        """
        self._check("labels", labels.shape[1], self.total)
        shifted = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], 1)
        ends = [stop - 1 for start, stop in self.documents if stop > start]
        shifted[:, ends] = IGNORED
        return self.take(shifted)

    def sum(self, x: Tensor) -> Tensor:
        """x summed over the processes of the group. No gradients."""
        total = x.detach().clone()
        if self.count > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def join(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence's x on every process, from each one's own tokens. No gradients."""
        self._check("x", x.shape[dim], self.tokens)
        x = x.detach().movedim(dim, 0)
        longest = max(sum(map(self.length, self.runs_of(r))) for r in range(self.count))
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = x
        whole = x.new_empty(self.total, *x.shape[1:])
        for rank, part in enumerate(_all_gather(padded, self)):
            done = 0
            for run in self.runs_of(rank):
                whole[self.borders[run] : self.borders[run + 1]] = part[done:][: self.length(run)]
                done += self.length(run)
        return whole.movedim(0, dim)

    def extend(self, x: Tensor, count: int) -> Tensor:
        """x with the `count` tokens before each of this process's runs: a convolution's halo.

        A causal convolution over the result, under `extended_packing`, gives `drop`'s tokens what
        it gives them in the whole sequence. Differentiable: a halo's gradient goes home.

        Args:
            x: `[B, tokens, C]`.
            count: how far the convolution reaches back: its width less one.

        Returns:
            `[B, tokens + 2 · count, C]`, zeros where the sequence has not begun.
        """
        self._check("x", x.shape[1], self.tokens)
        if count == 0:
            return x
        parts = x.split([self.length(run) for run in self.runs], 1)
        ends = torch.stack([_pad_front(part[:, -count:], count) for part in parts])
        ends = gather_runs_with_gradients(ends, self)  # [2R, B, count, C]
        lengths = [min(self.length(run), count) for run in range(2 * self.count)]
        extended = []
        for run, part in zip(self.runs, parts, strict=True):
            before = [ends[n, :, count - lengths[n] :] for n in range(run)]
            halo = torch.cat(before, 1)[:, -count:] if before else ends[0, :, :0]
            extended += [_pad_front(halo, count), part]
        return torch.cat(extended, 1)

    def extended_packing(self, count: int, device: torch.device | str = "cpu") -> Packing | None:
        """The borders of `extend`'s result; None where the sequence has no documents."""
        lengths = []
        for run in self.runs:
            start, stop = self.borders[run] - count, self.borders[run + 1]
            lengths += [max(-start, 0)]
            lengths += [piece.tokens for piece in _pieces(self.documents, start, stop)]
        return self._packing(f"extended by {count}", lengths, device)

    def drop(self, x: Tensor, count: int) -> Tensor:
        """x `[B, tokens + 2 · count, …]` without the halos that `extend` put there."""
        sizes = [size for run in self.runs for size in (count, self.length(run))]
        self._check("x", x.shape[1], sum(sizes))
        return torch.cat(x.split(sizes, 1)[1::2], 1)

    @cached_property
    def _packings(self) -> dict[tuple[str, str], Packing]:
        return {}

    def _packing(self, name: str, lengths: list[int], device: torch.device | str) -> Packing | None:
        """Made once for all layers: a copy to the device waits for it."""
        if not self.packed:
            return None
        key = name, str(device)
        if key not in self._packings:
            self._packings[key] = Packing.from_lengths(lengths, device)
        return self._packings[key]

    def check_tokens(self, name: str, x: Tensor) -> None:
        """Raise ValueError unless x `[B, T, …]` are this process's tokens, B = 1 if packed."""
        if x.shape[1] != self.tokens:
            raise ValueError(
                f"{name}: expected this process's {self.tokens} tokens of {self.total}, "
                f"got {x.shape[1]}"
            )
        if self.packed and x.shape[0] != 1:
            raise ValueError(
                f"split: expected a batch of 1 with packed documents, got B = {x.shape[0]}"
            )

    def _check(self, name: str, tokens: int, expected: int) -> None:
        if tokens != expected:
            raise ValueError(f"{name}: expected {expected} tokens, got {tokens}")


def attend_runs(
    attend: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor | None],
    split: ContextSplit,
) -> tuple[Tensor, Tensor]:
    """Both results of `attend(*inputs, cu_seqlens=…)`, each run's pieces by themselves.

    Inputs and results are `[B, tokens, …]`; `cu_seqlens` is left out without packed documents.
    """
    present = next(x for x in inputs if x is not None)
    packing = split.packing(present.device)
    if packing is not None:
        return attend(*inputs, cu_seqlens=packing)
    sizes = [split.length(run) for run in split.runs]
    if sizes[0] == sizes[1]:  # as one batch of twice as many sequences
        B = len(present)
        both = (None if x is None else x.unflatten(1, (2, -1)).flatten(0, 1) for x in inputs)
        out, lse = attend(*both)
        return out.unflatten(0, (B, 2)).flatten(1, 2), lse.unflatten(0, (B, 2)).flatten(1, 2)
    runs = zip(*((None, None) if x is None else x.split(sizes, 1) for x in inputs), strict=True)
    parts = [attend(*run) for run in runs]
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def gather_runs(x: Tensor, split: ContextSplit) -> Tensor:
    """`[2, …]` of this process's runs → `[2R, …]` of all, in order. No gradients."""
    whole = x.new_empty(2 * split.count, *x.shape[1:])
    for rank, part in enumerate(_all_gather(x.contiguous(), split)):
        for run, one in zip(split.runs_of(rank), part, strict=True):
            whole[run] = one
    return whole


def sum_runs(grad: Tensor, split: ContextSplit) -> Tensor:
    """The transpose of `gather_runs`: `[2R, …]` summed over processes: this one's two runs."""
    grad = grad.contiguous()
    if split.count > 1:
        dist.all_reduce(grad, group=split.group)
    return torch.stack([grad[run] for run in split.runs])


def gather_runs_with_gradients(x: Tensor, split: ContextSplit) -> Tensor:
    """`gather_runs`, through which gradients go home; all processes must go back through it."""
    return cast(Tensor, _Gather.apply(x, split))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: ContextSplit) -> Tensor:
        ctx.split = split
        return gather_runs(x, split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_runs(grad.clone(), ctx.split), None


def _all_gather(x: Tensor, split: ContextSplit) -> list[Tensor]:
    if split.count == 1:
        return [x]
    parts = [torch.empty_like(x) for _ in range(split.count)]
    dist.all_gather(parts, x, group=split.group)
    return parts


def _pieces(documents: Sequence[tuple[int, int]], start: int, stop: int) -> tuple[Piece, ...]:
    """The parts of the documents that tokens start … stop hold."""
    found = []
    for number, (first, end) in enumerate(documents):
        low, high = max(first, start), min(end, stop)
        if low < high:
            found.append(Piece(number, low, high, first < start, end > stop))
    return tuple(found)


def _pad_front(x: Tensor, count: int) -> Tensor:
    missing = count - x.shape[1]
    return torch.nn.functional.pad(x, (0, 0, missing, 0)) if missing else x
