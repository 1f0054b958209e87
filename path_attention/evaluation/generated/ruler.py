"""RULER's thirteen tasks, made here: each fills a context of so many tokens around one question.

Prompts, numbers of needles, hops and repeats, and tokens to answer with are those of NVIDIA/RULER
(arXiv 2404.06654). What differs, since no data is fetched: essays are the background text, and
words are the background's own; questions over documents (qa_1, qa_2) need their data sets.
"""

from __future__ import annotations

import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from path_attention.evaluation.generated.background import NOISE, Background, draw_words
from path_attention.evaluation.generated.sample import CountTokens, Sample, fill, insert

_MOST_UNITS = 1_000_000
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_SHOT_NOISE = 10  # lines of noise in the solved example of variable tracking: about 500 tokens
_SHORT = 4096  # below it, RULER repeats common words less often


@dataclass(frozen=True)
class Needles:
    """A needle-in-a-haystack task: what is hidden, in what, and how much of it is asked for.

    Attributes:
        haystack: "repeat" (one line of noise), "essay" (the background), "needle" (other needles).
        keys, values: "words", "numbers" or "uuids".
        hidden: number of keys in the haystack.
        per_key: values of each key.
        asked: number of keys asked for.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    hidden: int = 1
    per_key: int = 1
    asked: int = 1


NEEDLES = {
    "niah_single_1": Needles("repeat"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", hidden=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", per_key=4),
    "niah_multiquery": Needles("essay", hidden=4, asked=4),
}
TASKS = (*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2")
QUESTIONS = {"qa_1": "squad", "qa_2": "hotpotqa"}


def ruler_sample(
    task: str,
    seed: int,
    length: int,
    count_tokens: CountTokens,
    background: Background,
    questions: Sequence[Question] = (),
) -> Sample:
    """One sample of a task; each seed gives another one.

    Args:
        task: one of `TASKS`.
        length: tokens of context, answer included.
        count_tokens: of a text.
        background: haystack of the essay tasks, and where words come from.
        questions: of qa_1 and qa_2; number `seed` of them is asked, over its documents and others'.

    Raises:
        ValueError: naming `lengths` if not even the facts fit, `task` if there is no such.
    """
    if task not in TASKS:
        raise ValueError(f"task: expected one of {list(TASKS)}, got {task!r}")
    build: Callable[[int], Sample]
    most = len(background.words) if task == "cwe" else _MOST_UNITS
    if task in NEEDLES:
        build, least = _needles(NEEDLES[task], seed, length, background), 0
    elif task == "vt":
        build, least = _variables(seed, length), 5
    elif task == "cwe":
        build, least = _common_words(seed, length, background), 10
    elif task == "fwe":
        build, least = _frequent_words(seed, length), 30
    else:
        build, least = _documents(seed, length, questions), 0
    try:
        return fill(build, count_tokens, least=least, most=most)
    except ValueError as error:
        raise ValueError(f"{error}, asked by {task}") from error


def _draw(rng: np.random.Generator, kind: str, count: int, background: Background) -> list[str]:
    """Different keys or values of a kind."""
    if kind == "numbers":
        return [f"{n}" for n in rng.choice(9_000_000, count, replace=False) + 1_000_000]
    if kind == "uuids":
        return [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(count)]
    words = draw_words(rng, background.words, 2 * count)
    return [f"{a}-{b}" for a, b in zip(words[::2], words[1::2], strict=True)]


def _needles(
    task: Needles, seed: int, length: int, background: Background
) -> Callable[[int], Sample]:
    def build(units: int) -> Sample:
        rng = np.random.default_rng(seed)
        keys = _draw(rng, task.keys, task.hidden, background)
        values = _draw(rng, task.values, task.hidden * task.per_key, background)
        of_key = [values[n :: task.hidden] for n in range(task.hidden)]
        facts = [
            _NEEDLE.format(kind=task.values, key=key, value=value)
            for key, mine in zip(keys, of_key, strict=True)
            for value in mine
        ]
        rng.shuffle(facts)
        asked = [int(n) for n in rng.choice(task.hidden, task.asked, replace=False)]
        depths = np.sort(rng.random(len(facts)))
        if task.haystack == "needle":
            hay = [
                _NEEDLE.format(kind=task.values, key=key, value=value)
                for key, value in zip(
                    _others(rng, task.keys, units, background, keys),
                    _draw(rng, task.values, units, background),
                    strict=True,
                )
            ]
        else:
            hay = background.draw(rng, units) if task.haystack == "essay" else [NOISE] * units
        lines = insert(hay, facts, [int(d * (units + 1)) for d in depths])
        context = (" " if task.haystack == "essay" else "\n").join(lines)
        names = [keys[n] for n in asked]
        references = tuple(value for n in asked for value in of_key[n])
        return _needle_prompt(task.values, context, names, references, length)

    return build


def _others(
    rng: np.random.Generator, kind: str, count: int, background: Background, taken: Sequence[str]
) -> list[str]:
    """Keys of the haystack's own needles: pairs of words may repeat, but none that is hidden."""
    if kind != "words":
        return _draw(rng, kind, count, background)
    words, found = background.words, []
    while len(found) < count:
        pairs = rng.integers(len(words), size=(count - len(found), 2))
        drawn = (f"{words[a]}-{words[b]}" for a, b in pairs)
        found += [name for name in drawn if name not in taken]
    return found


