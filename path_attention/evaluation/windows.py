"""Windows of held-out documents: the same target tokens, read with shorter and longer context."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np


class Corpus(Protocol):
    """What evaluation needs of a corpus; `training.corpus.TokenCorpus` has it."""

    def documents(self, split: Literal["heldout"]) -> Sequence[int] | np.ndarray: ...
    def document(self, n: int) -> np.ndarray: ...
    def tokenizer(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Windows:
    """N windows of L consecutive tokens and the one behind them, each inside one document.

    The targets are each window's last `targets` tokens, whatever the length. **Length ℓ** means
    that the model reads exactly the ℓ tokens that end just before the last target, and nothing
    else: the first target is predicted from ℓ − targets + 1 tokens, the last one from ℓ. A window
    cut from the middle of a document has no beginning-of-text token at any length.

    Attributes:
        tokens: int64 `[N, L + 1]`.
        document: int64 `[N]`: the window's document, as the corpus counts them.
        targets: the number of target tokens in each window.
    """

    tokens: np.ndarray
    document: np.ndarray
    targets: int

    @property
    def longest(self) -> int:
        """L: the most tokens that a model can be given."""
        return self.tokens.shape[1] - 1

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that change with any token, border or target."""
        seen = hashlib.sha256(f"{self.tokens.shape} {self.targets}".encode())
        seen.update(self.tokens.astype("<i8").tobytes())
        seen.update(self.document.astype("<i8").tobytes())
        return seen.hexdigest()[:16]


def check_lengths(lengths: Sequence[int], targets: int) -> None:
    """Raise ValueError unless the lengths rise and the shortest one holds the targets."""
    if not lengths or any(b <= a for a, b in pairwise(lengths)):
        raise ValueError(
            f"lengths: expected rising numbers of tokens without repeats, got {list(lengths)}"
        )
    if not 1 <= targets <= lengths[0]:
        raise ValueError(
            f"targets: expected between 1 and the shortest length {lengths[0]}, got {targets}"
        )


def choose_windows(
    corpus: Corpus, *, length: int, targets: int, limit: int, seed: int = 0
) -> Windows:
    """Take at most `limit` windows of `length` + 1 tokens from the held-out documents.

    Every document that is long enough gives its first window before any gives its second, in an
    order that depends on `seed` alone; windows of a document share no target and no input token.

    Raises:
        ValueError: if no held-out document is long enough (it says how long the longest is).
    """
    if limit < 1:
        raise ValueError(f"windows: expected at least 1, got {limit}")
    heldout = [int(n) for n in corpus.documents("heldout")]
    sizes = {n: len(corpus.document(n)) for n in heldout}
    fitting = [n for n in heldout if sizes[n] > length]
    if not fitting:
        longest = max(sizes.values(), default=0)
        raise ValueError(
            f"lengths: expected at most {max(longest - 1, 0)} with this corpus, got {length}: of "
            f"its {len(heldout)} held-out documents the longest has {longest} tokens"
        )
    order = np.random.default_rng(seed).permutation(len(fitting))
    chosen = [
        (fitting[i], start * length)
        for start in range(max(sizes.values()) // length)
        for i in order
        if sizes[fitting[i]] > (start + 1) * length
    ][:limit]
    tokens = [corpus.document(n)[start : start + length + 1] for n, start in chosen]
    return Windows(
        tokens=np.stack(tokens).astype(np.int64),
        document=np.array([n for n, _ in chosen], dtype=np.int64),
        targets=targets,
    )
