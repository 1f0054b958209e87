"""What stands before every route: the size of a body, its kind, and the key."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from path_attention.serving.request import Refused
from path_attention.serving.settings import Settings


def error_response(error: Refused) -> JSONResponse:
    """An error in OpenAI's shape."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


class Guards:
    """Reads bodies up to a limit, and lets no one past without the key.

    The key is asked for by every POST and by what lies under /v1 and /metrics. A POST must be JSON:
    pages of other origins can't send that without being asked first.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check_key(scope, headers)
            body = await self._read(scope, headers, receive)
        except Refused as error:
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, _replay(body, receive), send)

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
            body += message.get("body", b"")
            more = message.get("more_body", False)  # not after a disconnect either
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
