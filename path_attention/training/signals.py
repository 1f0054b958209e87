"""Signals that end a run: noted, so that the step at hand can be finished and saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """The first signal received, if any."""

    received: int | None = None


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Note SIGINT and SIGTERM instead of dying; after the first, they act as before again."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        stop.received = number
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()
