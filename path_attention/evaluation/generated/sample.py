"""One generated question, and how much filler fits into a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Sample:
    """A prompt and what a right answer says.

    Attributes:
        prompt: the text to continue, without `prefix`.
        prefix: how the answer starts; given to the model too.
        references: what the answer has to contain, by the suite's metric.
        new_tokens: the most that an answer may have.
        length: the context asked for: prompt, prefix and answer together fit into it.
        question: what is asked, where the metric reads it.
        delimiter: between prompt and prefix.
        difficulty: of what the answer hangs on, as a number of steps; None where there is none.
        more: further questions behind the first answer, each with its own; for texts to train on.
    """

    prompt: str
    prefix: str
    references: tuple[str, ...]
    new_tokens: int
    length: int
    question: str = ""
    delimiter: str = " "
    difficulty: int | None = None
    more: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """Prompt and prefix, as a model without a chat template reads them."""
        return f"{self.prompt}{self.delimiter}{self.prefix}" if self.prefix else self.prompt

    def as_row(self) -> dict[str, Any]:
        """A flat row for a data set of questions."""
        row = {**asdict(self), "references": list(self.references)}
        del row["more"]
        return row

    @property
    def questions(self) -> list[tuple[str, str]]:
        """What is read, and the answer behind it, one after the other.

        >>> Sample("Who?", "Answer:", ("Ann", "Bo"), 8, 64, delimiter="\\n").questions
        [('Who?\\nAnswer:', 'Ann, Bo')]
        """
        return [(self.text, ", ".join(self.references)), *self.more]


def fill(
    build: Callable[[int], Sample], count_tokens: CountTokens, *, least: int, most: int
) -> Sample:
    """The sample with the most units of filler whose prompt and answer fit into its length.

    Where a unit takes about the same number of tokens anywhere, some three or four long texts are
    counted: the next number tried is the one at which room ends on a straight line.

    Args:
        build: makes a sample with so many units; the same number gives the same sample.
        count_tokens: of a text.
        least, most: numbers of units to choose from.

    Raises:
        ValueError: naming `lengths` if not even `least` units fit.

    >>> def build(n): return Sample("ab " * n, "=", ("x",), new_tokens=2, length=8)
    >>> fill(build, lambda text: len(text.split()), least=1, most=100).prompt
    'ab ab ab ab ab '
    """

    def room(units: int) -> int:
        sample = build(units)
        return sample.length - count_tokens(sample.text) - sample.new_tokens

    left = room(least)
    if left < 0:
        sample = build(least)
        raise ValueError(
            f"lengths: expected room for {sample.length - left - sample.new_tokens} tokens of the "
            f"shortest prompt and {sample.new_tokens} of an answer, got {sample.length}"
        )
    low, high = least, most + 1  # fits; does not
    per_unit, tried = 0.0, 0
    while high - low > 1:
        guess = low + (int(left / per_unit) if per_unit > 0 else 8)
        if tried % 4 == 3:  # units differ: halve what is left, once in a while
            guess = (low + min(high, 2 * guess)) // 2
        guess = min(max(guess, low + 1), high - 1)
        found, tried = room(guess), tried + 1
        per_unit = (left - found) / (guess - low)
        low, left, high = (guess, found, high) if found >= 0 else (low, left, guess)
    return build(low)


def insert(sentences: Sequence[str], facts: Sequence[str], places: Sequence[int]) -> list[str]:
    """Facts in their order, the n-th before sentence `places[n]` (rising).

    >>> insert(["a", "b"], ["1", "2", "3"], [0, 2, 2])
    ['1', 'a', 'b', '2', '3']
    """
    out, start = [], 0
    for fact, place in zip(facts, places, strict=True):
        out += [*sentences[start:place], fact]
        start = place
    return out + list(sentences[start:])
