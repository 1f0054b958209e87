"""What stands before every route: names, sizes, times, the kind of a body, and the key."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from path_attention.serving.metrics import Metrics
from path_attention.serving.request import Refused
from path_attention.serving.settings import Settings

log = logging.getLogger("path_attention.serving")
REQUEST_ID = "x-request-id"
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def error_response(error: Refused) -> JSONResponse:
    """An error in OpenAI's shape."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


def number_response(headers: MutableHeaders, status: int, metrics: Metrics) -> None:
    """Give a response its number, as OpenAI's have one, and count it by its status."""
    headers[REQUEST_ID] = f"req_{uuid.uuid4().hex}"
    metrics.responses.labels(str(status)).inc()


class Guards:
    """Reads bodies up to a limit and for a time, and lets no one past without the key.

    The key is asked for by every POST and by what lies under /v1 and /metrics. A POST must be JSON:
    pages of other origins can't send that without being asked first. The Host header must name this
    server: a page whose own name was made to lead here, which to a browser is then of one origin
    with it, is refused. Responses are numbered and counted; what a route raises is one of 500.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self._hosts = {*_LOOPBACK, *(name.lower() for name in settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                number_response(MutableHeaders(scope=message), message["status"], self.metrics)
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check_head(scope)
            self._check_host(headers)
            self._check_key(scope, headers)
            body = await self._read_in_time(scope, headers, receive)
        except Refused as error:
            await error_response(error)(scope, receive, counted)
            return
        try:
            await self.app(scope, _replay(body, receive), counted)
        except Exception:
            if started:
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            failed = Refused("the server failed", status=500, kind="server_error")
            await error_response(failed)(scope, receive, counted)

    def _check_head(self, scope: Scope) -> None:
        """What came in one piece may be longer than the HTTP server reads of several."""
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self.settings.max_header_bytes:
            told = f"path and headers have more than {self.settings.max_header_bytes} bytes"
            raise Refused(told, status=431, code="headers_too_large")

    def _check_host(self, headers: Headers) -> None:
        given = headers.get("host")
        if given is None or "*" in self._hosts:  # browsers, of which pages make use, tell it always
            return
        if re.sub(r":\d*$", "", given).lower().removesuffix(".") not in self._hosts:
            raise Refused(
                f"this server is not asked for as {given[:80]!r}; --allowed-hosts adds names",
                status=403, kind="permission_error", code="host_not_allowed",
            )  # fmt: skip

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        key, path = self.settings.api_key, scope["path"]
        open_ = scope["method"] in ("GET", "HEAD") and not path.startswith(("/v1", "/metrics"))
        if key is None or open_:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.encode("latin-1"), key.encode())
        if scheme.lower() != "bearer" or not same:
            raise Refused(
                "the API key is missing or wrong", status=401, kind="authentication_error",
                code="invalid_api_key",
            )  # fmt: skip

    async def _read_in_time(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        seconds = self.settings.client_seconds
        try:
            return await asyncio.wait_for(self._read(scope, headers, receive), seconds)
        except TimeoutError:
            raise Refused(
                f"the body took more than {seconds:g} seconds",
                status=408, kind="timeout_error", code="timeout",
            ) from None  # fmt: skip

    async def _read(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        if scope["method"] != "POST":
            return b""
        kind = headers.get("content-type", "").split(";")[0].strip()
        if kind.lower() != "application/json":
            raise Refused("the body must be application/json", status=415)
        limit, body, more = self.settings.max_body_bytes, bytearray(), True
        size = int(headers.get("content-length", "0"))  # digits: the HTTP server saw to that
        while more and max(size, len(body)) <= limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused("the client has left", status=499, kind="client_error")
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if max(size, len(body)) > limit:
            told = f"the body has more than {limit} bytes"
            raise Refused(told, status=413, code="body_too_large")
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, then what comes after it."""
    waiting: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
