"""Locks between processes that the system lets go when their holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Waits for the file's lock; the file is taken away behind it."""
    while True:
        with open(lock, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                mine = os.path.samestat(os.fstat(file.fileno()), lock.stat())
            except FileNotFoundError:
                mine = False
            if not mine:  # the one that had it took it away
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


@contextmanager
def lock_if_free(lock: Path, patience: float = 0.0) -> Iterator[bool]:
    """Whether the file's lock was free, or became so within some seconds; then it is held inside.

    Its folder is made. (Of a process that was killed, children may hold on for a moment.)
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience
    with open(lock, "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                yield False
            else:
                yield True
            return
