"""Windows: inside one document, apart from each other, the same whatever asks for them."""

from __future__ import annotations

import numpy as np
import pytest

from path_attention.evaluation.windows import choose_windows


class Corpus:
    def __init__(self, sizes: list[int]) -> None:
        self.texts = [np.arange(n, dtype=np.uint32) + 1000 * i for i, n in enumerate(sizes)]

    def documents(self, split: str) -> np.ndarray:
        return np.arange(1, len(self.texts)) if split == "heldout" else np.arange(1)

    def document(self, n: int) -> np.ndarray:
        return self.texts[n]

    def tokenizer(self) -> None: ...


CORPUS = Corpus([900, 101, 100, 350, 250])


def test_windows_lie_in_heldout_documents_and_share_no_target():
    windows = choose_windows(CORPUS, length=100, targets=7, limit=99)
    assert windows.longest == 100
    assert sorted(windows.document) == [1, 3, 3, 3, 4, 4]
    assert np.array_equal(windows.tokens // 1000, np.repeat(windows.document[:, None], 101, 1))
    assert (np.diff(windows.tokens) == 1).all()
    inputs = windows.tokens[:, :-1].ravel()
    assert len(set(inputs)) == len(inputs)
    targets = windows.tokens[:, -7:].ravel()
    assert len(set(targets)) == len(targets)


def test_every_document_comes_before_any_comes_twice():
    windows = choose_windows(CORPUS, length=100, targets=1, limit=3)
    assert sorted(windows.document) == [1, 3, 4]
    assert (windows.tokens[:, 0] % 1000 == 0).all()


def test_seed_decides_the_order_alone():
    a, b = (choose_windows(CORPUS, length=100, targets=1, limit=4, seed=3) for _ in range(2))
    assert np.array_equal(a.tokens, b.tokens) and a.digest == b.digest
    orders = {
        tuple(choose_windows(CORPUS, length=100, targets=1, limit=3, seed=s).document)
        for s in range(8)
    }
    assert len(orders) > 1


def test_digest_changes_with_tokens_and_targets():
    a = choose_windows(CORPUS, length=100, targets=1, limit=4)
    b = choose_windows(CORPUS, length=100, targets=2, limit=4)
    c = choose_windows(Corpus([900, 101, 100, 350, 251]), length=100, targets=1, limit=9)
    d = choose_windows(CORPUS, length=100, targets=1, limit=9)
    assert a.digest != b.digest and c.digest == d.digest
    CORPUS.texts[3][200] += 1
    changed = choose_windows(CORPUS, length=100, targets=1, limit=9)
    CORPUS.texts[3][200] -= 1
    assert changed.digest != d.digest


def test_a_document_needs_one_token_more_than_the_length():
    assert len(choose_windows(CORPUS, length=349, targets=1, limit=9).tokens) == 1
    with pytest.raises(ValueError, match=r"lengths: expected at most 349 .*longest has 350 tokens"):
        choose_windows(CORPUS, length=350, targets=1, limit=9)
