"""The benchmarks of decoding: options, the check, figures. Times need a GPU."""

from __future__ import annotations

import pytest
import torch

from path_attention.benchmarks import decode, generation
from path_attention.benchmarks.decode import BenchmarkDecode
from path_attention.benchmarks.generation import BenchmarkGeneration

SMALL = {"shapes": "1x300x2x1x64", "encodings": "path_fox,nope", "repeats": 2}


@pytest.mark.parametrize("command", [BenchmarkDecode(), BenchmarkGeneration()])
def test_a_processor_is_refused(command):
    with pytest.raises(ValueError, match="device: expected an NVIDIA GPU, got cpu"):
        command.measure(torch.device("cpu"), lambda line: None)


def test_figures(tmp_path):
    row = {"batch": 1, "context": 300, "heads": 2, "key_heads": 1, "size": 64, "ratio": 1.1}
    rows = [{**row, "candidate": "sdpa_cudnn", "worst": None}]
    rows.append({**row, "candidate": "path", "worst": 1.4})
    decode._draw({"device": "x", "rows": rows}, tmp_path / "a.png")
    row = {"preset": "path", "batch": 1, "context": 300, "ratio": 0.9, "tokens_per_second": 9.0}
    generation._draw({"device": "x", "rows": [row]}, tmp_path / "b.png")
    forked = [{**row, "ratio": None, "tokens_per_second": None}]  # no cache fitted
    generation._draw({"device": "x", "rows": forked}, tmp_path / "c.png")
    for name in "abc":
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_rows(tmp_path):
    rows = BenchmarkDecode(**SMALL).measure(torch.device("cuda"), lambda line: None)
    assert [r["candidate"] for r in rows if r["candidate"] != "fla_attention"] == [
        "sdpa_cudnn", "sdpa_flash", "path_fox", "nope",
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in rows)


@pytest.mark.gpu
def test_a_wrong_step_is_not_measured(monkeypatch):
    right = decode.decode_step
    monkeypatch.setattr(decode, "decode_step", lambda *x, **options: 1.1 * right(*x, **options))
    with pytest.raises(ValueError, match="decode: path_fox errs by"):
        BenchmarkDecode(**SMALL).measure(torch.device("cuda"), lambda line: None)
