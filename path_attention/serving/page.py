"""The page beside the API: a chat, and a look inside each token that it wrote."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Annotated, Any, Protocol, TypeVar

import torch
from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from path_attention.serving.guards import error_response
from path_attention.serving.inspection import Inspection, inspect_token
from path_attention.serving.prompts import Prompts
from path_attention.serving.protocol import Body, Message, parse
from path_attention.serving.request import Refused
from path_attention.serving.text import Names, TextStream

_FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "main.js": "text/javascript; charset=utf-8",
    "client.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "inspector.js": "text/javascript; charset=utf-8",
    "plot.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for again by its ETag
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_POINTS = 80  # of a curve
_MOST_WAITING = 8


class Inspectable(Protocol):
    """What the page needs of an engine."""

    @property
    def model(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...


_Ids = Annotated[list[int], Field(fail_fast=True)]


class _Inspect(Body):
    token_ids: _Ids
    position: int
    layer: int
    top: int = Field(12, ge=1, le=100)


class _Spell(Body):
    token_ids: _Ids
    start: int = Field(0, ge=0)


class _Cut(Body):
    prompt: str | Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    answer: str


def page_router(engine: Inspectable, *, longest: int = 8192) -> APIRouter:
    """The page's files and what it asks for besides the API.

        GET  /, /page/{name}    files of this package, by a fixed table
        POST /inspect           {token_ids, position, layer, top?} → `describe`
        POST /inspect/spell     {token_ids, start?} → `spell`
        POST /inspect/cut       {prompt: text or messages, answer} → `spell` of the tokens that the
                                tokenizer cuts them into, for an answer that was stopped half-way

    The posts compute in a worker thread, one at a time and at most 8 waiting (429 beyond), so that
    the event loop goes on. The model's forward runs beside the engine's own steps and shares the
    device with them: it changes nothing of theirs, and costs what a prompt of that length does.
    Errors have the shape of OpenAI's; keys and the size of bodies are for `Guards` to check.

    Args:
        engine: with a `model` and its `tokenizer`, of which a copy is used.
        longest: the most tokens that a request may bring.
    """
    router, turn, prompts = APIRouter(), _Turn(), Prompts(engine.tokenizer)
    for name, kind in _FILES.items():
        content = (files("path_attention.serving") / "page" / name).read_bytes()
        for path in ["/"] * (name == "index.html") + [f"/page/{name}"]:
            router.add_api_route(path, _send(content, kind), methods=["GET"])

    def inspect(asked: _Inspect) -> dict[str, Any]:
        _check_length(asked.token_ids, longest)
        found = inspect_token(engine.model, asked.token_ids, asked.position, asked.layer)
        return describe(found, engine.model, asked.top)

    def spell_ids(asked: _Spell) -> dict[str, Any]:
        _check_length(asked.token_ids, longest)
        rows = engine.model.config.get_text_config().vocab_size
        for token in asked.token_ids:
            if not 0 <= token < rows:
                raise ValueError(f"token_ids: expected integers from 0 to {rows - 1}, got {token}")
        return spell(prompts.tokenizer, asked.token_ids, asked.start)

    def cut(asked: _Cut) -> dict[str, Any]:
        text = asked.prompt
        ids = prompts.encode(text if isinstance(text, str) else [m.plain() for m in text])
        start = len(ids)
        ids = ids + prompts.tokenizer(asked.answer, add_special_tokens=False)["input_ids"]
        _check_length(ids, longest)
        return spell(prompts.tokenizer, ids, start)

    router.add_api_route("/inspect", _post(_Inspect, inspect, turn), methods=["POST"])
    router.add_api_route("/inspect/spell", _post(_Spell, spell_ids, turn), methods=["POST"])
    router.add_api_route("/inspect/cut", _post(_Cut, cut, turn), methods=["POST"])
    return router


def describe(found: Inspection, model: Any, top: int) -> dict[str, Any]:
    """An inspection as JSON.

    Returns:
        position, query (the place that predicts it), layer, layers, transport, decay, normalizer;
        masses: as `Inspection.masses`; curves: as `Inspection.curves`; heads: of each, `largest`
        (`top` of them), `scale` = max |weight|, and `shades` = weight / scale to 4 digits.
    """
    scale = found.weights.abs().amax(-1)
    shades = found.weights / torch.where(scale > 0, scale, 1.0)[:, None]
    heads = [
        {"scale": scale[n].item(), "shades": row, "largest": found.largest(n, top)}
        for n, row in enumerate(shades.round(decimals=4).tolist())
    ]
    config = model.config.of_layer(found.layer)
    return {
        "position": found.position,
        "query": found.position - 1,
        "layer": found.layer,
        "layers": config.num_hidden_layers,
        "transport": config.transport,
        "decay": config.decay,
        "normalizer": found.normalizer,
        "masses": found.masses(),
        "curves": found.curves(_POINTS),
        "heads": heads,
    }


def spell(tokenizer: Any, token_ids: list[int], start: int = 0) -> dict[str, Any]:
    """Each token's part of the text, as JSON.

    Returns:
        token_ids, start: as given; texts: of each token, such that those up to `start` are a text,
        and those from there on its answer; a character of several tokens comes with its last;
        names: of the tokens without text, by their place: a special token's name, or its bytes, or
        the number of one that the tokenizer lacks.
    """
    texts: list[str] = []
    for prompt, part in (([], token_ids[:start]), (token_ids[:start], token_ids[start:])):
        stream = TextStream(tokenizer, prompt=prompt)
        texts += [stream.push(token) for token in part]
        if part:
            texts[-1] += stream.finish()
    special, known, names = set(tokenizer.all_special_ids), Names(tokenizer), {}
    for place, (token, text) in enumerate(zip(token_ids, texts, strict=True)):
        if token in special:
            names[place] = str(tokenizer.convert_ids_to_tokens(token))
        elif not text:
            names[place] = known.bytes(token).hex(" ") or str(token)
    return {"token_ids": token_ids, "start": start, "texts": texts, "names": names}


class _Turn:
    """One at a time, and not too many who wait."""

    def __init__(self) -> None:
        self._lock, self._waiting = asyncio.Lock(), 0

    async def run(self, request: Request, work: Callable[[], str]) -> str:
        if self._waiting >= _MOST_WAITING:
            raise Refused(
                f"{self._waiting} tokens wait to be looked into, which is the most; try again",
                status=429, kind="rate_limit_error", code="queue_full", retry_after=1,
            )  # fmt: skip
        self._waiting += 1
        try:
            async with self._lock:
                if await request.is_disconnected():  # who moves on doesn't wait for each token
                    raise Refused("the client has left", status=499, kind="client_error")
                return await run_in_threadpool(work)
        finally:
            self._waiting -= 1


_B = TypeVar("_B", bound=Body)


def _post(kind: type[_B], work: Callable[[_B], dict[str, Any]], turn: _Turn) -> Callable:
    """The route that works on a body of this kind."""

    async def post(request: Request) -> Response:
        try:
            asked = parse(kind, await request.body())
            told = await turn.run(request, lambda: json.dumps(work(asked), allow_nan=False))
        except Refused as error:
            return error_response(error)
        except ValueError as error:  # of a function here: it names the field
            name = str(error).split(":")[0]
            return error_response(Refused(str(error), param=name, code="invalid_value"))
        return Response(told, media_type="application/json")

    return post


def _check_length(token_ids: list[int], longest: int) -> None:
    if len(token_ids) > longest:
        raise Refused(
            f"{len(token_ids)} tokens: at most {longest} can be looked into",
            param="token_ids", code="context_length_exceeded",
        )  # fmt: skip


def _send(content: bytes, kind: str) -> Callable:
    """The route of a file."""
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def send(request: Request) -> Response:
        asked = request.headers.get("if-none-match", "")
        if headers["ETag"] in [tag.strip().removeprefix("W/") for tag in asked.split(",")]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers={**headers, "Content-Type": kind})

    return send
