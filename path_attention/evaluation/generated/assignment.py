"""Variable assignment traces: what a variable holds after a line of Python statements.

    a = 3; b = 7; a, b = b, a; b = a; print(b) -> 7

A trace is a state that each statement changes, written in text, so that any tokenizer reads it. Its
difficulty is its distance, the number of statements that the answer has come through: those behind
the one where it stands as a constant.

    last_value    constants alone: the asked variable's last one
    swaps         constants once, then swaps alone: every swap counts, none may be lost
    mixed         constants, copies and swaps in the shares 1 : 1 : 3; of five variables, one
                  statement in 25 gives a followed value up, so that longer traces have more to
                  skip, and no more to follow

The state of swaps is an element of the symmetric group of the variables, S5 for five: what one
layer of fixed transitions cannot track (arXiv 2404.08819), and products of Householder factors can.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from path_attention.evaluation.generated.sample import CountTokens, Sample, fill

TASKS = ("last_value", "swaps", "mixed")
VARIABLES = 5
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_CONSTANT, _COPY = 0.2, 0.4  # of "mixed": below the first a constant, below the second a copy
_MOST = 1_000_000
_PRINTED_EVERY = 3  # statements, of a lesson
_NEW_TOKENS = 4  # a digit, with room


@dataclass(frozen=True)
class Trace:
    """Statements and what they lead to.

    Attributes:
        statements: of Python, in their order; the first give each variable its constant.
        values: what each variable holds after the last.
        asked: variables, in the order in which they are asked for.
        distance: statements behind the one whose constant the first asked variable holds.
    """

    statements: tuple[str, ...]
    values: dict[str, int]
    asked: tuple[str, ...]
    distance: int

    @property
    def text(self) -> str:
        """The statements, and the first asked variable without its value."""
        return "; ".join([*self.statements, f"print({self.asked[0]}) ->"])


class Tracer:
    """Writes statements of one trace, as many as are asked for, each but once.

    The shorter trace is the beginning of the longer one, but for "last_value", where the asked
    variable is written at a share of the trace that stays the same.

    Args:
        task: one of `TASKS`.
        rng: draws everything; nothing else is random.
        variables: 2 to 26 of them, each with a digit; digits differ at first if there are at most
            10 variables.

    Raises:
        ValueError: naming `task` or `variables`.

    >>> trace = Tracer("mixed", np.random.default_rng(3), variables=3).trace(8)
    >>> print("; ".join(trace.statements))
    c = 5; e = 4; t = 3; t, c = c, t; e, c = c, e; c, t = t, c; e = c; e, c = c, e
    >>> trace.text[-11:], trace.values, trace.distance
    ('print(t) ->', {'c': 5, 'e': 5, 't': 4}, 6)
    """

    def __init__(self, task: str, rng: np.random.Generator, variables: int = VARIABLES) -> None:
        if task not in TASKS:
            raise ValueError(f"task: expected one of {list(TASKS)}, got {task!r}")
        if not 2 <= variables <= len(_LETTERS):
            raise ValueError(f"variables: expected 2 to {len(_LETTERS)}, got {variables}")
        self.task, self.rng = task, rng
        self.names = [_LETTERS[i] for i in rng.choice(len(_LETTERS), variables, replace=False)]
        self.asked = tuple(self.names[i] for i in rng.permutation(variables))
        self.place = float(rng.random())
        self.late = int(rng.integers(10))
        first = rng.choice(10, variables, replace=variables > 10)
        self._values = [dict(zip(self.names, first.tolist(), strict=True))]
        self._origins = [{name: n for n, name in enumerate(self.names)}]  # of values: a statement
        self._statements: list[str] = []

    @property
    def least(self) -> int:
        """The shortest trace: a constant for each variable."""
        return len(self.names)

    def trace(self, statements: int) -> Trace:
        """The trace of so many statements. Raises ValueError on fewer than `least`."""
        if statements < self.least:
            raise ValueError(f"statements: expected at least {self.least}, got {statements}")
        more = statements - self.least
        while len(self._statements) < more:
            self._step()
        first = [f"{name} = {value}" for name, value in self._values[0].items()]
        late = bool(more) and self.task == "last_value"  # one statement is the asked variable's
        lines = [*first, *self._statements[: more - late]]
        values, origin = dict(self._values[more - late]), self._origins[more - late][self.asked[0]]
        if late:
            origin = self.least + int(self.place * more)
            lines.insert(origin, f"{self.asked[0]} = {self.late}")
            values[self.asked[0]] = self.late
        return Trace(tuple(lines), values, self.asked, statements - 1 - origin)

    def held(self, statements: int) -> dict[str, int]:
        """What variables hold after so many statements, but for "last_value"."""
        while len(self._statements) < statements - self.least:
            self._step()
        return self._values[statements - self.least]

    def _step(self) -> None:
        values, origins, rng = dict(self._values[-1]), dict(self._origins[-1]), self.rng
        kind = {"last_value": 0.0, "swaps": 1.0}.get(self.task)
        kind = float(rng.random()) if kind is None else kind
        open_to = [n for n in self.names if self.task != "last_value" or n != self.asked[0]]
        if kind < _CONSTANT:
            name = open_to[int(rng.integers(len(open_to)))]
            values[name] = int(rng.integers(10))
            origins[name] = self.least + len(self._statements)
            line = f"{name} = {values[name]}"
        else:
            a, b = (self.names[i] for i in rng.choice(len(self.names), 2, replace=False))
            if kind < _COPY:
                values[a], origins[a] = values[b], origins[b]
                line = f"{a} = {b}"
            else:
                values[a], values[b] = values[b], values[a]
                origins[a], origins[b] = origins[b], origins[a]
                line = f"{a}, {b} = {b}, {a}"
        self._values.append(values)
        self._origins.append(origins)
        self._statements.append(line)


def assignment_sample(
    task: str,
    seed: int,
    length: int,
    count_tokens: CountTokens,
    variables: int = VARIABLES,
) -> Sample:
    """A trace of as many statements as fit, and one variable to print.

    Its difficulty is its distance. Its `more` asks for the other variables too, one by one: for
    texts to train on.

    Args:
        task: one of `TASKS`.
        seed: each gives another trace.
        length: tokens of context, answer included.
        count_tokens: of a text.
        variables: as in `Tracer`.

    Raises:
        ValueError: naming `lengths` if not even the constants fit, `task`, `variables`.

    >>> sample = assignment_sample("swaps", 0, 24, lambda text: len(text.split()), variables=2)
    >>> sample.prompt, sample.references
    ('v = 0; q = 1; v, q = q, v; v, q = q, v; print(q) ->', ('1',))
    >>> sample.more
    (('; print(v) ->', '0'),)
    """
    tracer = Tracer(task, np.random.default_rng(seed), variables)

    def build(statements: int) -> Sample:
        trace = tracer.trace(statements)
        answers = [str(trace.values[name]) for name in trace.asked]
        more = tuple(
            (f"; print({name}) ->", answer)
            for name, answer in zip(trace.asked[1:], answers[1:], strict=True)
        )
        return Sample(
            trace.text,
            "",
            (answers[0],),
            _NEW_TOKENS,
            length,
            difficulty=trace.distance,
            more=more,
        )

    return fill(build, count_tokens, least=tracer.least, most=_MOST)


def assignment_lesson(
    task: str,
    seed: int,
    length: int,
    count_tokens: CountTokens,
    variables: int = VARIABLES,
) -> Sample:
    """A trace that prints some variable after about every third statement, and all at its end.

    To train on, beside samples that print at the end alone: its first answers hang on few
    statements. Of "last_value", whose answers hang on one, it is such a sample.

    Args: as `assignment_sample`.

    >>> lesson = assignment_lesson("swaps", 1, 32, lambda text: len(text.split()), variables=2)
    >>> text = "".join(f"{asked} {answer}" for asked, answer in lesson.questions)
    >>> text[:42]
    'l = 2; n = 8; n, l = l, n; print(n) -> 2; '
    >>> text[42:]
    'l, n = n, l; print(n) -> 8; print(l) -> 2; print(n) -> 8'
    """
    if task == "last_value":
        return assignment_sample(task, seed, length, count_tokens, variables)
    tracer = Tracer(task, np.random.default_rng(seed), variables)
    rng = np.random.default_rng([seed, 1])
    printed: list[str | None] = []  # behind each statement

    def build(statements: int) -> Sample:
        while len(printed) < statements:
            wanted = rng.random() < 1 / _PRINTED_EVERY
            name = tracer.names[int(rng.integers(variables))]
            printed.append(name if wanted and len(printed) >= tracer.least else None)
        questions, text = [], ""
        for n, line in enumerate(tracer.trace(statements).statements):
            text += f"; {line}" if n else line
            name = printed[n]
            if name is not None:
                value = tracer.held(n + 1)[name]
                questions.append((f"{text}; print({name}) ->", str(value)))
                text = ""
        end = tracer.trace(statements)
        for name in end.asked:
            questions.append((f"{text}; print({name}) ->", str(end.values[name])))
            text = ""
        (prompt, answer), *more = questions
        return Sample(prompt, "", (answer,), _NEW_TOKENS, length, more=tuple(more))

    def whole(statements: int) -> Sample:
        *before, (last, _) = build(statements).questions[: 1 - variables]
        text = "".join(f"{asked} {answer}" for asked, answer in before) + last
        return Sample(text, "", (), _NEW_TOKENS, length, difficulty=statements)

    return build(fill(whole, count_tokens, least=tracer.least, most=_MOST).difficulty or 0)
