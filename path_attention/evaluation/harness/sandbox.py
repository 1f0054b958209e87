"""Run generated code behind limits that the kernel holds: time, memory, files, no network."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

_CHILD = Path(__file__).with_name("sandbox_child.py")
_MEMORY = 2**30
_TOLD = 2000  # bytes of an error that are kept
_PIECE = 2**16


@dataclass(frozen=True)
class Outcome:
    """How a program ended: "passed", "failed", "timed out", with the last line of its error."""

    kind: str
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.kind == "passed"


def run_code(program: str, *, seconds: int = 10, memory: int = _MEMORY) -> Outcome:
    """Run a Python program in a process of its own, which can reach and change nothing.

    It passes if it runs to its end without an exception. It may read files; it cannot write,
    rename or delete one, open a socket, start or signal a process, and it has an empty environment.
    Of what it prints no more than an end is kept.
    See `sandbox_child` for how, and for what it is not: a guard against programs written to attack
    the kernel.

    Args:
        program: source text.
        seconds: of processor time, and as many again of waiting.
        memory: bytes of address space.

    Raises:
        ValueError: where this kernel or machine cannot hold the limits (see `check_sandbox`).

    >>> run_code("assert 1 + 1 == 2").kind
    'passed'
    >>> run_code("assert 1 + 1 == 3").kind
    'failed'
    >>> run_code("raise SystemExit(0)").kind
    'failed'
    """
    check_sandbox()
    return _run(program, seconds, memory)


@cache
def check_sandbox() -> None:
    """Raise ValueError unless a program runs here, and one that opens a socket or a file fails."""
    tries = {
        "pass": True,
        "import socket; socket.socket()": False,
        "open('x', 'w')": False,
        "import os; os.fork()": False,
    }
    for program, passes in tries.items():
        outcome = _run(program, 10, _MEMORY)
        if outcome.passed != passes:
            raise ValueError(
                "maths_and_code: expected a Linux kernel with seccomp on x86-64 or arm64, which "
                f"running generated code needs; {program!r} {outcome.kind} {outcome.error}"
            )


def _run(program: str, seconds: int, memory: int) -> Outcome:
    word = secrets.token_hex(16)
    told = json.dumps({"seconds": seconds, "memory": memory, "word": word})
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_CHILD)],
            cwd=folder,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        with ThreadPoolExecutor(2) as readers:
            ends = [readers.submit(_end, stream) for stream in (child.stdout, child.stderr)]
            try:
                with suppress(BrokenPipeError), child.stdin as stdin:
                    stdin.write(f"{told}\n{program}".encode())
                child.wait(timeout=2 * seconds)
            except subprocess.TimeoutExpired:
                return Outcome("timed out")
            finally:
                child.kill()
                child.wait()
            out, err = (end.result() for end in ends)
    if out == word.encode() and child.returncode == 0:
        return Outcome("passed")
    if child.returncode in (-9, -24) and not err:  # SIGKILL or SIGXCPU: out of processor time
        return Outcome("timed out")
    lines = err.decode("utf-8", "replace").strip().splitlines()
    return Outcome("failed", lines[-1] if lines else f"exit status {child.returncode}")


def _end(stream: IO[bytes]) -> bytes:
    """The last of what comes; all of it is read, so that it neither waits nor fills memory."""
    kept = b""
    with stream:
        while piece := stream.read1(_PIECE):  # type: ignore[attr-defined]
            kept = (kept + piece)[-_TOLD:]
    return kept
