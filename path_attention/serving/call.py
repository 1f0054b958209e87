"""One HTTP call: its requests to the engine, and their pieces as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from path_attention.serving.answer import Ticket
from path_attention.serving.engine import Engine
from path_attention.serving.request import Deliver, Piece, Refused, Request


class Call:
    """Requests that are answered together; choice n belongs to request n // choices."""

    def __init__(self, engine: Engine, choices: int) -> None:
        self.engine, self.choices = engine, choices
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Queue[tuple[int, Piece | Refused]] = asyncio.Queue()
        self._tickets: list[Ticket] = []

    def submit(self, prompts: Sequence[Sequence[int]], **options: Any) -> None:
        """Queue a request for each prompt, or none and raise `Refused`."""
        try:
            for n, prompt in enumerate(prompts):
                request = Request(
                    prompt=list(prompt), choices=self.choices, deliver=self._deliver(n), **options
                )
                self._tickets.append(self.engine.submit(request))
        except Refused:
            self.cancel()
            raise

    def _deliver(self, n: int) -> Deliver:
        def deliver(piece: Piece | Refused) -> None:
            try:
                self._loop.call_soon_threadsafe(self._came.put_nowait, (n, piece))
            except RuntimeError:  # the loop was closed: nobody listens
                for ticket in self._tickets[n : n + 1]:
                    ticket.cancelled = True

        return deliver

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece) until every choice has ended. Raises `Refused` if one fails."""
        async for told in self.pieces_or_waits(None):
            if told is not None:
                yield told

    async def pieces_or_waits(
        self, seconds: float | None
    ) -> AsyncIterator[tuple[int, Piece] | None]:
        """As `pieces`, and None whenever none has come for so long."""
        left = len(self._tickets) * self.choices
        while left:
            try:
                n, piece = await asyncio.wait_for(self._came.get(), seconds)
            except TimeoutError:
                yield None
                continue
            if isinstance(piece, Refused):
                raise piece
            left -= piece.finish is not None
            yield n * self.choices + piece.index, piece

    def cancel(self) -> None:
        """Stop what has not ended, and forget the requests, which know this call."""
        for ticket in self._tickets:
            if not ticket.done:
                self.engine.cancel(ticket)
        self._tickets = []  # a ring would keep long prompts until all of Python's garbage is sought
