"""Packed rows: every token once an epoch, documents apart, a pure function of the row's number."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from path_attention.training.corpus import TokenCorpus
from path_attention.training.rows import IGNORED, PackedRows, RowsAhead


def corpus_of(lengths: list[int]) -> SimpleNamespace:
    """Documents of these lengths whose tokens are 0, 1, 2, … all through the corpus."""
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return SimpleNamespace(
        tokens=np.arange(borders[-1], dtype=np.uint16),
        borders=borders,
        documents=lambda split: np.arange(len(lengths)) if split == "train" else np.arange(0),
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    context_length=st.integers(2, 20),
    row_tokens=st.integers(2, 50),
    seed=st.integers(0, 5),
)
def test_rows_hold_every_token_once_an_epoch(
    lengths: list[int], context_length: int, row_tokens: int, seed: int
) -> None:
    corpus = corpus_of(lengths)
    options = {"context_length": context_length, "row_tokens": row_tokens, "seed": seed}
    rows = PackedRows(corpus, "train", **options)  # type: ignore[arg-type]
    total = sum(lengths)
    assert rows.epoch_tokens == total
    stream = []
    for number in range(-(-2 * total // row_tokens)):
        row = rows.row(number)
        assert row.input_ids.shape == row.labels.shape == (1, row_tokens)
        ids = row.input_ids[0]
        stream += ids.tolist()
        assert row.packing.total == row_tokens and len(row.documents) == len(row.packing.lengths)
        starts = row.packing.cu_seqlens[:-1].long()
        assert (row.labels[0, starts] == IGNORED).all()
        assert row.targets == int((row.labels != IGNORED).sum())
        kept = row.labels[0] != IGNORED
        assert torch.equal(row.labels[0][kept], ids[kept])
        for piece, document in zip(
            ids.split(list(row.packing.lengths)), row.documents, strict=True
        ):
            assert 1 <= len(piece) <= context_length
            assert piece.tolist() == list(range(int(piece[0]), int(piece[-1]) + 1))
            assert corpus.borders[document] <= piece[0] <= piece[-1] < corpus.borders[document + 1]
    for epoch in range(2):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_a_row_is_a_function_of_its_number() -> None:
    corpus = corpus_of([7, 30, 3, 18, 60])
    options = {"context_length": 8, "row_tokens": 25}
    one = PackedRows(corpus, "train", seed=3, **options)  # type: ignore[arg-type]
    forwards = [one.row(n) for n in range(20)]
    other = PackedRows(corpus, "train", seed=3, **options)  # type: ignore[arg-type]
    for n in reversed(range(20)):
        row = other.row(n)
        assert torch.equal(row.input_ids, forwards[n].input_ids)
        assert row.packing.lengths == forwards[n].packing.lengths
    elsewhere = PackedRows(corpus, "train", seed=4, **options)  # type: ignore[arg-type]
    assert not torch.equal(elsewhere.row(0).input_ids, forwards[0].input_ids)


def test_epochs_are_shuffled_apart() -> None:
    rows = PackedRows(corpus_of([10] * 10), "train", context_length=10, row_tokens=100, seed=0)  # type: ignore[arg-type]
    first, second = rows.row(0), rows.row(1)
    assert sorted(first.documents) == sorted(second.documents) == list(range(10))
    assert first.documents != second.documents
    assert first.documents != tuple(range(10))


def test_rows_of_a_corpus_on_disk(corpus: TokenCorpus) -> None:
    for split in ("train", "heldout"):
        rows = PackedRows(corpus, split, context_length=24, row_tokens=96, seed=0)
        allowed = set(corpus.documents(split).tolist())
        assert all(set(rows.row(n).documents) <= allowed for n in range(30))
        assert rows.row(0).input_ids.dtype == torch.int64


def test_bad_input_is_refused() -> None:
    corpus = corpus_of([5])
    with pytest.raises(ValueError, match="context_length: expected at least 2, got 1"):
        PackedRows(corpus, "train", context_length=1, row_tokens=8, seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="row_tokens: expected at least 2, got 1"):
        PackedRows(corpus, "train", context_length=8, row_tokens=1, seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected documents in split 'heldout', got none"):
        PackedRows(corpus, "heldout", context_length=8, row_tokens=8, seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_rows_ahead_are_the_rows(corpus: TokenCorpus, workers: int) -> None:
    """Over the end of an epoch, whose order the threads share; asked for in another order too."""
    options = {"context_length": 24, "row_tokens": 64, "seed": 0}
    rows, ahead = (PackedRows(corpus, "train", **options) for _ in range(2))
    last = rows.epoch_tokens // 64
    source = RowsAhead(ahead, workers)
    for first in (0, last - 2, last, 1):
        found = source.get([first, first + 1], [first + 2, first + 3])
        for number, row in zip((first, first + 1), found, strict=True):
            exact = rows.row(number)
            assert row.documents == exact.documents
            assert torch.equal(row.input_ids, exact.input_ids)
            assert torch.equal(row.labels, exact.labels)
    source.close()


def test_pieces_of_one_length_are_a_batch() -> None:
    even = PackedRows(corpus_of([8] * 6), "train", context_length=8, row_tokens=24, seed=0).row(0)
    input_ids, labels, packing = even.batch()
    assert packing is None and input_ids.shape == labels.shape == (3, 8)
    assert (input_ids.flatten() == even.input_ids[0]).all()
    assert (labels[:, 0] == IGNORED).all() and (labels[:, 1:] == input_ids[:, 1:]).all()
    uneven = PackedRows(corpus_of([8, 5, 9]), "train", context_length=8, row_tokens=12, seed=0)
    row = uneven.row(0)
    assert row.batch() == (row.input_ids, row.labels, row.packing)
