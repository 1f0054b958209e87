"""Requests that wait: clients take turns, however many each has."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from path_attention.serving.answer import Ticket


class FairQueue:
    """First come first served of each client, and one of each client in turn."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Ticket]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[Ticket]:
        for waiting in self._clients.values():
            yield from waiting

    def push(self, ticket: Ticket) -> None:
        """Add one behind its client's others."""
        self._clients.setdefault(ticket.request.client, deque()).append(ticket)

    def first(self) -> Ticket | None:
        """Whose turn it is; None if nobody waits."""
        return next(iter(self), None)

    def pop(self) -> Ticket:
        """Take the first; its client is then the last."""
        client, waiting = self._clients.popitem(last=False)
        ticket = waiting.popleft()
        if waiting:
            self._clients[client] = waiting
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Take one out, wherever it is."""
        client = ticket.request.client
        self._clients[client].remove(ticket)
        if not self._clients[client]:
            del self._clients[client]
