"""The HTTP API: OpenAI's chats and completions, models, health, metrics, and the page beside it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response, StreamingResponse

from path_attention.serving.call import Call
from path_attention.serving.engine import Engine
from path_attention.serving.guards import REQUEST_ID, Guards, error_response
from path_attention.serving.page import page_router
from path_attention.serving.prompts import Prompts
from path_attention.serving.protocol import ChatBody, CompletionBody, Options, parse
from path_attention.serving.request import Refused
from path_attention.serving.responses import ChatWriter, CompletionWriter, Whole, Writer
from path_attention.serving.settings import Settings

_ENGINE = "x-path-attention-engine"
_QUIET = 15.0  # seconds without an event
_MANY = 100  # tokens whose log-probabilities are written outside of the event loop


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """The server of an engine, which it starts with itself and stops with itself."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guards, settings=settings, metrics=engine.metrics)
    if settings.cors_origins:  # around the guards: a page may read what they refuse
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[_ENGINE, REQUEST_ID, "Retry-After"],
        )
    _handle_errors(app)
    api = _Api(engine, settings)
    app.post("/v1/chat/completions")(api.chat)
    app.post("/v1/completions")(api.complete)
    app.get("/v1/models")(api.models)
    app.get("/v1/models/{name:path}")(api.model)
    app.get("/health")(api.health)
    app.get("/metrics")(api.metrics)
    app.include_router(page_router(engine))
    return app


class _Api:
    """The routes."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.prompts = Prompts(engine.tokenizer)
        self.started = int(time.time())
        self.headers = {_ENGINE: engine.kind}

    async def chat(self, http: HttpRequest) -> Response:
        body = parse(ChatBody, await http.body())
        self._check_model(body.model)
        messages = [message.plain() for message in body.messages]
        ids = await asyncio.to_thread(self.prompts.encode, messages)
        writer = ChatWriter(
            self.settings.model_name, self.prompts.names, [ids],
            logprobs=body.logprobs, token_ids=body.return_token_ids,
        )  # fmt: skip
        limit = body.limit or max(1, self.engine.most_output(len(ids), body.n))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return await self._answer(http, body, writer, limit, logprobs)

    async def complete(self, http: HttpRequest) -> Response:
        body = parse(CompletionBody, await http.body())
        self._check_model(body.model)
        prompts = body.prompts
        ids = [await asyncio.to_thread(self.prompts.encode, prompt) for prompt in prompts]
        echo = None
        if body.echo:
            for prompt in ids:  # before it is decoded
                self.engine.check_prompt(prompt)
            pairs = zip(prompts, ids, strict=True)
            echo = [await asyncio.to_thread(self.prompts.echo, *pair) for pair in pairs]
        writer = CompletionWriter(
            self.settings.model_name, self.prompts.names, ids,
            logprobs=body.logprobs is not None, token_ids=body.return_token_ids,
            echo=echo, choices=body.n,
        )  # fmt: skip
        told = body.echo and body.logprobs is not None
        return await self._answer(http, body, writer, body.max_tokens, body.logprobs, told)

    async def _answer(
        self,
        http: HttpRequest,
        body: Options,
        writer: ChatWriter | CompletionWriter,
        limit: int,
        logprobs: int | None,
        prompt_logprobs: bool = False,
    ) -> Response:
        call = Call(self.engine, body.n)
        call.submit(
            writer.prompts,
            max_tokens=limit,
            sampling=body.sampling,
            stop=body.stops,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            client=http.client.host if http.client else "",
        )
        if body.stream:
            events = _events(call, writer, body)
            return _Stream(call, events, media_type="text/event-stream", headers=self.headers)
        told = await _unless_gone(http, call, _collect(call, writer))
        return Response(told, media_type="application/json", headers=self.headers)

    async def models(self) -> Response:
        told = {"object": "list", "data": [self._describe()]}
        return JSONResponse(told, headers=self.headers)

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._describe(), headers=self.headers)

    async def health(self) -> Response:
        alive = self.engine.alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def metrics(self) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.engine.metrics.text(), media_type=kind)

    def _describe(self) -> dict[str, Any]:
        """The model; what is not OpenAI's is under `path_attention`."""
        more = {
            "engine": self.engine.kind,
            "chat_template": "tokenizer" if self.prompts.has_template else "plain",
            "max_prompt_tokens": self.settings.max_prompt_tokens,
            "max_output_tokens": self.settings.max_output_tokens,
        }
        name, owner = self.settings.model_name, "path-attention"
        told = {"id": name, "object": "model", "created": self.started, "owned_by": owner}
        return {**told, "path_attention": more}

    def _check_model(self, name: str) -> None:
        if name != self.settings.model_name:
            raise Refused(
                f"the model {name[:80]!r} does not exist; this server has "
                f"{self.settings.model_name!r}",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip


async def _collect(call: Call, writer: Writer) -> bytes:
    choices = [Whole() for _ in range(len(writer.prompts) * call.choices)]
    async for n, piece in call.pieces():
        choices[n].add(piece)
    # Long with log-probabilities: the loop goes on meanwhile.
    return await asyncio.to_thread(lambda: _json(writer.whole(choices)).encode())


async def _unless_gone(http: HttpRequest, call: Call, answer: Any) -> Any:
    """The answer, unless the client leaves before: then it is not written to its end."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    reading, watching = asyncio.ensure_future(answer), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({reading, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise Refused("the client has left", status=499, kind="client_error")
        return reading.result()
    finally:
        call.cancel()
        for task in (reading, watching):
            task.cancel()


async def _events(
    call: Call, writer: ChatWriter | CompletionWriter, body: Options
) -> AsyncIterator[str]:
    """Server-sent events of a streamed answer."""
    more = {"usage": None} if body.tells_usage else {}
    lasts: dict[int, Any] = {}
    opened = isinstance(writer, ChatWriter) or writer.echo is not None
    try:
        for n in range(len(writer.prompts) * call.choices if opened else 0):
            yield _event({**writer.opening(n), **more})
        async for told in call.pieces_or_waits(_QUIET):
            if told is None:
                yield ": waiting\n\n"  # a comment: proxies end what is silent
                continue
            n, piece = told
            if piece.finish is not None:
                lasts[n] = piece
            if len(piece.logprobs) > _MANY:
                chunks = await asyncio.to_thread(writer.chunks, n, piece)
            else:
                chunks = writer.chunks(n, piece)
            for chunk in chunks:
                yield _event({**chunk, **more})
        if body.tells_usage:
            usage = writer.usage([lasts[n] for n in sorted(lasts)])
            yield _event(writer.chunk(None, usage=usage))
        yield "data: [DONE]\n\n"
    except Refused as error:
        yield _event(error.body())
    finally:
        call.cancel()


def _event(told: dict[str, Any]) -> str:
    return f"data: {_json(told)}\n\n"


def _json(told: dict[str, Any]) -> str:
    return json.dumps(told, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class _Stream(StreamingResponse):
    """A stream that ends its call as soon as the client leaves, also while nothing is sent."""

    def __init__(self, call: Call, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._call = call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        leaving = asyncio.ensure_future(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:
            pass  # the client has left in the middle of an event
        finally:
            self._call.cancel()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)


def _handle_errors(app: FastAPI) -> None:
    async def refused(http: HttpRequest, error: Any) -> Response:
        return error_response(error)

    async def plain(http: HttpRequest, error: Any) -> Response:
        told = error_response(Refused(str(error.detail), status=error.status_code))
        told.headers.update(error.headers or {})
        return told

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(HTTPException, plain)
