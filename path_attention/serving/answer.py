"""One choice of a request as it is written, and what happens to the request that it belongs to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from path_attention.serving.request import FinishReason, Piece, Refused, Request, TokenLogprob
from path_attention.serving.sampler import (
    draw,
    make_generator,
    penalised,
    probabilities,
    token_logprobs,
)
from path_attention.serving.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(eq=False)
class Ticket:
    """A request in an engine.

    Attributes:
        arrived, deadline: seconds of `time.monotonic`.
        answers: its choices, once it runs.
        cancelled: nobody waits any more; the engine drops it at its next step.
        done: everything was delivered.
        cached_tokens: tokens of the prompt that were not computed again.
    """

    request: Request
    deadline: float
    arrived: float = field(default_factory=time.monotonic)
    answers: list[Answer] = field(default_factory=list)
    cancelled: bool = False
    done: bool = False
    started: float | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def refuse(self, error: Refused) -> None:
        """Deliver an error and be done."""
        if not self.done:
            self.done = True
            self.request.deliver(error)

    @property
    def outcome(self) -> str:
        """Of a request that is done: for the metrics."""
        reasons = {answer.finish for answer in self.answers}
        return "length" if "length" in reasons else "stop"


class Answer:
    """Tokens of one choice, their text, and when it ends.

    Attributes:
        tokens: chosen so far.
        counts: how often each of them was.
        finish: why it has ended; None while it goes on.
        last: when the last token came.
    """

    def __init__(
        self,
        ticket: Ticket,
        index: int,
        tokenizer: PreTrainedTokenizerBase,
        ends: frozenset[int],
    ) -> None:
        """ends: tokens that end a text."""
        self.ticket, self.request, self.index = ticket, ticket.request, index
        self.sampling = self.request.sampling
        self.tokens: list[int] = []
        self.counts: Counter[int] = Counter()
        self.finish: FinishReason | None = None
        self.last: float | None = None
        self.random = make_generator(self.sampling.seed, index)
        self._ends = ends
        self._text = TextStream(tokenizer, self.request.stop, self.request.prompt)
        self._waiting: list[TokenLogprob] = []

    @property
    def ids(self) -> list[int]:
        """Prompt and answer."""
        return self.request.prompt + self.tokens

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def newest(self) -> int:
        """The last of them."""
        return (self.tokens or self.request.prompt)[-1]

    def accept(self, token: int, logprob: TokenLogprob | None) -> None:
        """Add a token and deliver the text that it makes certain."""
        self.tokens.append(token)
        self.counts[token] += 1
        if token in self._ends:
            self.finish, text = "stop", self._text.finish()
        else:
            if logprob is not None:
                self._waiting.append(replace(logprob, at=self._text.length))
            text = self._text.push(token)
            if not self._text.stopped and len(self.tokens) >= self.request.max_tokens:
                self.finish, text = "length", text + self._text.finish()
            if self._text.stopped:
                self.finish = "stop"
        self._deliver(text)

    def begin(self) -> None:
        """Deliver what is known of the prompt, if it was asked for."""
        if self.request.prompt_logprobs:
            first = TokenLogprob(self.request.prompt[0], None)
            told = (first, *self.ticket.prompt_logprobs)
            self.request.deliver(Piece(self.index, "", told))

    def end(self) -> None:
        """End without any token: nothing was asked for."""
        self.finish = "length"
        self._deliver("")

    def _deliver(self, text: str) -> None:
        every = self.finish is not None and not self._text.stopped
        ready = [x for x in self._waiting if every or x.at < self._text.given]
        self._waiting = self._waiting[len(ready) :]
        if self.finish is None:
            if text or ready:
                self.request.deliver(Piece(self.index, text, tuple(ready)))
            return
        tokens, cached = tuple(self.tokens), self.ticket.cached_tokens
        piece = Piece(self.index, text, tuple(ready), self.finish, tokens, cached)
        self.request.deliver(piece)


def choose(logits: Tensor, answers: Sequence[Answer]) -> list[int | None]:
    """The next token of each answer by its row of logits `[R, V]`; None for one of no numbers."""
    changed = {}
    for n, answer in enumerate(answers):
        own = logits[n]
        row = penalised(own, answer.sampling, answer.counts)
        if row is not own:
            changed[n] = row
    if changed:
        logits = logits.to(next(iter(changed.values())).dtype, copy=True)
        for n, row in changed.items():
            logits[n] = row
    best, tokens = logits.max(1)
    usable = zip(tokens.tolist(), best.isfinite().tolist(), strict=True)
    chosen = [token if finite else None for token, finite in usable]
    drawn = [
        n
        for n, answer in enumerate(answers)
        if answer.sampling.temperature > 0 and chosen[n] is not None
    ]
    if drawn:
        probs = probabilities(logits[drawn], [answers[n].sampling for n in drawn])
        at = [answers[n].random.random() for n in drawn]
        for n, token in zip(drawn, draw(probs, at), strict=True):
            chosen[n] = token
    return chosen


def describe(
    logits: Tensor, tokens: Sequence[int], answer: Answer
) -> Sequence[TokenLogprob | None]:
    """Log-probabilities of an answer's tokens by their logits `[T, V]`; None unless asked for."""
    top = answer.request.logprobs
    return [None] * len(tokens) if top is None else token_logprobs(logits, tokens, top)


def verify(
    logits: Tensor, proposed: Sequence[int], drafts: Sequence[Tensor | None], answer: Answer
) -> list[int]:
    """The next tokens of an answer: what is accepted of a proposal, and one token more.

    Each token has the distribution p that it has without a proposal: one drawn from q is accepted
    with probability min(1, p / q), else drawn from max(p − q, 0), renormalised; arXiv 2211.17192.

    Args:
        logits: `[k + 1, V]`, before each proposed token and after the last.
        proposed: k tokens; drafts: what each was drawn from, `[V]`, or None where it was certain.

    Returns:
        1 to k + 1 tokens.

    Raises:
        FloatingPointError: on logits that are no numbers.
    """
    if not logits.amax(1).isfinite().all():
        raise FloatingPointError("logits: expected numbers, got others")
    sampling, counts, tokens = answer.sampling, Counter(answer.counts), []
    for n in range(len(logits)):
        row = penalised(logits[n], sampling, counts)
        if sampling.temperature == 0:
            token = int(row.argmax())
            accepted = n < len(proposed) and token == proposed[n]
        else:
            p = probabilities(row[None], [sampling])[0]
            accepted = False
            if n < len(proposed):
                token, q = proposed[n], drafts[n]
                likely = 1.0 if q is None else float(q[token])
                accepted = answer.random.random() * likely < float(p[token])
                if not accepted:
                    p = remainder(p, token, q)
            if not accepted:
                token = draw(p[None], [answer.random.random()])[0]
        tokens.append(token)
        counts[token] += 1
        if not accepted:
            break
    return tokens


def remainder(p: Tensor, token: int, q: Tensor | None) -> Tensor:
    """max(p − q, 0) of `[V]`, renormalised; q None is all on `token`."""
    rest = p.clone()
    if q is None:
        rest[token] = 0
    else:
        rest = (p - q.to(p)).clamp(min=0)
    total = rest.sum()
    # p = q but for rounding: then it is p that would have been drawn from.
    return rest / total if total > 0 else p
