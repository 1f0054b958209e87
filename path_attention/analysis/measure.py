"""What is measured on a layer's routes, as sums that add up over sequences.

Queries are probed at several lengths of context: for length L, some of the last eighth of its
positions. Each meets every key before it (`walk`); of what it meets only sums are kept, by distance
and by head, so memory is O(T · D) whatever is measured. `summary` makes rows of the sums.

Near keys are less than K tokens before the query, far keys the others. K is given: the context that
a model was trained at makes far what it never saw in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from path_attention.analysis.probes import ProbeSums
from path_attention.analysis.routes import SEGMENT, Routes, turn_matrix, walk

SINGLE_STEPS = 512  # route lengths that are walked token by token


def bin_edges(longest: int = 1 << 24) -> Tensor:
    """int64: where bins of distances begin: every number to 8, then four an octave."""
    steps = torch.arange(8, 4 * longest.bit_length())
    edges = {*range(8), *(round(2 ** (n / 4) * 2) for n in steps.tolist())}
    return torch.tensor(sorted(edges))


EDGES = bin_edges()
# Bins of scores: fine around 0, wide far from it; the first and the last have no outer end.
SCORES = 0.05 * torch.linspace(-8, 8, 129, dtype=torch.float64).sinh()
TAILS = torch.arange(25, dtype=torch.float64) / 4  # u of P(|score| ≥ u)


@dataclass
class Totals:
    """Sums and greatest values by name, float64; those of other sequences add up."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    most: dict[str, Tensor] = field(default_factory=dict)

    def add(self, **named: Tensor) -> None:
        for name, x in named.items():
            x = x.detach().double()
            self.sums[name] = self.sums[name] + x if name in self.sums else x

    def raise_to(self, **named: Tensor) -> None:
        for name, x in named.items():
            x = x.detach().double()
            self.most[name] = torch.maximum(self.most[name], x) if name in self.most else x

    def merge(self, other: Totals) -> None:
        self.add(**other.sums)
        self.raise_to(**other.most)

    def cpu(self) -> Totals:
        """The same on the CPU."""
        parts = ({name: x.cpu() for name, x in part.items()} for part in (self.sums, self.most))
        return Totals(*parts)


