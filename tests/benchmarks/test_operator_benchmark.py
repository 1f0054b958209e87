"""The operator's benchmark: what it measures, and that it refuses a wrong operator."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from path_attention.benchmarks import candidates as module
from path_attention.benchmarks.candidates import Candidate, candidates
from path_attention.benchmarks.comparison import pick_device
from path_attention.benchmarks.inputs import make_inputs
from path_attention.benchmarks.measure import Job, peak_bytes, summarise, time_interleaved
from path_attention.benchmarks.operator import BenchmarkOperator
from path_attention.ops import path
from path_attention.results import read_result

CPU = torch.device("cpu")
SMALL = {"tokens": "40,70", "heads": 2, "size": 8, "repeats": 2, "device": "cpu"}


def job(T: int, encoding: str, name: str = "blockwise") -> Job:
    inputs = make_inputs(1, T, 2, 2, 32, torch.float32, CPU)
    (candidate,) = (c for c in candidates("cpu") if c.name == name)
    call = candidate.make(inputs, encoding)
    return Job(call, inputs.used_by(encoding), torch.ones_like(inputs.q))


def test_writes_rows_figure_and_table(tmp_path, capsys):
    BenchmarkOperator(**SMALL, encodings="path,path_fox,fox,nope", out=tmp_path / "x").run()
    result = read_result(tmp_path / "x.json")
    rows = result["rows"]
    names = [(row["candidate"], row["encoding"]) for row in rows if row["tokens"] == 40]
    assert names == [
        ("sdpa", "nope"),
        *(("blockwise", e) for e in ("path", "path_fox", "fox", "nope")),
    ]
    assert len(rows) == 10
    for row in rows:
        assert row["both_ms"] > 0 and row["peak_mib"] > 0 and row["error"] < 1e-5
        if row["candidate"] == "sdpa":
            assert row["both_ratio"] == 1
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "blockwise" in capsys.readouterr().out
    assert json.loads((tmp_path / "x.json").read_text()) == result


def test_memory_alone_at_further_lengths(tmp_path):
    options = {**SMALL, "tokens": "40", "memory_tokens": "40,90", "encodings": "path"}
    BenchmarkOperator(**options, out=tmp_path / "x").run()
    rows = read_result(tmp_path / "x.json")["rows"]
    assert [row["tokens"] for row in rows] == [40, 40, 90, 90]
    assert [row["both_ms"] is None for row in rows] == [False, False, True, True]
    assert all(row["peak_mib"] > 0 for row in rows)


def test_a_batch_at_every_length(tmp_path):
    options = {**SMALL, "batch": 3, "encodings": "fox"}
    BenchmarkOperator(**options, out=tmp_path / "torch2.13").run()
    result = read_result(tmp_path / "torch2.13.json")
    assert {(row["tokens"], row["batch"]) for row in result["rows"]} == {(40, 3), (70, 3)}
    assert result["command"] == (
        "path-attention benchmark operator --tokens 40,70 --batch 3 --heads 2 --size 8 "
        "--encodings fox --device cpu --repeats 2 --out torch2.13"
    )


def test_peers_that_cannot_are_left_out_and_named(tmp_path, monkeypatch, capsys):
    def crash(x, encoding):
        raise RuntimeError("no kernel\nfor this")

    def too_large(x, encoding):
        if x.q.shape[1] == 70:
            raise torch.OutOfMemoryError("70 tokens")
        return module.DEFINITION.make(x, encoding)

    peers = [
        Candidate(name=name, encodings=("fox",), make=make, devices=("cpu",))
        for name, make in (
            ("broken", crash),
            ("nan", lambda x, e: lambda: x.q * torch.nan + x.k + x.v + x.log_forget[..., None]),
            ("large", lambda x, e: lambda: too_large(x, e)()),
        )
    ]
    monkeypatch.setattr(module, "_CANDIDATES", (*module._CANDIDATES, *peers))
    BenchmarkOperator(**SMALL, encodings="fox", out=tmp_path / "x").run()
    rows = read_result(tmp_path / "x.json")["rows"]
    names = [(row["tokens"], row["candidate"]) for row in rows]
    assert names == [
        *((40, name) for name in ("sdpa", "blockwise", "large")),
        *((70, name) for name in ("sdpa", "blockwise")),
    ]
    said = capsys.readouterr().out
    assert "broken fox: fails here: RuntimeError: no kernel for this" in said
    assert "nan fox: results are not finite" in said
    assert "large fox: does not fit in memory" in said


@pytest.mark.parametrize("factor", [1.001, torch.nan])
def test_a_wrong_operator_is_not_measured(factor, tmp_path, monkeypatch):
    right = path.IMPLEMENTATIONS["blockwise"]

    def wrong(*arguments):
        out, lse = right(*arguments)
        return out * factor, lse

    monkeypatch.setitem(path.IMPLEMENTATIONS, "blockwise", wrong)
    with pytest.raises(ValueError, match="blockwise: expected a relative error .* not measured"):
        BenchmarkOperator(**SMALL, out=tmp_path / "x").run()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "256,"}, "tokens: expected positive integers"),
        ({"tokens": "0"}, "tokens: expected positive integers"),
        ({"memory_tokens": "a"}, "memory_tokens: expected positive integers"),
        (
            {"encodings": "rope"},
            "encodings: expected some of path, path_fox, fox, nope, alibi, got 'rope'",
        ),
        ({"candidates": "fast"}, "candidates: expected some of sdpa, blockwise, got 'fast'"),
        ({"heads": 4, "key_heads": 3}, "key_heads: expected a divisor of 4 heads, got 3"),
        ({"repeats": 0}, "repeats: expected at least 1, got 0"),
        ({"device": "tpu"}, "device: expected cpu, cuda or auto, got 'tpu'"),
        ({"device": "meta"}, "device: expected cpu, cuda or auto, got 'meta'"),
    ],
)
def test_bad_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        BenchmarkOperator(**{**SMALL, **options}, out=tmp_path / "x").run()


def test_a_gpu_that_is_asked_for_is_the_current_one(monkeypatch):
    """Else streams and events, which name none, are the first one's."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert pick_device("cuda:1") == torch.device("cuda", 1) == chosen[0]
    with pytest.raises(ValueError, match="device: expected one of 2 that are here, got 'cuda:2'"):
        pick_device("cuda:2")


