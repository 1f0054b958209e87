"""The theorems' numbers: what is predicted, for measurements to stand beside.

Letters: d head size, K near and M far keys, λ a bound on |logit|, u a score in the units
that its bound has. Source, where none is named: arXiv 2606.24975.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

_N = TypeVar("_N", float, Tensor)


def far_mass_bound(near: Tensor, far: Tensor, spread: Tensor) -> Tensor:
    """The least share of attention that M far keys take: M / (M + K e^{2λ}).

    Holds for any softmax row whose largest near logit is at most 2λ above its least far one, hence
    for |logit| ≤ λ. It goes to 1 as M grows: no transport alone holds for ever.

    Args:
        near: K, any shape.
        far: M.
        spread: 2λ, in nats.

    Returns:
        The bound, 0 where there is no far key. Computed by logarithms: no λ overflows.
    """
    near, far = near.to(spread.dtype), far.to(spread.dtype)
    return torch.sigmoid(far.log() - near.log() - spread)


def length_of_half(near: float, spread: float) -> float:
    """The context K (1 + e^{2λ}) at which `far_mass_bound` is 1/2; inf beyond float64."""
    return near * (1 + math.exp(spread)) if spread < 700 else math.inf


def cap_tail(u: _N) -> _N:
    """P(|kᵀP q| √d / (‖k‖‖q‖) ≥ u) ≤ 2 e^{−u²/2} for a random orthogonal P.

    P q is uniform on its sphere, and a cap at height t takes at most e^{−d t²/2} of it: the
    concentration of measure that Lévy found, for the one function that a score is.
    """
    return _gaussian_tail(u)


def hoeffding_tail(u: _N) -> _N:
    """P(|Σ_n a_n cos φ_n| ≥ u √(Σ a_n²)) ≤ 2 e^{−u²/2} for independent uniform φ_n.

    A score under rotations of pairs: a_n = |q_n||k_n| of each pair, each term within ±a_n
    (Hoeffding 1963, theorem 2).
    """
    return _gaussian_tail(u)


def _gaussian_tail(u: _N) -> _N:
    if isinstance(u, Tensor):
        return (2 * (-u * u / 2).exp()).clamp(max=1)
    return min(1.0, 2 * math.exp(-u * u / 2))


def cap_share(u: float, d: int) -> float:
    """The exact share of a sphere in d ≥ 2 dimensions with |x₁| √d ≥ u: what `cap_tail` bounds.

    Σ over the law of x₁ with density ∝ (1 − x²)^{(d−3)/2}, as ∫ sin^{d−2} over the polar angle.
    """
    if u >= math.sqrt(d):
        return 0.0
    angle = torch.linspace(0, math.pi / 2, 20001, dtype=torch.float64)
    density = angle.sin() ** (d - 2)
    top = math.acos(u / math.sqrt(d))
    inner = torch.linspace(0, top, 20001, dtype=torch.float64)
    part = torch.trapezoid(inner.sin() ** (d - 2), inner)
    return (part / torch.trapezoid(density, angle)).item()


def uniform_angle_gap(bound: float) -> float:
    """‖E R(θ)‖ = |E e^{iθ}| = |sin a / a| for θ uniform on [−a, a]."""
    return abs(math.sin(bound) / bound) if bound else 1.0


def householder_gap(mean_beta: float, d: int) -> float:
    """‖E H‖ = 1 − E β / d for H = I − β w wᵀ, w uniform on the sphere and apart from β ∈ [0, 2]."""
    return abs(1 - mean_beta / d)


def householder_kept(mean_beta: float, mean_square: float, d: int) -> float:
    """E ‖H x‖² / ‖x‖² = 1 − (2 E β − E β²) / d, the same w: what one factor leaves of a norm²."""
    return 1 - (2 * mean_beta - mean_square) / d