def _needle_prompt(
    kind: str, context: str, names: Sequence[str], references: tuple[str, ...], length: int
) -> Sample:
    one = len(references) == 1
    noun, some, are = (kind[:-1], "A", "is") if one else (kind, "Some", "are")
    query = ", and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    what = "What is the" if one else "What are all the"
    prompt = (
        f"{some} special magic {noun} {are} hidden within the following text. Make sure to "
        f"memorize it. I will quiz you about the {noun} afterwards.\n{context}\n"
        f"{what} special magic {noun} for {query} mentioned in the provided text?"
    )
    prefix = f"The special magic {noun} for {query} mentioned in the provided text {are}"
    return Sample(prompt, prefix, references, 128, length)


def _chain(rng: np.random.Generator, letters: int) -> tuple[list[str], list[str]]:
    """Names of one chain of five variables, and its five assignments."""
    names: list[str] = []
    while len(names) < 5:
        name = "".join(string.ascii_uppercase[i] for i in rng.integers(26, size=letters))
        names += [name] if name not in names else []
    lines = [f"VAR {names[0]} = {rng.integers(10_000, 99_999)}"]
    return names, lines + [f"VAR {b} = VAR {a} " for a, b in pairwise(names)]


def _variables(seed: int, length: int) -> Callable[[int], Sample]:
    """Variable tracking: one solved example over little noise, then the question; blanks and ends
    of lines as RULER has them."""

    def text(rng: np.random.Generator, units: int, letters: int) -> tuple[str, str, list[str]]:
        names, lines = _chain(rng, letters)
        places = np.sort(rng.choice(units, len(lines), replace=False))
        context = " ".join(insert([f"{NOISE}\n"] * units, lines, places.tolist()))
        value = lines[0].split(" = ")[1]
        question = (
            "Memorize and track the chain(s) of variable assignment hidden in the following text."
            f"\n\n{context}\nQuestion: Find all variables that are assigned the value {value} in "
            "the text above."
        )
        prefix = (
            "Answer: According to the chain(s) of variable assignment in the text above, "
            f"{len(names)} variables are assgined the value {value}, they are:"  # as RULER has it
        )
        return question, prefix, names

    def build(units: int) -> Sample:
        rng = np.random.default_rng(seed)
        shot, shot_prefix, shot_names = text(rng, _SHOT_NOISE, 3)
        example = f"{shot} {shot_prefix}  {' '.join(shot_names)}"
        question, prefix, names = text(rng, units, 5)
        return Sample(f"{example}\n\n\n\n{question}", prefix, tuple(names), 30, length)

    return build


