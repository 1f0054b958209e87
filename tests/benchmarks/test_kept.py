"""What a benchmark keeps: only for the same run, whole, and unchanged."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from path_attention.benchmarks import kept as module
from path_attention.benchmarks.kept import Kept, kept_for

CPU = torch.device("cpu")
ROW = {"ms": 0.1 + 0.2, "tokens": 2**60, "error": 5e-324, "name": "α", "fits": True, "mfu": None}


@dataclass(frozen=True, kw_only=True)
class Options:
    size: int = 1
    model: Path | None = None
    out: Path = Path("x")


@pytest.fixture
def options(tmp_path: Path) -> Options:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("1")
    return Options(out=tmp_path / "x.json", model=tmp_path / "model")


def opened(options: Options) -> Kept:
    return kept_for(options, CPU, print, (options.model, None))


def never() -> Any:
    raise AssertionError("expected not to be measured again")


def test_rows_are_kept_bit_for_bit(options: Options, capsys) -> None:
    path = options.out.with_name("x.partial.json")
    assert opened(options).rows("a", lambda: iter([ROW])) == [ROW]
    assert path.is_file() and not capsys.readouterr().out
    again = opened(options)
    (row,) = again.rows("a", never)
    assert row == ROW and list(row) == list(ROW)
    assert [type(x) for x in row.values()] == [type(x) for x in ROW.values()]
    assert capsys.readouterr().out == "a: measured before\n"
    again.delete()
    again.delete()
    assert not path.exists()


def test_what_is_asked_for_twice_is_two_units(options: Options) -> None:
    for _ in range(2):  # the second time from the file
        kept = opened(options)
        assert [kept.rows("a", lambda n=n: [{"n": n}])[0]["n"] for n in range(3)] == [0, 1, 2]


def test_what_is_done_to_rows_is_not_kept(options: Options) -> None:
    first = opened(options)
    first.rows("a", lambda: [ROW])[0]["ms"] = 7.0
    first.rows("b", lambda: [ROW])
    assert opened(options).rows("a", never) == [ROW]


def test_a_unit_without_rows_is_measured_again(options: Options) -> None:
    first = opened(options)
    assert first.rows("a", lambda: []) == []
    assert first.rows("b", lambda: [ROW]) == [ROW]
    again = opened(options)
    assert again.rows("a", lambda: [{"n": 1}]) == [{"n": 1}]
    assert again.rows("b", never) == [ROW]


def test_a_bad_row_is_refused_at_once(options: Options) -> None:
    first = opened(options)
    first.rows("a", lambda: [ROW])
    with pytest.raises(ValueError, match="rows: expected finite numbers, got ms: nan"):
        first.rows("b", lambda: [{"ms": float("nan")}])
    again = opened(options)
    assert again.rows("a", never) == [ROW] and again.rows("b", lambda: [ROW]) == [ROW]


def other(name: str) -> Callable[[pytest.MonkeyPatch, Options], Options]:
    return lambda monkeypatch, options: (
        monkeypatch.setattr(module, name, lambda *_: "other") or options
    )


def other_source(monkeypatch: pytest.MonkeyPatch, options: Options) -> Options:
    right = module._digest
    changed = lambda path, pattern="*": right(path, pattern) + pattern.strip("*")  # noqa: E731
    monkeypatch.setattr(module, "_digest", changed)
    return options


def other_torch(monkeypatch: pytest.MonkeyPatch, options: Options) -> Options:
    monkeypatch.setattr(module, "library_versions", lambda: {"torch": "0"})
    return options


def other_loops(monkeypatch: pytest.MonkeyPatch, options: Options) -> Options:
    monkeypatch.setenv("PATH_ATTENTION_HOPPER", "0")
    return options


def other_model(monkeypatch: pytest.MonkeyPatch, options: Options) -> Options:
    assert options.model is not None
    (options.model / "weights").write_text("2")
    return options


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda _, options: replace(options, size=2), r"--size was 1 and now is 2\)"),
        (other("source_commit"), "commit was .* and now is 'other'"),
        (other("device_name"), "device was .* and now is 'other'"),
        (other_source, "source was"),
        (other_torch, "torch was .* and now is '0'"),
        (other_loops, "PATH_ATTENTION_HOPPER was None and now is '0'"),
        (other_model, "contents of .*model was"),
    ],
)
def test_another_run_is_refused_and_the_file_left(options, change, named, monkeypatch) -> None:
    opened(options).rows("a", lambda: [ROW])
    path = options.out.with_name("x.partial.json")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"out: .*x\.partial\.json to be deleted.*{named}"):
        opened(change(monkeypatch, options))
    assert path.read_bytes() == before


@pytest.mark.parametrize("change", [
    lambda text: text[:-3],
    lambda text: "[]",
    lambda text: json.dumps({"units": {}}),
    lambda text: json.dumps({**json.loads(text), "units": {"1: a": [3]}}),
])  # fmt: skip
def test_a_damaged_file_is_refused_and_left(options: Options, change) -> None:
    opened(options).rows("a", lambda: [ROW])
    path = options.out.with_name("x.partial.json")
    path.write_text(change(path.read_text()))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"out: .*x\.partial\.json is damaged \(.*; delete it"):
        opened(options)
    assert path.read_bytes() == before


def test_a_process_that_is_ended_has_written_its_rows(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, pathlib\n"
        "from path_attention.benchmarks.kept import Kept\n"
        "kept = Kept(pathlib.Path(sys.argv[1]), {'size': 1}, print)\n"
        "kept.rows('a', lambda: [{'n': 1}])\n"
        "kept.rows('b', lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
    )
    path = tmp_path / "x.partial.json"
    done = subprocess.run([sys.executable, "-c", program, str(path)])
    assert done.returncode == -signal.SIGTERM
    assert Kept(path, {"size": 1}, print).rows("a", never) == [{"n": 1}]
