"""Generated code behind walls: what it may not do fails, and what it should do passes."""

from __future__ import annotations

import os
import platform
import sys
import time
import tracemalloc

import pytest

from path_attention.evaluation.harness import sandbox
from path_attention.evaluation.harness.sandbox import Outcome, check_sandbox, run_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")


@pytest.mark.parametrize(
    "program",
    [
        "assert sorted([3, 1]) == [1, 3]",
        "import numpy; assert numpy.allclose(1, 1 + 1e-12)",
        "from typing import List; import math, re, collections, heapq, itertools",
        "import threading; t = threading.Thread(target=print); t.start(); t.join()",
        "import signal; signal.signal(10, lambda *_: None); signal.raise_signal(10)",
        "import resource; assert resource.getrlimit(resource.RLIMIT_NOFILE) == (64, 64)",
        "import sys; print('x' * 10**6, file=sys.stdout)",
    ],
)
def test_what_is_right_passes(program):
    assert run_code(program) == Outcome("passed")


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 == 2",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "def f(:",
        "import os; os.write(3, b'passed'); os._exit(0)",
        "x = bytearray(2**31)",
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 9), 1)",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.kill(os.getppid(), 0)",
        "open('mine', 'w')",
        "import os; os.mkdir('mine')",
        "import os; os.open('.', os.O_RDWR | os.O_TMPFILE)",
        "import ctypes; assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 0)",
        "import os; os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0))",
        "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_CORE)",
        "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        "import os; os.chroot('/')",
        "import os, ctypes; c = ctypes.CDLL(None); i = c.shmget(0, 99, 0o600); "
        "c.shmctl(i, 0, 0); assert i >= 0",
        "import os, ctypes; c = ctypes.CDLL(None); i = c.msgget(0, 0o600); "
        "c.msgctl(i, 0, 0); assert i >= 0",
    ],
)
def test_what_is_wrong_or_forbidden_fails(program):
    assert run_code(program).kind == "failed"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls by their numbers there")
@pytest.mark.parametrize("call", ["234, p, p, 0", "129, p, 0, info", "297, p, p, 0, info"])
def test_no_signal_reaches_the_evaluation_and_one_to_oneself_does(call):
    """tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo; signal 0 asks whether another one would."""
    program = (
        "import ctypes, os\np = os.{}()\ninfo = (ctypes.c_int * 32)(0, 0, -1)\n"
        f"assert ctypes.CDLL(None).syscall({call}) == 0"
    )
    assert run_code(program.format("getppid")).kind == "failed"
    if call.startswith("234"):
        assert run_code(program.format("getpid")).passed


def test_what_is_printed_without_end_fills_no_memory_here():
    flood = "import os\nfor n in range(1024): os.write({}, b'x' * 2**16)\n"
    tracemalloc.start()
    try:
        assert run_code(flood.format(2) + "raise ValueError('last')").error == "ValueError: last"
        assert run_code(flood.format(3)).kind == "failed"  # where the word goes
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_files_outside_stay_as_they_are(tmp_path):
    file = tmp_path / "kept"
    file.write_text("kept")
    for how in ("open({!r}, 'w')", "open({!r}, 'a')", "import os; os.unlink({!r})"):
        assert not run_code(how.format(str(file))).passed
    assert not run_code(f"import os; os.rename({str(file)!r}, {str(file) + '2'!r})").passed
    assert not run_code(f"import os; os.truncate({str(file)!r}, 0)").passed
    assert not run_code(f"import os; os.chmod({str(file)!r}, 0)").passed
    for follow in (True, False):
        how = f"import os; os.setxattr({str(file)!r}, 'user.mine', b'1', follow_symlinks={follow})"
        assert not run_code(how).passed
    opened = f"import os; f = os.open({str(file)!r}, os.O_RDONLY); "
    assert not run_code(opened + "os.setxattr(f, 'user.mine', b'1')").passed
    attributes = "import fcntl; fcntl.ioctl(f, 0x40086602, bytes(8))"
    assert "Operation not permitted" in run_code(opened + attributes).error
    assert file.read_text() == "kept" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_time_is_bounded(program):
    start = time.monotonic()
    assert run_code(program, seconds=1).kind == "timed out"
    assert time.monotonic() - start < 10


def test_the_environment_is_not_handed_on(monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "1")
    assert run_code("import os; assert 'SECRET_OF_MINE' not in os.environ").passed
    assert "SECRET_OF_MINE" in os.environ


def test_without_walls_nothing_runs(monkeypatch):
    check_sandbox.cache_clear()
    monkeypatch.setattr(sandbox, "_run", lambda *arguments: Outcome("passed"))
    with pytest.raises(ValueError, match="maths_and_code: expected a Linux kernel with seccomp"):
        run_code("pass")
    check_sandbox.cache_clear()
