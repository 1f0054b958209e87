"""Signals that end a run: noted, so that the step at hand can be finished and saved."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SAME = 5.0  # seconds: a scheduler tells each process, and torchrun tells its own once more


class Stop:
    """The first signal received, if any."""

    received: int | None = None


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Note SIGINT and SIGTERM instead of dying; five seconds after the first, they act as before.

    What comes sooner is the same wish, told twice.
    """
    stop, first = Stop(), 0.0
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        nonlocal first
        if stop.received is None:
            stop.received, first = number, time.monotonic()
        elif time.monotonic() - first > _SAME:
            restore()
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()
