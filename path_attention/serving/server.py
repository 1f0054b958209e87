"""The HTTP server of an engine, and how long each of its connections may take."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
from dataclasses import replace
from http import HTTPStatus
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from path_attention.serving.app import create_app
from path_attention.serving.engine import Engine
from path_attention.serving.guards import error_response, number_response
from path_attention.serving.metrics import Metrics
from path_attention.serving.request import Refused
from path_attention.serving.settings import Settings

_LAST = 30  # seconds in which what runs must end once the server does


def make_server(
    engine: Engine,
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    log_level: str = "info",
) -> uvicorn.Server:
    """A server that listens once it runs.

    It is asked for by loopback's names, its own address and `allowed_hosts`; by any where it
    listens beyond loopback and these are none.
    """
    if is_loopback(host) or settings.allowed_hosts:
        own = f"[{host}]" if ":" in host else host
        settings = replace(settings, allowed_hosts=(*settings.allowed_hosts, own))
    else:
        settings = replace(settings, allowed_hosts=("*",))

    class Own(Connection):
        limits, metrics = settings, engine.metrics

    config = uvicorn.Config(
        create_app(engine, settings),
        host=host,
        port=port,
        log_level=log_level,
        http=Own,
        ws="none",
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_graceful_shutdown=_LAST + 5,
        server_header=False,
    )
    return Server(config, engine)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at an address or a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Server(uvicorn.Server):
    """A server that closes its engine before it waits for answers: clients are told by it."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.close(_LAST)
        await super().shutdown(sockets)


class Connection(H11Protocol):
    """A connection whose client must go on: with a request that it began, with what it reads.

    Times of a body are minded by `Guards`. A clock runs while the client owes bytes that no route
    waits for: its first request, the rest of a request's head, or of a body that was answered
    before its end. Another runs while it leaves unread what it was sent.
    """

    limits: ClassVar[Settings]
    metrics: ClassVar[Metrics]
    _clock: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=0)  # whatever is left unread is noticed
        self._mind()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._clock, self._reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._mind()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._mind()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, in OpenAI's shape; 431 where the head is too long."""
        self._refuse(Refused(msg, status=getattr(sys.exc_info()[1], "error_status_hint", 400)))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(None)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def _mind(self) -> None:
        """Start the clock, stop it, or let it go on."""
        theirs, ours = self.conn.their_state, self.conn.our_state
        began = self.cycle is None or bool(self.conn.trailing_data[0])
        owes = (theirs is h11.IDLE and began) or (theirs is h11.SEND_BODY and ours is h11.DONE)
        if owes and self._clock is None:
            self._clock = self.loop.call_later(self.limits.client_seconds, self._late)
        elif not owes and self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _late(self) -> None:
        began = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if began:
            seconds = self.limits.client_seconds
            late = f"the request's head took more than {seconds:g} seconds"
            self._refuse(Refused(late, status=408, kind="timeout_error", code="timeout"))
        else:
            self.transport.close()

    def _watch(self, left: int | None) -> None:
        """Give the client up if of `left` bytes that it had to read none was read since."""
        now = self.transport.get_write_buffer_size()
        if left is not None and now >= left:
            self.transport.abort()
            return
        self._reading = self.loop.call_later(self.limits.client_seconds, self._watch, now)

    def _refuse(self, error: Refused) -> None:
        """Answer without a route, if nothing was answered yet, and end."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            told = error_response(error)
            number_response(told.headers, error.status, self.metrics)
            headers = [*told.raw_headers, (b"connection", b"close")]
            phrase = HTTPStatus(error.status).phrase.encode()
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=phrase),
                h11.Data(data=bytes(told.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