@dataclass(frozen=True)
class Probes:
    """Queries to follow: rising positions, and which of the lengths each belongs to."""

    lengths: tuple[int, ...]
    positions: tuple[int, ...]
    of_length: tuple[int, ...]

    @classmethod
    def spread(cls, lengths: Sequence[int], each: int, tokens: int) -> Probes:
        """At most `each` positions for every length, evenly in its last eighth.

        Raises ValueError naming lengths or probes.
        """
        if each < 1:
            raise ValueError(f"probes: expected at least 1, got {each}")
        if not lengths or list(lengths) != sorted(set(lengths)) or lengths[0] < 2:
            raise ValueError(f"lengths: expected rising numbers from 2 on, got {list(lengths)}")
        if lengths[-1] > tokens:
            raise ValueError(
                f"lengths: expected at most the {tokens} tokens there, got {lengths[-1]}"
            )
        found = []
        for n, length in enumerate(lengths):
            count = min(each, max(length // 8, 1))
            places = torch.linspace(length - length // 8, length - 1, count, dtype=torch.float64)
            places = places if count > 1 else places * 0 + length - 1
            found += [(int(p), n) for p in places.round().tolist()]
        found.sort()
        return cls(tuple(lengths), tuple(p for p, _ in found), tuple(n for _, n in found))


@torch.no_grad()
def measure(routes: Routes, probes: Probes, near: int, segment: int = SEGMENT) -> Totals:
    """Everything of one layer on one sequence, on the CPU; sums that `Totals.merge` adds up.

    Args:
        routes: T tokens.
        probes: positions below T.
        near: K.
        segment: tokens that a walk takes at once.

    Raises:
        ValueError: naming near or probes.
    """
    if near < 1:
        raise ValueError(f"near: expected at least 1, got {near}")
    if probes.positions[-1] >= routes.tokens:
        raise ValueError(
            f"probes: expected positions below {routes.tokens}, got {probes.positions[-1]}"
        )
    totals = Totals()
    mean_transport(routes, totals)
    single_steps(routes, probes, totals)
    size = routes.k.norm(dim=-1).amax(0).repeat_interleave(routes.group)
    totals.raise_to(norm_bound=abs(routes.scale) * size * routes.q.norm(dim=-1).amax(0))
    sums = ProbeSums(routes, probes, near, EDGES, SCORES, TAILS)
    for tile in walk(routes, probes.positions, segment):
        sums.meet(tile)
        _routes_at(routes, probes, tile.moved, tile.first, tile.start, totals)
    sums.into(totals)
    return totals.cpu()


def mean_transport(routes: Routes, totals: Totals, piece: int = 256) -> None:
    """Adds Σ_t M_t `[H, D, D]` over the tokens 1 … T − 1, and their number.

    The first token's M lies between no two tokens. ‖E M‖ < 1 is the theorem's spectral gap.
    """
    T, H, D = routes.k.shape
    if routes.kind == "other" or T < 2:
        return
    total = routes.k.new_zeros(H, D, D, dtype=torch.float64)
    if routes.kind == "none":
        total += (T - 1) * torch.eye(D, dtype=total.dtype, device=total.device)
    elif routes.w is not None and routes.w.shape[2] == 1 and routes.turns is None:
        w, beta = routes.w[1:, :, 0].transpose(0, 1), routes.beta[1:, :, 0].T  # pyright: ignore
        total += (T - 1) * torch.eye(D, dtype=total.dtype, device=total.device)
        total -= (w * beta[..., None]).double().mT @ w.double()
    elif routes.kind == "rotation" and routes.turns is not None:
        turns = routes.turns.to(torch.complex128)
        total += turn_matrix((turns[1:] * turns[:-1].conj()).sum(0))
    else:
        for start in range(1, T, piece):
            total += routes.dense(start, min(start + piece, T)).double().sum(0)
    totals.add(transport=total, transports=torch.tensor(T - 1))


def single_steps(routes: Routes, probes: Probes, totals: Totals) -> None:
    """Short routes, one token's transport at a time (`_compare`)."""
    if routes.kind == "other":
        return
    at = torch.tensor(probes.positions, device=routes.q.device)
    of = torch.tensor(probes.of_length, device=routes.q.device)
    moved = routes.by_head(routes.q[at])
    for length in range(1, min(SINGLE_STEPS, probes.positions[-1]) + 1):
        there = at >= length
        at, of, moved = at[there], of[there], moved[:, :, there]
        moved = routes.step(moved, at - length + 1)
        _compare(routes, probes, at, of, moved, at - length, totals)


def _routes_at(
    routes: Routes, probes: Probes, moved: Tensor, first: int, start: int, totals: Totals
) -> None:
    """Longer routes, at a walk's borders."""
    at = torch.tensor(probes.positions[first:], device=moved.device)
    of = torch.tensor(probes.of_length[first:], device=moved.device)
    long = at - start + 1 > SINGLE_STEPS
    if routes.kind != "other" and start > 0 and long.any():
        at, of, moved = at[long], of[long], moved[:, :, long]
        _compare(routes, probes, at, of, moved, torch.full_like(at, start - 1), totals)


def _compare(
    routes: Routes,
    probes: Probes,
    at: Tensor,
    of: Tensor,
    moved: Tensor,
    to: Tensor,
    totals: Totals,
) -> None:
    """Adds what is left of queries that walked from `at` to behind token `to`, by route length.

    Apart for each context `of` that a query belongs to, `[HQ, lengths, bins]`. With x = M ⋯ M q:
    norm² ‖x‖²/‖q‖², direction cos(x, q), and both in one ⟨x, q⟩/‖q‖².
    """
    bare = routes.by_head(routes.bare_q[at])
    like = routes.unmoved(bare, to).double()
    x = moved.double()
    xx, qq, xq = x.square().sum(-1), like.square().sum(-1), (x * like).sum(-1)
    tiny = torch.finfo(torch.float64).tiny
    parts = (
        xx / qq.clamp(min=tiny),
        xq / (xx * qq).sqrt().clamp(min=tiny),
        xq / qq.clamp(min=tiny),
    )
    bins, shape = len(EDGES), (len(probes.lengths), len(EDGES))
    place = of * bins + torch.bucketize(at - to, EDGES.to(at.device), right=True) - 1
    names = ("kept_square", "kept_cosine", "kept_product")
    for name, part in zip(names, parts, strict=True):
        whole = part.new_zeros(*part.shape[:2], shape[0] * bins)
        whole = whole.index_add_(2, place, part).flatten(0, 1)
        totals.add(**{name: whole.unflatten(1, shape)})
    totals.add(kept_count=torch.bincount(place, minlength=shape[0] * bins).view(shape))
