"""What every engine does: a queue, a thread, limits, and the way from tokens to answers."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from path_attention.serving.answer import Answer, Ticket
from path_attention.serving.fair_queue import FairQueue
from path_attention.serving.memory import give_back
from path_attention.serving.metrics import Metrics
from path_attention.serving.request import Refused, Request, TokenLogprob
from path_attention.serving.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger("path_attention.serving")
_REST = 2.0  # seconds without a request after which free memory goes back


class Engine:
    """Takes requests from any thread and works on them on its own.

    Attributes:
        kind: how it works, as clients are told: "batched" or "generate".
        model, tokenizer, settings: as given.
        metrics: what Prometheus reads.
        running: requests that are worked on; of the engine's thread.
    """

    kind: ClassVar[str] = ""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings
    ) -> None:
        self.model, self.tokenizer, self.settings = model.eval(), tokenizer, settings
        self.metrics = Metrics()
        self.running: list[Ticket] = []
        self.ends = _end_tokens(model, tokenizer)
        self._queue = FairQueue()
        self._changed = threading.Condition()
        self._stopping = False
        self._seconds = 1.0  # that a request takes, a running mean
        self._rested = threading.Event()
        self._thread: threading.Thread | None = None

    # --- From any thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to work; nothing happens if it has."""
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    def close(self, seconds: float = 30.0) -> None:
        """Refuse what waits, finish what runs, and cancel what has not ended after so many."""
        with self._changed:
            self._stopping = True
            for ticket in self.running:
                ticket.deadline = min(ticket.deadline, time.monotonic() + seconds)
            self._changed.notify()

    def stop(self, seconds: float = 30.0) -> None:
        """`close`, and wait for the end."""
        thread = self._thread
        if thread is None:
            return
        self.close(seconds)
        thread.join()
        self._thread = None

    def wait_for_rest(self, seconds: float) -> bool:
        """Wait until it was idle for a while and free memory went back; False after so many."""
        return self._rested.wait(seconds)

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self._thread is not None and self._thread.is_alive() and not self._stopping

    def submit(self, request: Request) -> Ticket:
        """Queue a request. Raises `Refused` on one that can't be answered, or not now."""
        self.check(request)
        with self._changed:
            if not self.alive:
                self._count(None, "rejected")
                raise self._closed()
            # One that can start at the next step does not wait.
            free = self.rows - sum(t.request.choices for t in self.running)
            if len(self._queue) >= self.settings.max_queue + max(0, free):
                self._count(None, "rejected")
                rounds = math.ceil((len(self._queue) + 1) / self.rows)
                raise Refused(
                    f"{len(self._queue)} requests are waiting, which is the most; try again later",
                    status=429, kind="rate_limit_error", code="queue_full",
                    retry_after=min(60, max(1, math.ceil(rounds * self._seconds))),
                )  # fmt: skip
            ticket = Ticket(request, time.monotonic() + self.settings.request_seconds)
            self._queue.push(ticket)
            self._rested.clear()
            self.metrics.queued.set(len(self._queue))
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for it any more: it leaves the queue now, or what runs at the next step."""
        with self._changed:
            ticket.cancelled = True
            self._sweep([ticket] if ticket in self._queue else [])
            self._changed.notify()

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raise `Refused` on a prompt beyond the limits, or of tokens that the model lacks."""
        length, limit = len(prompt), self.settings.max_prompt_tokens
        if not length:
            raise Refused("the prompt has no token", param="prompt")
        if length > limit:
            raise Refused(
                f"the prompt has {length} tokens, at most {limit} are taken",
                param="prompt", code="context_length_exceeded",
            )  # fmt: skip
        self._check_tokens("prompt", prompt)

    def _check_tokens(self, name: str, tokens: Iterable[int]) -> None:
        size = self.model.config.get_text_config().vocab_size
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise Refused(f"token {wrong}: the model has the tokens 0 to {size - 1}", param=name)

    def check(self, request: Request) -> None:
        """Raise `Refused` on a request beyond the limits."""
        settings, length = self.settings, len(request.prompt)
        self.check_prompt(request.prompt)
        self._check_tokens("logit_bias", request.sampling.logit_bias)
        context = self.context_length
        if context is not None and length + request.max_tokens > context:
            raise Refused(
                f"the model's context is {context} tokens: {length} of the prompt and "
                f"{request.max_tokens} of output are more",
                param="max_tokens", code="context_length_exceeded",
            )  # fmt: skip
        if request.max_tokens > settings.max_output_tokens:
            raise Refused(
                f"max_tokens: at most {settings.max_output_tokens}, got {request.max_tokens}",
                param="max_tokens",
            )
        if request.choices > self.most_choices:
            raise Refused(f"n: at most {self.most_choices}, got {request.choices}", param="n")

    @property
    def rows(self) -> int:
        """Answers that are written at once."""
        return self.settings.max_rows

    @property
    def most_choices(self) -> int:
        """The most answers of one request."""
        return self.rows

    @property
    def context_length(self) -> int | None:
        """The most tokens that the model can see; None for no limit."""
        return None

    def most_output(self, prompt: int, choices: int) -> int:
        """The most tokens of each choice after a prompt of so many; below 1 if there are none."""
        most, context = self.settings.max_output_tokens, self.context_length
        return most if context is None else min(most, context - prompt)

    # --- On the engine's thread -------------------------------------------------------------------

    def step(self) -> None:
        """Go on with what runs, by a little; what it raises fails all that run."""
        raise NotImplementedError

    def can_admit(self, ticket: Ticket) -> bool:
        """Whether a request may start beside those that run."""
        raise NotImplementedError

    def admit(self, ticket: Ticket) -> None:
        """Start a request."""
        raise NotImplementedError

    def release(self, ticket: Ticket) -> None:
        """Forget a request that has ended, its caches too."""
        raise NotImplementedError

    def measure(self) -> None:
        """Tell the metrics what memory is held."""

    @contextmanager
    def blame(self, tickets: Sequence[Ticket]) -> Iterator[None]:
        """An error of the block fails these requests, and no others."""
        try:
            yield
        except Exception as error:
            log.exception("the engine failed; requests that end with it: %d", len(tickets))
            with self._changed:
                for ticket in [x for x in tickets if not x.done]:
                    self._count(ticket, "error")
                    ticket.refuse(_failure(type(error).__name__))
                    self._drop(ticket)

    def _run(self) -> None:
        try:
            self._loop()
        except Exception:  # of what goes on after an error, such as a device that is lost
            log.exception("the engine stopped: it takes no more requests")
        finally:
            with self._changed:
                self._stopping = True
                for ticket in [x for x in [*self.running, *self._queue] if not x.done]:
                    self._count(ticket, "error")
                    ticket.refuse(_failure("it has stopped"))
                self.running, self._queue = [], FairQueue()
                self._tell_sizes()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self.mind_queue()
                self._sweep(self.running)
                idle = not self.running and not len(self._queue)
                if idle and self._stopping:
                    return
                if idle and self._rested.is_set():
                    self._changed.wait()
                    continue
                rest = idle and not self._changed.wait(_REST)
            if rest:
                self._rest()
                continue
            self._admit_some()
            if self.running:
                with self.blame(tuple(self.running)):
                    self.step()
                self._retire()

    def _rest(self) -> None:
        """Nothing came for a while: give back what free memory is held."""
        give_back()
        with self._changed:
            if not len(self._queue):
                self._rested.set()

    def mind_queue(self) -> None:
        """Let go of those that wait in vain; a step that takes long calls it in between."""
        with self._changed:
            if self._stopping:
                self._refuse_waiting()
            self._sweep(self._queue)

    def gone(self, ticket: Ticket) -> bool:
        """Whether a request must not go on: cancelled, or out of time."""
        return ticket.cancelled or time.monotonic() > ticket.deadline

    def _refuse_waiting(self) -> None:
        for ticket in list(self._queue):
            self._queue.remove(ticket)
            self._count(ticket, "rejected")
            ticket.refuse(self._closed())
        self._tell_sizes()

    def _closed(self) -> Refused:
        why = "the server is shutting down"
        return Refused(why, status=503, kind="server_error", retry_after=5)

    def _sweep(self, tickets: Iterable[Ticket]) -> None:
        """Drop those of them that nobody waits for, or that took too long."""
        for ticket in [x for x in tickets if self.gone(x)]:
            self._count(ticket, "cancelled" if ticket.cancelled else "timeout")
            if not ticket.cancelled:
                seconds = time.monotonic() - ticket.arrived
                late = Refused(
                    f"not done after {seconds:.0f} seconds",
                    status=408, kind="timeout_error", code="timeout",
                )  # fmt: skip
                ticket.refuse(self._closed() if self._stopping else late)
            ticket.done = True
            self._drop(ticket)

    def _drop(self, ticket: Ticket) -> None:
        if ticket in self.running:
            self.running.remove(ticket)
            self.release(ticket)
            if not self.running:
                self.measure()
        else:
            self._queue.remove(ticket)
        ticket.answers = []  # which know their ticket: a ring would outlive the request
        self._tell_sizes()

    def _admit_some(self) -> None:
        while True:
            with self._changed:
                ticket = self._queue.first()
                if ticket is None or ticket.cancelled or self._stopping:
                    return
                if not self.can_admit(ticket):
                    return
                self._queue.pop()
                self.running.append(ticket)
                ticket.started = time.monotonic()
                self.metrics.queue_seconds.observe(ticket.started - ticket.arrived)
                self._tell_sizes()
            with self.blame([ticket]):
                ticket.answers = [
                    Answer(ticket, n, self.tokenizer, self.ends)
                    for n in range(ticket.request.choices)
                ]
                self.metrics.prompt_tokens.inc(len(ticket.request.prompt))
                self.admit(ticket)

    def _retire(self) -> None:
        """Let go what has ended."""
        for ticket in list(self.running):
            if not ticket.done and all(answer.finish for answer in ticket.answers):
                ticket.done = True
                self._count(ticket, ticket.outcome)
                taken = time.monotonic() - (ticket.started or ticket.arrived)
                self._seconds += 0.1 * (taken - self._seconds)
                with self._changed:
                    self._drop(ticket)

    def _count(self, ticket: Ticket | None, outcome: str) -> None:
        """A request has ended; None: before it became one."""
        self.metrics.requests.labels(outcome).inc()
        if ticket is not None:
            seconds = time.monotonic() - ticket.arrived
            self.metrics.request_seconds.labels(outcome).observe(seconds)

    def _tell_sizes(self) -> None:
        self.metrics.queued.set(len(self._queue))
        self.metrics.running.set(sum(t.request.choices for t in self.running))

    def accept(
        self,
        answer: Answer,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
    ) -> None:
        """Give an answer its next tokens, as far as it goes on."""
        now = time.monotonic()
        if answer.last is None:
            self.metrics.first_token.observe(now - answer.ticket.arrived)
        taken = None if answer.last is None else (now - answer.last) / len(tokens)
        for token, logprob in zip(tokens, logprobs, strict=True):
            if answer.finish is None:
                answer.accept(token, logprob)
                self.metrics.output_tokens.inc()
                self.metrics.speed.add(1)
                if taken is not None:
                    self.metrics.each_token.observe(taken)
        answer.last = now


def _failure(why: str) -> Refused:
    return Refused(f"the engine failed: {why}", status=500, kind="server_error")


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a text: the tokenizer's, and those of the model's generation settings."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    several = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(x for x in (tokenizer.eos_token_id, *several) if isinstance(x, int))
