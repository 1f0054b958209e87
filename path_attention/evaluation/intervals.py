"""Intervals of scores: Wilson's for shares of right answers, the bootstrap for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_Z = 1.959963984540054  # of 95 %, two-sided
_RESAMPLES = 1000


def wilson(right: int, counted: int) -> tuple[float, float]:
    """95 % score interval of a share (Wilson, JASA 22, 1927); never empty at 0 or 1.

    >>> [round(x, 4) for x in wilson(0, 10)], [round(x, 4) for x in wilson(8, 10)]
    ([0.0, 0.2775], [0.4902, 0.9433])

    Raises:
        ValueError: unless 0 ≤ right ≤ counted and counted ≥ 1.
    """
    if not 0 <= right <= counted or counted < 1:
        raise ValueError(f"right: expected 0 to counted = {counted} ≥ 1, got {right}")
    p, n = right / counted, counted
    middle = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
    low = 0.0 if right == 0 else middle - half
    high = 1.0 if right == counted else middle + half
    return low, high


def score_interval(
    values: Sequence[Any], aggregate: Callable[[Sequence[Any]], float], seed: int = 0
) -> tuple[float, float] | tuple[None, None]:
    """95 % interval of `aggregate(values)` over documents, one value each.

    Values that are all 0 or 1 have Wilson's; else documents are drawn again 1,000 times and the
    middle 95 % taken. (None, None) with fewer than two documents, or if every drawing agrees
    although it is no share, where nothing is known.

    >>> [round(x, 3) for x in score_interval([1, 0, 1, 1], lambda v: sum(v) / len(v))]
    [0.301, 0.954]
    """
    if len(values) < 2:
        return None, None
    if all(isinstance(v, (int, float)) and v in (0, 1) for v in values):
        return wilson(int(sum(values)), len(values))
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(values), (_RESAMPLES, len(values)))
    found = [aggregate([values[i] for i in row]) for row in drawn.tolist()]
    low, high = np.percentile(found, [2.5, 97.5])
    return (float(low), float(high)) if high > low else (None, None)


def mean_interval(
    scores: Sequence[tuple[float, float | None, float | None]],
) -> tuple[float, float | None, float | None]:
    """The mean of independent scores (score, low, high), with its interval.

    The distances to the ends add up in squares (MOVER: Zou and Donner, Statistics in Medicine 27,
    2008), so that Wilson's ends at 0 and 1 are not lost. No interval where one score has none.

    >>> [round(x, 3) for x in mean_interval([(0.5, 0.4, 0.6), (0.0, 0.0, 0.1)])]
    [0.25, 0.2, 0.321]
    """
    n = len(scores)
    mean = sum(score for score, _, _ in scores) / n
    below = [score - low for score, low, _ in scores if low is not None]
    above = [high - score for score, _, high in scores if high is not None]
    if len(below) < n or len(above) < n:
        return mean, None, None
    return mean, mean - math.hypot(*below) / n, mean + math.hypot(*above) / n
