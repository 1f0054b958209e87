"""Generated code behind walls: what it may not do fails, and what it should do passes."""

from __future__ import annotations

import os
import sys
import time

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
    ],
)
def test_what_is_wrong_or_forbidden_fails(program):
    assert run_code(program).kind == "failed"


def test_files_outside_stay_as_they_are(tmp_path):
    file = tmp_path / "kept"
    file.write_text("kept")
    for how in ("open({!r}, 'w')", "open({!r}, 'a')", "import os; os.unlink({!r})"):
        assert not run_code(how.format(str(file))).passed
    assert not run_code(f"import os; os.rename({str(file)!r}, {str(file) + '2'!r})").passed
    assert not run_code(f"import os; os.truncate({str(file)!r}, 0)").passed
    assert not run_code(f"import os; os.chmod({str(file)!r}, 0)").passed
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