def test_peak_counts_what_is_held_at_once():
    x = torch.ones(1000, requires_grad=True)

    def call():
        y = x * 2  # 4000 bytes, saved by exp's successor no longer than needed
        return y.detach() * x  # 4000 more

    # forward holds y (saved) and the output; backward adds the gradient of x
    assert peak_bytes(Job(call, [x], torch.ones(1000))) == 12000


def test_the_profiler_says_nothing_of_itself():
    """In a process of its own: what it says is settled when it is first used."""
    program = (
        "import torch; from path_attention.benchmarks.measure import Job, peak_bytes\n"
        "x = torch.ones(1000, requires_grad=True)\n"
        "print(peak_bytes(Job(lambda: x * 2, [x], torch.ones(1000))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 0
    assert "profiler" not in done.stderr


@pytest.mark.parametrize("encoding", ["path_fox", "fox"])
def test_peak_memory_grows_linearly(encoding):
    peaks = [peak_bytes(job(T, encoding)) for T in (1024, 2048, 4096)]
    assert all(b < 2.3 * a for a, b in pairwise(peaks))
    # T² scores of one head alone would be 64 MiB in float32
    assert peaks[-1] < 64 * 2**20


def test_jobs_take_turns():
    order = []

    def make(name):
        x = torch.ones(3, requires_grad=True)

        def call():
            order.append(name)
            return x * 2

        return Job(call, [x], torch.ones(3))

    times = time_interleaved([make("a"), make("b")], repeats=3)
    assert order == ["a", "b"] * 4  # the first turn warms up
    assert [len(t) for t in times] == [3, 3]
    assert all(t["both"] == t["forward"] + t["backward"] for taken in times for t in taken)


def test_ratios_are_of_the_same_turn():
    def turn(forward, backward):
        return {"forward": forward, "backward": backward, "both": forward + backward}

    anchor = [turn(1.0, 1.0), turn(10.0, 10.0), turn(2.0, 2.0)]
    taken = [turn(3.0, 5.0), turn(20.0, 40.0), turn(6.0, 10.0)]
    row = summarise(taken, anchor)
    assert row["forward_ms"] == 6 and row["forward_ratio"] == 3
    assert row["backward_ratio"] == 5 and row["both_ratio"] == 4
