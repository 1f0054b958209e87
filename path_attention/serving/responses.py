"""Answers in the words of OpenAI's API, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from path_attention.serving.request import Piece, TokenLogprob
from path_attention.serving.text import Names

if TYPE_CHECKING:
    from path_attention.serving.prompts import Echo

_LEAST = -9999.0  # stands for a probability of zero: JSON has no infinity


@dataclass
class Whole:
    """One choice, put together from its pieces."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Piece | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs
        if piece.finish is not None:
            self.last = piece


class Writer:
    """Shapes of one call's answers.

    `prompts` are the token ids of its prompts; choice n belongs to prompt n // choices.
    """

    prefix = object_ = chunk_object = ""

    def __init__(
        self,
        model: str,
        names: Names,
        prompts: Sequence[Sequence[int]],
        *,
        logprobs: bool,
        token_ids: bool,
    ) -> None:
        self.model, self.names, self.prompts = model, names, prompts
        self.logprobs, self.token_ids = logprobs, token_ids
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    def whole(self, choices: Sequence[Whole]) -> dict[str, Any]:
        """The answer that isn't streamed."""
        told = [self.choice(n, choice) for n, choice in enumerate(choices)]
        lasts = [choice.last for choice in choices]
        answer = {**self._head(self.object_), "choices": told, "usage": self.usage(lasts)}
        return {**answer, **self._ids(lasts[0])}

    def chunk(self, choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        """One event of a stream; no choice: the last one."""
        choices = [] if choice is None else [choice]
        return {**self._head(self.chunk_object), "choices": choices, **more}

    def chunks(self, n: int, piece: Piece) -> list[dict[str, Any]]:
        """Events of choice n's piece."""
        if not (piece.text or piece.logprobs or piece.finish):
            return []
        return [self.chunk(self.delta(n, piece), **self._ids(piece if piece.finish else None))]

    def choice(self, n: int, choice: Whole) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, n: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def usage(self, lasts: Sequence[Piece | None]) -> dict[str, Any]:
        """Tokens in and out, by the last pieces of all choices; a prompt counts once."""
        each = len(lasts) // len(self.prompts)
        prompt = sum(map(len, self.prompts))
        output = sum(len(last.token_ids) for last in lasts if last is not None)
        cached = sum(last.cached_tokens for last in lasts[::each] if last is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _ids(self, last: Piece | None) -> dict[str, Any]:
        if not self.token_ids or last is None:
            return {}
        ids = {"token_ids": list(last.token_ids), "prompt_token_ids": list(self.prompts[0])}
        return {"path_attention": ids}


class ChatWriter(Writer):
    """`chat.completion`."""

    prefix, object_, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, n: int, choice: Whole) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        finish = None if choice.last is None else choice.last.finish
        told = self._logprobs(choice.logprobs)
        return {"index": n, "message": message, "logprobs": told, "finish_reason": finish}

    def opening(self, n: int) -> dict[str, Any]:
        """The first event of a choice."""
        delta = {"role": "assistant", "content": ""}
        return self.chunk({"index": n, "delta": delta, "logprobs": None, "finish_reason": None})

    def delta(self, n: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text or piece.logprobs else {}
        told = self._logprobs(piece.logprobs) if piece.logprobs else None
        return {"index": n, "delta": delta, "logprobs": told, "finish_reason": piece.finish}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            {
                **self._entry(entry.token, entry.logprob),
                "top_logprobs": [self._entry(*pair) for pair in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        name, raw = self.names.name(token), list(self.names.bytes(token))
        return {"token": name, "logprob": _finite(logprob), "bytes": raw}


class CompletionWriter(Writer):
    """`text_completion`. `echo` is of each prompt, or None."""

    prefix, object_, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, *args: Any, echo: Sequence[Echo] | None, choices: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self.echo, self.choices = echo, choices
        self._told: Counter[int] = Counter()  # tokens of each choice whose log-probabilities were

    def choice(self, n: int, choice: Whole) -> dict[str, Any]:
        finish = None if choice.last is None else choice.last.finish
        text, told = self._opening(n) + choice.text, self._logprobs(n, choice.logprobs)
        return {"index": n, "text": text, "logprobs": told, "finish_reason": finish}

    def opening(self, n: int) -> dict[str, Any]:
        """The first event of a choice: the prompt, if it is echoed."""
        choice = {"index": n, "text": self._opening(n), "logprobs": None, "finish_reason": None}
        return self.chunk(choice)

    def delta(self, n: int, piece: Piece) -> dict[str, Any]:
        told = self._logprobs(n, piece.logprobs) if piece.logprobs else None
        return {"index": n, "text": piece.text, "logprobs": told, "finish_reason": piece.finish}

    def _opening(self, n: int) -> str:
        return "" if self.echo is None else self.echo[n // self.choices].text

    def _logprobs(self, n: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        tops: list[dict[str, float | None] | None] = []
        for entry in entries:
            # The token itself is among them, also where others are likelier.
            pairs = (*entry.top, (entry.token, entry.logprob)) if entry.top else ()
            top = {self.names.name(token): _finite(logprob) for token, logprob in reversed(pairs)}
            tops.append(None if entry.logprob is None else top)
        return {
            "tokens": [self.names.name(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": self._offsets(n, entries),
        }

    def _offsets(self, n: int, entries: Sequence[TokenLogprob]) -> list[int]:
        """Where in choice n's text each token begins; the prompt's come first, if it is echoed."""
        first = self._told[n]
        self._told[n] += len(entries)
        if self.echo is None:
            return [entry.at for entry in entries]
        text, known = self.echo[n // self.choices]
        prompt = known[first : first + len(entries)]
        return prompt + [len(text) + entry.at for entry in entries[len(prompt) :]]


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST)
