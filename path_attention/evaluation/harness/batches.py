"""How many rows to read at once: as many as fit, found by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

Request = TypeVar("Request")
Answer = TypeVar("Answer")
_START = 16_384  # tokens
_MOST_ROWS = 256


class BatchSize:
    """Rows of a batch, for requests from the longest to the shortest.

    With a number of rows given it is that. Else a batch has as many rows as a budget of tokens
    allows; on a GPU the budget doubles after each batch until one does not fit, which is tried
    again at half of it, and stays there.
    """

    def __init__(self, rows: int | None = None, *, grows: bool = False) -> None:
        """Raises ValueError naming `batch_size` on a number below 1."""
        if rows is not None and rows < 1:
            raise ValueError(f"batch_size: expected at least 1, got {rows}")
        self.rows, self.grows, self.tokens = rows, grows, _START
        self.largest = 0

    def of(self, length: int) -> int:
        """Rows of a batch whose longest row has so many tokens."""
        if self.rows is not None:
            return self.rows
        return max(1, min(self.tokens // max(length, 1), _MOST_ROWS))

    def run(
        self,
        requests: Sequence[Request],
        length: Callable[[Request], int],
        answer: Callable[[Sequence[Request]], Sequence[Answer]],
    ) -> Iterator[tuple[Request, Answer]]:
        """Each request with its answer, the longest first.

        Raises torch.OutOfMemoryError if not even one row fits.
        """
        left = sorted(requests, key=length, reverse=True)
        while left:
            rows = self.of(length(left[0]))
            batch = left[:rows]
            try:
                answers = answer(batch)
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                torch.cuda.empty_cache()
                self.rows, self.grows = (None if self.rows is None else len(batch) // 2), False
                self.tokens = max(1, len(batch) // 2 * length(left[0]))
                continue
            self.largest = max(self.largest, len(batch))
            if self.grows and len(batch) == rows:
                self.tokens *= 2
            left = left[rows:]
            yield from zip(batch, answers, strict=True)
