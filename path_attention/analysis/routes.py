"""What a layer's heads meet on one sequence, and how queries walk back along it.

A route from key j to query i is the product M_{j+1} ⋯ M_i of its tokens' transports:

    score_ij = scale · k_jᵀ M_{j+1} ⋯ M_i q_i

Queries walk from their place to the left, segment by segment; each segment's keys wait at its end.
So a few queries meet every key before them in memory O(T · D): no T × T matrix, no table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from path_attention.nn.normalizer import NORMALIZERS
from path_attention.ops.arguments import check_tensors
from path_attention.ops.rotation import Rotation, accumulate_angles
from path_attention.ops.transport import chunk_transport

SEGMENT = 512  # tokens that a walk takes at once, at most


@dataclass(frozen=True, eq=False)
class Routes:
    """One layer's heads on one sequence: HQ query heads, H key heads, in float32 or float64.

    Attributes:
        q, k, v: `[T, HQ, D]`, `[T, H, D]`, `[T, H, DV]`, moved by what needs no operator: turned by
            `turns`, if there are any.
        bare_q, bare_k: the same before their transport.
        scale: of scores.
        w, beta: `[T, H, n, D]`, `[T, H, n]` of Householder factors, H_t = H_{t,1} ⋯ H_{t,n}.
        turns: complex `[T, H, D/2]`, e^{iΦ_t} of the running angle; M_t turns by Φ_t − Φ_{t−1}.
        matrices: `[T, H, D, D]`, M_t itself.
        log_forget: `[T, HQ]`, what each step adds to logits.
        normalizer: "softmax", "stick_breaking" or "linear".
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bare_q: Tensor
    bare_k: Tensor
    scale: float
    w: Tensor | None = None
    beta: Tensor | None = None
    turns: Tensor | None = None
    matrices: Tensor | None = None
    log_forget: Tensor | None = None
    normalizer: str = "softmax"

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        w: Tensor | None = None,
        beta: Tensor | None = None,
        angles: Tensor | None = None,
        matrices: Tensor | None = None,
        log_forget: Tensor | None = None,
        scale: float | None = None,
        moves_values: bool = False,
        normalizer: str = "softmax",
    ) -> Routes:
        """From tensors of one sequence, with one kind of transport or none.

        Args:
            q: `[T, HQ, D]`.
            k: `[T, H, D]`.
            v: `[T, H, DV]`.
            w: `[T, H, D]` or `[T, H, n, D]` of unit norm, with beta `[T, H]` or `[T, H, n]`.
            angles: `[T, H, D/2]` in radians: M_t turns the pair (n, n + D/2) by angles[t, :, n].
            matrices: `[T, H, D, D]`, M_t itself.
            log_forget: `[T, HQ]`.
            scale: of scores; None for D^-½.
            moves_values: values move as keys do, and outputs back (angles only).
            normalizer: as in `Routes`.

        Raises:
            ValueError: naming the argument, what came, and what was expected.
        """
        named = {"w": w, "beta": beta, "log_forget": log_forget}
        batched = (None if x is None else x[None] for x in (q, k, v, *named.values()))
        check_tensors(*batched)  # pyright: ignore[reportArgumentType]
        _check(q, k, w, angles, matrices, moves_values, normalizer)
        dtype = torch.promote_types(q.dtype, torch.float32)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        bare_q, bare_k, turns = q, k, None
        if angles is not None:
            total, _ = accumulate_angles(angles.to(dtype)[None])
            turn = Rotation.by(total).turn
            q, k = turn(q[None])[0], turn(k[None])[0]
            v = turn(v[None])[0] if moves_values else v
            turns = torch.polar(torch.ones_like(total[0]), total[0])
        matrices = None if matrices is None else matrices.to(dtype)
        if w is not None and beta is not None:
            w = w.to(dtype).unflatten(1, (k.shape[1], -1)) if w.dim() == 3 else w.to(dtype)
            beta = beta.to(dtype).reshape(w.shape[:3])
        return cls(
            q, k, v, bare_q, bare_k, q.shape[2] ** -0.5 if scale is None else scale,
            w, beta, turns, matrices, None if log_forget is None else log_forget.to(dtype),
            normalizer,
        )  # fmt: skip

    @property
    def kind(self) -> str:
        """ "householder", "rotation", "matrices", "none", or "other": moved in some other way."""
        if self.w is not None:
            return "householder"
        if self.turns is not None:
            return "rotation"
        if self.matrices is not None:
            return "matrices"
        return "none" if self.q is self.bare_q else "other"

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.k)

    @property
    def group(self) -> int:
        """G, query heads of a key head."""
        return self.q.shape[1] // self.k.shape[1]

    def by_head(self, x: Tensor) -> Tensor:
        """Rows of queries `[P, HQ, …]` → `[H, G, P, …]`."""
        return x.unflatten(1, (self.k.shape[1], self.group)).movedim(0, 2)

    def dense(self, start: int, stop: int) -> Tensor:
        """M of the tokens from start ≥ 1 up to stop, `[stop − start, H, D, D]`."""
        H, D = self.k.shape[1:]
        whole = torch.eye(D, dtype=self.k.dtype, device=self.k.device)
        whole = whole.expand(stop - start, H, D, D)
        if self.matrices is not None:
            return self.matrices[start:stop]
        if self.w is not None and self.beta is not None:
            for n in range(self.w.shape[2]):
                w, beta = self.w[start:stop, :, n], self.beta[start:stop, :, n, None, None]
                whole = whole - (whole @ w[..., None]) * beta * w[..., None, :]
        if self.turns is not None:
            before, here = self.turns[start - 1 : stop - 1], self.turns[start:stop]
            whole = turn_matrix(before).mT @ whole @ turn_matrix(here)
        return whole

    def step(self, x: Tensor, tokens: Tensor) -> Tensor:
        """One token's transport of moved queries: x `[H, G, P, D]`, its token for each of P."""
        if self.matrices is not None:
            return torch.einsum("phde,hgpe->hgpd", self.matrices[tokens], x)
        if self.w is not None and self.beta is not None:
            for n in range(self.w.shape[2] - 1, -1, -1):
                w = self.w[tokens, :, n].transpose(0, 1)[:, None]  # [H, 1, P, D]
                beta = self.beta[tokens, :, n].transpose(0, 1)[:, None, :, None]
                x = x - beta * (x * w).sum(-1, keepdim=True) * w
        return x

    def unmoved(self, x: Tensor, at: Tensor) -> Tensor:
        """Bare queries x `[H, G, P, D]` as moved queries would look that stand behind token `at`.

        at: int64 `[P]`; −1 is before the first token, where nothing is turned.
        """
        if self.turns is None:
            return x
        turns = torch.where((at < 0)[:, None, None], 1.0, self.turns[at.clamp(min=0)])
        turns = turns.transpose(0, 1)[:, None]  # [H, 1, P, D/2]
        a, b = x.chunk(2, -1)
        return torch.cat([a * turns.real - b * turns.imag, b * turns.real + a * turns.imag], -1)

    def segment(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Keys at the segment's end `[S, H, D]`, and its product M_start ⋯ M_{stop−1} `[H, D, D]`.

        None where the operator has nothing to move.
        """
        k = self.k[start:stop]
        if self.w is not None and self.beta is not None:
            w, beta = self.w[None, start:stop], self.beta[None, start:stop]
            none = k.new_empty(1, len(k), 0, k.shape[2])
            _, moved, product = chunk_transport(none, k[None], w, beta)
            return moved[0], product[0]
        if self.matrices is None:
            return k, None
        each, moved = self.matrices[start:stop], []
        product = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(k.shape[1], -1, -1)
        for n in range(len(k) - 1, -1, -1):
            moved.append((k[n, :, None] @ product)[:, 0])
            product = each[n] @ product
        return torch.stack(moved[::-1]), product


@dataclass(frozen=True, eq=False)
class Tile:
    """What the queries from `first` on meet in the tokens from start up to stop.

    Attributes:
        start, stop: of the segment.
        first: the first of the walk's queries that stand behind it.
        scores: `[HQ, A, S]`, scale · kᵀ M ⋯ M q of A queries and S keys.
        decay: `[HQ, A, S]`, Σ log_forget between; None without a decay.
        moved: `[H, G, A, D]`, the queries once they have walked the segment.
    """

    start: int
    stop: int
    first: int
    scores: Tensor
    decay: Tensor | None
    moved: Tensor


def walk(routes: Routes, positions: Sequence[int], segment: int = SEGMENT) -> Iterator[Tile]:
    """Walk queries at rising positions back to the first token, meeting every key on the way.

    A segment ends where a query stands, so that it meets its own segment as any other. The scores
    of one segment are held at a time.
    """
    last = positions[-1] + 1
    borders = sorted({*range(0, last, segment), last, *(p + 1 for p in positions)})
    at = torch.tensor(positions, device=routes.q.device)
    moved = routes.by_head(routes.q[at]).clone()
    decay = None if routes.log_forget is None else routes.by_head(routes.log_forget[at]) * 0
    for start, stop in reversed(list(pairwise(borders))):
        first = next(n for n, p in enumerate(positions) if p >= stop - 1)
        k, product = routes.segment(start, stop)
        x = moved[:, :, first:]
        scores = routes.scale * (x.flatten(1, 2) @ k.permute(1, 2, 0)).unflatten(1, x.shape[1:3])
        between = None
        if decay is not None and routes.log_forget is not None:
            gates = routes.by_head(routes.log_forget[start:stop])  # [H, G, S]
            after = gates.flip(-1).cumsum(-1).flip(-1)  # each key's own gate included
            between = (decay[:, :, first:, None] + (after - gates)[:, :, None]).flatten(0, 1)
            decay[:, :, first:] += after[:, :, :1]
        if product is not None:
            moved[:, :, first:] = x @ product[:, None].mT
        yield Tile(start, stop, first, scores.flatten(0, 1), between, moved[:, :, first:])


def turn_matrix(turns: Tensor) -> Tensor:
    """`[…, D, D]` that multiplies pair (n, n + D/2), as a complex number, by turns `[…, D/2]`.

    A mean of turns gives the mean of their matrices.
    """
    real, imaginary = torch.diag_embed(turns.real), torch.diag_embed(turns.imag)
    return torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], -2)


def _check(
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    angles: Tensor | None,
    matrices: Tensor | None,
    moves_values: bool,
    normalizer: str,
) -> None:
    named = {"w": w, "angles": angles, "matrices": matrices}
    given = [name for name, x in named.items() if x is not None]
    if len(given) > 1:
        raise ValueError(f"{given[1]}: expected one kind of transport, got {' and '.join(given)}")
    T, H, D = k.shape
    shapes = {"angles": (angles, (T, H, D // 2)), "matrices": (matrices, (T, H, D, D))}
    for name, (x, shape) in shapes.items():
        if isinstance(x, Tensor) and tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    if angles is not None and D % 2:
        raise ValueError(f"angles: expected an even head size, got {D}")
    if moves_values and angles is None:
        raise ValueError("moves_values: expected False without angles, got True")
    if normalizer not in NORMALIZERS:
        raise ValueError(f"normalizer: expected one of {list(NORMALIZERS)}, got {normalizer!r}")
