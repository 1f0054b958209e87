"""Signals that end a run: one that is told twice at once is one; a later one ends the process."""

from __future__ import annotations

import signal

import pytest

from path_attention.training import signals


def test_a_wish_told_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), signals.stop_signals() as stop:
        assert stop.received is None
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
            assert stop.received == signal.SIGTERM
        now += 6
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("a later one acts as before")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
