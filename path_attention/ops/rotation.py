"""Accumulated rotations: each pair of a head turns by the sum of its tokens' angles.

Sums are kept in whole units of 2⁻⁵² turns, modulo one turn: sums of integers are exact whatever
their order, so a chunk, a packed document and a whole sequence give the same bits, and the error
does not grow with the length.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops.packing import Packing

_TURN = 2**52  # units; integers of 64 bits wrap at a whole number of turns, which changes nothing
_PIECE = 64  # tokens that are summed in a row before sums of pieces are
_WORD = 2**32 - 1


class Rotation(NamedTuple):
    """Turns the pair (n, n + D/2) of a head by an angle of its own.

        turn: (a, b) ↦ (a cos φ − b sin φ, b cos φ + a sin φ);  turn_back by −φ

    Pairing by halves is that of Llama checkpoints. x `[B, T, G·H, D]` turns by angles of
    `[B, T, H, D/2]` (a group of G heads by those of its key head, H may be 1), computed in the
    angles' dtype; comes back in x's.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def by(cls, angles: Tensor) -> Rotation:
        """The rotation by angles `[B, T, H, D/2]` in radians."""
        return cls(angles.cos(), angles.sin())

    def turn(self, x: Tensor) -> Tensor:
        return self._apply(x, self.sin)

    def turn_back(self, x: Tensor) -> Tensor:
        return self._apply(x, -self.sin)

    def _apply(self, x: Tensor, sin: Tensor) -> Tensor:
        heads = self.cos.shape[2]
        cos, sin = self.cos[:, :, :, None], sin[:, :, :, None]  # [B, T, H, 1, D / 2]
        a, b = x.to(cos.dtype).unflatten(2, (heads, -1)).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(2, 3).to(x.dtype)


