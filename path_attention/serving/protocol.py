"""What clients may send: OpenAI's fields that are served, and no others."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from path_attention.serving.request import Refused, Sampling

# Of OpenAI's API, and refused: an answer without them would not be what was asked for.
UNSUPPORTED = (
    "audio", "best_of", "function_call", "functions", "metadata", "modalities",
    "parallel_tool_calls", "prediction", "reasoning_effort", "response_format", "service_tier",
    "store", "suffix", "tool_choice", "tools", "verbosity", "web_search_options",
)  # fmt: skip
# Unless they ask for what is done anyway.
_ANYWAY: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],), "response_format": ({"type": "text"},), "store": (False,),
    "service_tier": ("auto", "default"), "suffix": ("",), "tool_choice": ("none",),
}  # fmt: skip
_Text = Annotated[str, Field(min_length=1, max_length=1000)]
# One error is told: lists of a hundred thousand wrong items must not take seconds to be refused.
_Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
_T = TypeVar("_T")
_Several = Annotated[list[_T], Field(min_length=1, max_length=128, fail_fast=True)]
_B = TypeVar("_B", bound="Body")


class Body(BaseModel):
    """What is sent: these fields, of these types, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """Raise `Refused` on fields that don't go together."""


class StreamOptions(Body):
    """include_usage: a last chunk tells how many tokens there were."""

    include_usage: bool = False


class Options(Body):
    """What chats and completions have in common.

    Beyond OpenAI's: `top_k`, and `return_token_ids`, which adds `path_attention: {"token_ids": …,
    "prompt_token_ids": …}` to an answer. `user`, `safety_identifier` and `prompt_cache_key`, which
    say who asks, change nothing about an answer.
    """

    model: str
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, max_length=1024
    )
    n: int = Field(1, ge=1, le=128)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    prompt_cache_key: str = ""
    return_token_ids: bool = False
    safety_identifier: str = ""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _Text | Annotated[list[_Text], Field(max_length=4)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    user: str = ""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        # int() refuses thousands of digits by itself; no model has tokens of more than 18.
        wrong = [x for x in self.logit_bias if not (x.isdecimal() and len(x) <= 18)]
        if wrong:
            raise Refused(
                f"logit_bias: expected token ids, got {wrong[0][:40]!r}", param="logit_bias"
            )
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=self.seed,
        )

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise Refused("stream_options: expected with stream only", param="stream_options")
        if self.return_token_ids and self.n > 1:
            raise Refused("return_token_ids: expected with n = 1 only", param="return_token_ids")


class Part(Body):
    """A part of a message's content; of other types than text with fields of theirs."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None

    def plain(self) -> str:
        """Its text. Raises `Refused` on another type."""
        if self.type != "text":
            told = f"messages: content of type {self.type[:40]!r} is not supported"
            raise Refused(told, param="messages")
        if self.text is None or self.model_extra:
            raise Refused("messages: expected a content part of type and text", param="messages")
        return self.text


class Message(Body):
    """A turn of a chat."""

    role: str
    content: str | Annotated[list[Part], Field(fail_fast=True)]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it. Raises `Refused` on what is no text of a known role."""
        if self.role not in ("system", "developer", "user", "assistant"):
            raise Refused(
                f"messages: role {self.role[:40]!r} is not supported; expected system, developer, "
                "user or assistant",
                param="messages",
            )
        if self.name is not None:
            raise Refused("messages: name is not supported", param="messages")
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.plain() for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content}


class ChatBody(Options):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    logprobs: bool = False
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused("top_logprobs: expected with logprobs only", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise Refused(
                "max_tokens: expected it or max_completion_tokens, got both", param="max_tokens"
            )


class CompletionBody(Options):
    """`POST /v1/completions`."""

    prompt: str | _Ids | _Several[str] | _Several[_Ids]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    max_tokens: int = Field(16, ge=0)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)

    def check(self) -> None:
        super().check()
        if not self.max_tokens and not self.echo:
            raise Refused("max_tokens: expected at least 1 without echo, got 0", param="max_tokens")
        if self.return_token_ids and len(self.prompts) > 1:
            raise Refused(
                "return_token_ids: expected with one prompt only", param="return_token_ids"
            )


def parse(kind: type[_B], body: bytes) -> _B:
    """A request's body. Raises `Refused` naming the field that is wrong or not supported."""
    try:
        told = json.loads(body)
        json.dumps(told, ensure_ascii=False).encode()  # no half of a surrogate pair, by escapes
        told = _given(told)
    except (ValueError, RecursionError):
        raise Refused("the body is not valid JSON", code="invalid_json") from None
    if not isinstance(told, dict):
        raise Refused("the body must be a JSON object", code="invalid_json")
    anyway = [name for name, value in told.items() if value in _ANYWAY.get(name, ())]
    if told.get("best_of", 0) == told.get("n", 1):
        anyway.append("best_of")
    for name in told:
        if name in UNSUPPORTED and name not in anyway:
            raise Refused(
                f"{name}: not supported by this server", param=name, code="unsupported_parameter"
            )
    try:
        options = kind.model_validate({x: told[x] for x in told if x not in anyway})
    except ValidationError as error:
        raise _as_refused(error) from None
    options.check()
    return options


def _given(told: Any) -> Any:
    """Without the fields that are null: they were not given."""
    if isinstance(told, list):
        return [_given(x) for x in told]
    if not isinstance(told, dict):
        return told
    return {name: _given(value) for name, value in told.items() if value is not None}


def _as_refused(error: ValidationError) -> Refused:
    every = error.errors(include_url=False, include_context=False)
    # Of what may be of several types each tells that it is not that: another mistake says more.
    first = next((x for x in every if not x["type"].endswith("_type")), every[0])
    where = [str(x) for x in first["loc"]]
    if first["type"] == "extra_forbidden":
        name = ".".join(where)
        return Refused(f"{name[:80]}: unknown field", param=name[:80], code="unknown_parameter")
    name = where[0] if where else None
    got = f", got {str(first['input'])[:60]!r}"
    if first["type"] == "missing":
        got = f", {where[-1]} is missing" if len(where) > 1 else ""
    return Refused(f"{name}: {first['msg']}{got}", param=name, code="invalid_value")
