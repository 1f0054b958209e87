"""Background text that facts are hidden in, and its words; read from local files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[\"'(A-Z])")
_WORD = re.compile(r"\b[a-z]{3,10}\b")
_LONGEST = 400  # characters of a sentence: beyond, it is a table or a list


@dataclass(frozen=True)
class Background:
    """Sentences of running text, in their order.

    >>> Background.from_texts(["It rained. Nobody came! (They had\\nsaid so.)"]).sentences
    ('It rained.', 'Nobody came!', '(They had said so.)')
    """

    sentences: tuple[str, ...]

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Background:
        """Split texts into sentences; those above 400 characters are left out.

        Raises ValueError naming `background` if there is none.
        """
        found = tuple(
            sentence
            for text in texts
            for sentence in _SENTENCE.split(" ".join(text.split()))
            if 0 < len(sentence) <= _LONGEST
        )
        if not found:
            raise ValueError("background: expected text with sentences, got none")
        return cls(found)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Its different words of 3 to 10 small letters, sorted."""
        return tuple(sorted({w for sentence in self.sentences for w in _WORD.findall(sentence)}))

    def without(self, banned: Iterable[str]) -> Background:
        """The sentences that contain none of some words, in whatever case.

        >>> Background(("A red door.", "Redder.", "Blue.")).without(["red"]).sentences
        ('Redder.', 'Blue.')
        """
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, banned))})\b", re.IGNORECASE)
        return Background.from_texts(s for s in self.sentences if not pattern.search(s))

    def from_place(self, start: int) -> Iterator[str]:
        """Sentences from number `start` on, without end: after the last comes the first."""
        while True:
            yield from self.sentences[start % len(self.sentences) :]
            start = 0

    def draw(self, rng: np.random.Generator, count: int) -> list[str]:
        """So many sentences that follow each other, from a place drawn at random."""
        running = self.from_place(int(rng.integers(len(self.sentences))))
        return [next(running) for _ in range(count)]


def draw_words(rng: np.random.Generator, words: tuple[str, ...], count: int) -> list[str]:
    """Different words. Raises ValueError naming `background` if it has too few."""
    if count > len(words):
        raise ValueError(
            f"background: expected text with at least {count} different words, got {len(words)}"
        )
    return [words[i] for i in rng.choice(len(words), count, replace=False)]
