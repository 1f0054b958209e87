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

    def fits(units: int) -> bool:
        sample = build(units)
        return count_tokens(sample.text) + sample.new_tokens <= sample.length

    if not fits(least):
        sample = build(least)
        raise ValueError(
            f"lengths: expected room for {count_tokens(sample.text)} tokens of the shortest prompt "
            f"and {sample.new_tokens} of an answer, got {sample.length}"
        )
    low, high = least, least + 1
    while high <= most and fits(high):
        low, high = high, min(2 * high, most + 1) if high < most else most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
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
