"""What an engine is asked for, what it answers, and how it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


class Refused(Exception):
    """A request that gets an error instead of an answer, as OpenAI's API tells it.

    Attributes:
        status: of HTTP.
        kind: OpenAI's `type`; code: its machine-readable name; param: the field to blame.
        retry_after: seconds after which it may be tried again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind = message, status, kind
        self.param, self.code, self.retry_after = param, code, retry_after

    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        told = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: the fewest tokens whose probabilities add up to this; top_k: so many at most, 0 all.
        presence_penalty, frequency_penalty: taken off the logit of a token that the answer has, and
            for each time that it has it.
        logit_bias: added to logits, by token.
        seed: of the draws; the same gives the same answer. None: another one each time.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability, and the likeliest ones in its place, best first.

    Attributes:
        logprob: None for a prompt's first token.
        at: where in the answer's text its own begins; 0 for a prompt's tokens.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    at: int = 0


@dataclass(frozen=True)
class Piece:
    """A part of one choice's answer.

    Attributes:
        index: of the choice.
        text: new text, which nothing takes back.
        logprobs: of the tokens whose text begins in it, if they were asked for; in a first piece
            without text, of the prompt.
        finish: on a choice's last piece: "stop" (its end or a stop string) or "length".
        token_ids: on the last piece: all tokens of the answer.
        cached_tokens: on the last piece: tokens of the prompt that were not computed again.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    token_ids: tuple[int, ...] = ()
    cached_tokens: int = 0


Deliver = Callable[["Piece | Refused"], None]


@dataclass(kw_only=True, eq=False)
class Request:
    """One prompt and how to go on with it.

    Attributes:
        prompt: token ids.
        max_tokens: of each choice.
        choices: answers wanted.
        stop: texts at which an answer ends, without them.
        logprobs: likeliest tokens to tell beside each token; None tells no log-probabilities.
        prompt_logprobs: whether to tell those of the prompt too.
        client: whose it is: clients take turns.
        deliver: called on the engine's thread with each piece, or once with an error.
    """

    prompt: list[int]
    max_tokens: int
    deliver: Deliver
    choices: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    client: str = ""
