"""Packing: documents cut to the context length, shuffled, laid end to end in rows of equal length.

Row r is a pure function of (corpus, options, r): the step number alone says where training stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from path_attention.ops.context_split import ContextSplit
from path_attention.ops.packing import Packing
from path_attention.training.corpus import Split, TokenCorpus

IGNORED = -100


@dataclass(frozen=True)
class Row:
    """One packed sequence.

    Attributes:
        input_ids: int64 `[1, T]`.
        labels: int64 `[1, T]`: input_ids, with −100 at each piece's first token, which nothing that
            may be seen predicts (the model shifts labels itself).
        packing: the borders of the pieces.
        documents: each piece's document.
        split: how the row lies on the processes that share it; None where each has its own.
    """

    input_ids: Tensor
    labels: Tensor
    packing: Packing
    documents: tuple[int, ...]
    split: ContextSplit | None = None

    @property
    def targets(self) -> int:
        """How many tokens are predicted."""
        return self.input_ids.shape[1] - len(self.packing.lengths)

    def batch(self) -> tuple[Tensor, Tensor, Packing | None]:
        """input_ids and labels `[N, T / N]` without borders, where all N pieces are as long.

        Else as they are, with their borders. A batch needs no kernels for packed documents.
        """
        lengths = self.packing.lengths
        if min(lengths) < max(lengths):
            return self.input_ids, self.labels, self.packing
        shape = (len(lengths), lengths[0])
        return self.input_ids.reshape(shape), self.labels.reshape(shape), None


class Rows(Protocol):
    """What makes rows: `PackedRows`, or a mixture of them."""

    row_tokens: int
    epoch_tokens: int

    def row(self, number: int) -> Row: ...


class PackedRows:
    """The endless sequence of rows of one split of a corpus.

    Each document is cut into pieces of `context_length` tokens (its last may be shorter). The
    pieces of every epoch are laid end to end in an order drawn from (seed, epoch), epochs one
    behind the other, and this stream is cut every `row_tokens` tokens: row r is its tokens
    [r · row_tokens, (r + 1) · row_tokens). No padding, no token left out; a piece on a row's edge
    becomes two. Pieces of a row never see each other (`Row.packing`).

    Args:
        corpus: an opened corpus.
        split: "train" or "heldout".
        context_length: the longest piece, in tokens.
        row_tokens: tokens of a row.
        seed: of the order.

    Raises:
        ValueError: the split has no tokens, or a length is out of range.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        split: Split,
        *,
        context_length: int,
        row_tokens: int,
        seed: int,
    ) -> None:
        if context_length < 2:
            raise ValueError(f"context_length: expected at least 2, got {context_length}")
        if row_tokens < 2:
            raise ValueError(f"row_tokens: expected at least 2, got {row_tokens}")
        self.corpus = corpus
        self.row_tokens = row_tokens
        self.seed = seed
        documents = corpus.documents(split)
        lengths = corpus.borders[documents + 1] - corpus.borders[documents]
        counts = -(-lengths // context_length)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self.documents = np.repeat(documents, counts)  # of each piece
        self.starts = corpus.borders[self.documents] + within * context_length
        ends = corpus.borders[self.documents + 1]
        self.lengths = np.minimum(ends - self.starts, context_length)
        self.epoch_tokens = int(self.lengths.sum())
        if not self.epoch_tokens:
            raise ValueError(f"corpus: expected documents in split {split!r}, got none")
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def row(self, number: int) -> Row:
        """Row `number`, counted from 0."""
        position = number * self.row_tokens
        missing = self.row_tokens
        tokens: list[np.ndarray] = []
        documents: list[int] = []
        while missing:
            epoch, offset = divmod(position, self.epoch_tokens)
            order, ends = self._order(epoch)
            place = int(np.searchsorted(ends, offset, side="right"))
            piece = order[place]
            left = int(ends[place]) - offset  # of the piece
            taken = min(left, missing)
            end = self.starts[piece] + self.lengths[piece] - left + taken
            tokens.append(self.corpus.tokens[end - taken : end])
            documents.append(int(self.documents[piece]))
            position += taken
            missing -= taken
        packing = Packing.from_lengths([len(piece) for piece in tokens])
        input_ids = torch.from_numpy(np.concatenate(tokens).astype(np.int64))[None]
        labels = input_ids.clone()
        labels[0, packing.cu_seqlens[:-1].long()] = IGNORED
        return Row(input_ids, labels, packing, tuple(documents))

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of pieces in an epoch, and where each ends in it."""
        kept = self._epoch
        if kept is None or kept[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.starts))
            kept = self._epoch = (epoch, order, np.cumsum(self.lengths[order]))
        return kept[1:]


class RowsAhead:
    """Makes rows before they are asked for, in threads of this process. The rows are the same.

    Args:
        rows: where they come from.
        workers: threads; 0 makes each row when it is asked for.
    """

    def __init__(self, rows: Rows, workers: int) -> None:
        self.rows = rows
        self._pool = ThreadPoolExecutor(workers, "rows") if workers else None
        self._coming: dict[int, Future[Row]] = {}

    def get(self, numbers: Sequence[int], then: Sequence[int] = ()) -> list[Row]:
        """These rows; those of `then` are begun."""
        if self._pool is None:
            return [self.rows.row(number) for number in numbers]
        coming = self._coming
        for number in (*numbers, *then):
            if number not in coming:
                coming[number] = self._pool.submit(self.rows.row, number)
        return [coming.pop(number).result() for number in numbers]

    def close(self) -> None:
        """Drop what nobody asked for."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._coming.clear()