def accumulate_angles(
    angles: Tensor,
    *,
    state: Tensor | None = None,
    packing: Packing | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The running angle Θ_t = Σ_{s≤t} angles_s of each document, modulo 2π, in [−π, π).

    Each angle is rounded to 2⁻⁵² turns and Θ to its dtype: an error of one rounding of π and 7e-16
    a token. Source of the use: arXiv 2606.24975. Differentiable; gradients are summed in float64.

    Args:
        angles: `[B, T, H, P]` in radians, float32 or float64.
        state: the last running sum of the chunk before, int64 `[B, H, P]`; None at a start.
        packing: borders of packed documents (B = 1): each starts at 0. Not together with a state.
        valid: bool `[B, T]`, False for padding, which turns nothing; None where all are real.

    Returns:
        Θ `[B, T, H, P]` in the angles' dtype, and the running sums that it comes from, int64.

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    _check(angles, state, packing, valid)
    if valid is not None:
        angles = angles.masked_fill(~valid[:, :, None, None], 0)
    if state is None:
        state = angles.new_zeros((len(angles), *angles.shape[2:]), dtype=torch.int64)
    first = last = None
    if packing is not None:
        token = torch.arange(packing.total, device=angles.device)
        borders = packing.cu_seqlens.to(device=angles.device, dtype=torch.int64)
        document = torch.searchsorted(borders, token, right=True)
        first, last = borders[document - 1], borders[document] - 1  # each token's document
    return _Accumulate.apply(angles, state, first, last)  # pyright: ignore[reportReturnType]


class _Accumulate(torch.autograd.Function):
    """(angles, state, first, last) → (Θ, its units); first, last `[T]` bound each document."""

    @staticmethod
    def forward(
        ctx: Any, angles: Tensor, state: Tensor, first: Tensor | None, last: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        units = to_units(angles)
        total = running_sum(units) + state[:, None]
        if first is not None:
            total = total - (total - units).index_select(1, first)
        total = within_a_turn(total)
        ctx.save_for_backward(last)
        ctx.mark_non_differentiable(total)
        return to_angles(total, angles.dtype), total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].double()
        after = running_sum(grad.flip(1)).flip(1)
        (last,) = ctx.saved_tensors
        if last is not None:
            after = after - (after - grad).index_select(1, last)
        return after.to(grads[0].dtype), None, None, None


def to_units(angles: Tensor) -> Tensor:
    """int64: angles in radians, modulo a turn, rounded to whole units of 2⁻⁵² turns."""
    turns = angles.double() / (2 * math.pi)
    return ((turns - turns.round()) * _TURN).round().to(torch.int64)


def within_a_turn(units: Tensor) -> Tensor:
    """The same modulo a turn: from minus half a turn up to half a turn."""
    return ((units + _TURN // 2) & (_TURN - 1)) - _TURN // 2


def to_angles(units: Tensor, dtype: torch.dtype) -> Tensor:
    """Units within a turn in radians."""
    return (units.double() * (2 * math.pi / _TURN)).to(dtype)


def running_sum(x: Tensor) -> Tensor:
    """Sums over dimension 1 up to and with each place, in pieces; repeatable on any device.

    x `[B, T, C, …]`, int64 or float64.
    """
    T = x.shape[1]
    if T <= _PIECE:
        if not x.is_floating_point():
            return x.cumsum(1)
        upto = torch.ones(T, T, dtype=x.dtype, device=x.device).tril()
        return (upto @ x.flatten(2)).reshape(x.shape)
    padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -T % _PIECE))
    pieces = padded.unflatten(1, (-1, _PIECE))  # [B, N, _PIECE, …]
    inside = running_sum(pieces.flatten(0, 1)).unflatten(0, pieces.shape[:2])
    before = running_sum(inside[:, :, -1]) - inside[:, :, -1]
    return (inside + before[:, :, None]).flatten(1, 2)[:, :T]


def random_angles(
    keys: Tensor, heads: int, pairs: int, *, seed: int, bound: float, dtype: torch.dtype
) -> Tensor:
    """Angles drawn uniformly from ±bound, the same for the same key, seed, head and pair anywhere.

    A draw is a hash of integers (two rounds of a 32-bit mixer), not a generator's next number: it
    does not depend on the device, the process, the chunk or what was drawn before.

    Args:
        keys: int64 `[B, T]`, at least 0: positions, or token ids.
        heads, pairs: H and P.
        seed: of the whole table.
        bound: the largest angle, in radians.
        dtype: of the angles.

    Returns:
        `[B, T, H, P]`.
    """
    rows = len(keys)
    if keys.stride(0) == 0:  # positions of a batch: every row is the first
        keys = keys[:1]
    drawn = _draw(keys, heads * pairs, seed, bound, dtype).unflatten(-1, (heads, pairs))
    return drawn.expand(rows, -1, -1, -1)


# torch.compile's inliner would write each use of an intermediate result out anew.
@torch.library.custom_op("path_attention::random_angles", mutates_args=())
def _draw(keys: Tensor, columns: int, seed: int, bound: float, dtype: torch.dtype) -> Tensor:
    column = torch.arange(1, columns + 1, device=keys.device)
    row = _mix(_mix(keys) ^ _mix(torch.full_like(keys, (seed & _WORD) + 0x51)))
    drawn = _mix(_mix(row[..., None] + column * 0x9E3779B1) ^ _mix(column))
    return ((drawn.double() + 0.5) * (bound * 2.0**-31) - bound).to(dtype)  # inside ± bound


@_draw.register_fake
def _(keys: Tensor, columns: int, seed: int, bound: float, dtype: torch.dtype) -> Tensor:
    return keys.new_empty(*keys.shape, columns, dtype=dtype)


def _mix(x: Tensor) -> Tensor:
    """A permutation of the integers below 2³² that spreads each bit; int64, products below 2⁶³."""
    x = x & _WORD
    x = (x ^ (x >> 16)) * 0x21F0AAAD & _WORD
    x = (x ^ (x >> 15)) * 0x735A2D97 & _WORD
    return x ^ (x >> 15)


def _check(
    angles: Tensor, state: Tensor | None, packing: Packing | None, valid: Tensor | None
) -> None:
    if angles.dim() != 4 or angles.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            "angles: expected [B, T, H, P] in float32 or float64, "
            f"got {list(angles.shape)} in {angles.dtype}"
        )
    B, T, H, P = angles.shape
    if packing is not None and (B != 1 or packing.total != T):
        raise ValueError(
            f"packing: expected angles of [1, {packing.total}, H, P], got {[B, T, H, P]}"
        )
    if state is not None:
        if packing is not None:
            raise ValueError("state: expected None with packed documents, got a tensor")
        if tuple(state.shape) != (B, H, P) or state.dtype != torch.int64:
            raise ValueError(
                f"state: expected int64 {[B, H, P]}, got {state.dtype} {list(state.shape)}"
            )
    if valid is not None and tuple(valid.shape) != (B, T):
        raise ValueError(f"valid: expected shape {[B, T]}, got {list(valid.shape)}")
