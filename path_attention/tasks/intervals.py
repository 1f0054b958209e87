"""Exact intervals for a share of errors (Clopper and Pearson, Biometrika 26, 1934)."""

from __future__ import annotations

import math


def error_interval(errors: int, counted: int, confidence: float = 0.95) -> tuple[float, float]:
    """An interval that covers the true share with at least this confidence.

    Two-sided, but for no error at all (or nothing but errors), where it is one-sided: no error in
    n leaves shares up to 1 − (1 − confidence)^(1/n), the "rule of three" 3/n. Counts are taken as
    independent.

    >>> f"{error_interval(0, 3_000_000)[1]:.2e}"
    '9.99e-07'
    >>> [round(x, 4) for x in error_interval(3, 100)]
    [0.0062, 0.0852]

    Raises:
        ValueError: unless 0 ≤ errors ≤ counted and counted ≥ 1.
    """
    if not 0 <= errors <= counted or counted < 1:
        raise ValueError(f"errors: expected 0 to counted = {counted} ≥ 1, got {errors}")
    rest = 1 - confidence
    if errors == 0:
        return 0.0, -math.expm1(math.log(rest) / counted)
    if errors == counted:
        return math.exp(math.log(rest) / counted), 1.0
    low = _bisect(lambda p: 1 - at_most(errors - 1, counted, p), rest / 2)
    high = _bisect(lambda p: 1 - at_most(errors, counted, p), 1 - rest / 2)
    return low, high


def at_most(k: int, n: int, p: float) -> float:
    """P(X ≤ k) of a binomial X of n trials of probability 0 < p < 1; 0 ≤ k < n."""
    return _incomplete_beta(n - k, k + 1, 1 - p, p)


def _bisect(rising, value: float) -> float:
    """Where a function that rises on (0, 1) takes this value, on a logarithmic scale of p."""
    low, high = math.log(1e-15), math.log1p(-1e-15)
    for _ in range(80):
        middle = (low + high) / 2
        if rising(math.exp(middle)) < value:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """I_x(a, b), regularised, with y = 1 − x, by its continued fraction (DLMF 8.17.22)."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, y, x)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front += a * math.log(x) + b * math.log(y)
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    fraction = d
    for m in range(1, 1_000_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 + term * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + term / c
            c = c if abs(c) > tiny else tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(front) * fraction / a
