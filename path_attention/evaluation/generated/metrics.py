"""The metrics of the generated suites: of an answer's text and what it should say, in [0, 1]."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_UNPRINTABLE = re.compile(r"[\x00-\x1f]")


def contains_all(answer: str, references: Sequence[str]) -> float:
    """RULER's: the share of references that stand in the answer, in whatever case.

    >>> contains_all("It is 12 and 34.", ["12", "56"])
    0.5
    """
    answer = _UNPRINTABLE.sub("\\n", answer).lower()
    return sum(reference.lower() in answer for reference in references) / len(references)


def contains_any(answer: str, references: Sequence[str]) -> float:
    """RULER's for questions over documents: 1 if any reference stands in the answer.

    lm-eval 0.4.13 takes the share of references there, which is another number as soon as a
    question has two.

    >>> contains_any("In Paris.", ["Paris", "the city of Paris"])
    1.0
    """
    return max(contains_all(answer, [reference]) for reference in references)


def names_the_target(answer: str, target: str, question: str, labels: Iterable[str]) -> float:
    """BABILong's: the target is the only label in the answer's first sentence.

    Labels that stand in the question do not count. A target of several, as "apple,milk", must be
    named whole and alone; a label inside a longer one that is named, as "one" in "none", is not.
    lm-eval 0.4.13 asks only that the target stands anywhere.

    Source: babilong/metrics.py of booydar/babilong.

    >>> rooms = ["kitchen", "garden", "office"]
    >>> names_the_target("The garden. Not the office.", "garden", "Where is Mary?", rooms)
    1.0
    >>> names_the_target("The garden or the office.", "garden", "Where is Mary?", rooms)
    0.0
    """
    said = answer.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    asked = question.lower()
    named = set()
    for label in sorted((label.lower() for label in labels), key=len, reverse=True):
        if label in said:
            named.add(label)
            said = said.replace(label, " ")
    named -= {label for label in named if label in asked}
    return float(named == set(target.lower().split(",")))


def equals_line(answer: str, reference: str) -> float:
    """PhoneBook's: the answer's first line is the reference, but for blanks around it.

    >>> equals_line(" 5551234567\\nJohn", "5551234567"), equals_line("55512345678", "5551234567")
    (1.0, 0.0)
    """
    return float(answer.strip().split("\n")[0].strip() == reference)