def _common_words(seed: int, length: int, background: Background) -> Callable[[int], Sample]:
    """Ten common words among rarer ones: one solved example, then the question."""
    short = length < _SHORT
    shot_shape, repeats = ((20, 3, 1), (6, 1)) if short else ((40, 10, 3), (30, 3))
    prefix = "Answer: The top 10 words that appear most often in the list are:"

    def listed(
        rng: np.random.Generator, words: list[str], common: int, rare: int
    ) -> tuple[str, list[str]]:
        listing = words[:10] * common + words[10:] * rare
        rng.shuffle(listing)
        context = " ".join(f"{n}. {word}" for n, word in enumerate(listing, 1))
        return (
            "Below is a numbered list of words. In these words, some appear more often than "
            f"others. Memorize the ones that appear most often.\n{context}\nQuestion: What are the "
            "10 most common words in the above list?"
        ), words[:10]

    def build(units: int) -> Sample:
        rng = np.random.default_rng(seed)
        shot, top = listed(rng, draw_words(rng, background.words, shot_shape[0]), *shot_shape[1:])
        numbered = " ".join(f"{n}. {word}" for n, word in enumerate(top, 1))
        question, wanted = listed(rng, draw_words(rng, background.words, units), *repeats)
        text = f"{shot} {prefix} {numbered}\n{question}"
        return Sample(text, prefix, tuple(wanted), 120, length)

    return build


def _frequent_words(seed: int, length: int) -> Callable[[int], Sample]:
    """The three most frequent coded words of a text whose counts fall by Zipf's law of power 2."""
    vocabulary = max(length // 50, 20)

    def build(units: int) -> Sample:
        rng = np.random.default_rng(seed)
        letters = rng.integers(26, size=(vocabulary, 6))
        words = ["".join(string.ascii_lowercase[i] for i in row) for row in letters]
        words[0] = "..."
        counts = (units * np.arange(1.0, vocabulary + 1) ** -2 / (np.pi**2 / 6)).astype(int)
        counts[4:] = np.minimum(counts[4:], counts[3] - 1)  # of few words the next may tie
        text = np.repeat(words, counts)
        rng.shuffle(text)
        prompt = (
            "Read the following coded text and track the frequency of each coded word. Find the "
            f"three most frequently appeared coded words. {' '.join(text)}\nQuestion: Do not "
            "provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text?"
        )
        prefix = (
            "Answer: According to the coded text above, the three most frequently appeared words "
            "are:"
        )
        return Sample(prompt, prefix, tuple(words[1:4]), 50, length)

    return build


@dataclass(frozen=True)
class Question:
    """A question over documents, one of which holds the answer.

    Attributes:
        text: the question.
        answers: each is right.
        documents: those that belong to it.
        near: on the same subject, its own among them: they come before any other.
    """

    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    near: tuple[str, ...] = ()


def _documents(seed: int, length: int, questions: Sequence[Question]) -> Callable[[int], Sample]:
    if not questions:
        raise ValueError("questions: expected those of qa_1 or qa_2, got none")
    asked = questions[seed % len(questions)]
    mine = set(asked.documents)
    near = sorted(set(asked.near) - mine)
    others = {doc for q in questions for doc in (*q.documents, *q.near)} - mine
    others = sorted(others.difference(near))
    rule = (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words."
    )

    def build(units: int) -> Sample:
        rng = np.random.default_rng(seed)
        more = [docs[i] for docs in (near, others) for i in rng.permutation(len(docs))]
        documents = [*asked.documents, *more[:units]]
        rng.shuffle(documents)
        context = "\n\n".join(f"Document {n}:\n{doc}" for n, doc in enumerate(documents, 1))
        prompt = (
            f"{rule}\n\nThe following are given documents.\n\n{context}\n\n{rule}\n\n"
            f"Question: {asked.text}"
        )
        return Sample(prompt, "Answer:", asked.answers, 32, length)

    return build
