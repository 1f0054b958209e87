"""The table of what kernels take: compiled in a process that does not interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
SMALL = ["--sizes", "128", "--encodings", "nope", "--loops", "portable,hopper"]


def command(*words: str, **environment: str) -> subprocess.CompletedProcess:
    plain = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "path_attention.cli", "benchmark", "kernels", *words],
        env={**plain, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


def test_the_table_has_every_kernel(tmp_path):
    done = command(*SMALL, "--out", str(tmp_path / "kernels"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    by_name = {r["kernel"]: r for r in rows}
    assert set(by_name) >= {"queries_fwd", "meet_fwd", "keys_bwd", "local_bwd", "meet_fwd_hopper"}
    assert by_name["meet_fwd_hopper"]["loops"] == "hopper"
    assert "block_fwd" not in by_name  # nothing is moved
    for row in rows:
        assert 0 < row["registers"] <= 255 and row["shared"] <= 227 * 1024, row
    assert by_name["meet_fwd"]["wgmma"] > 0
    assert (tmp_path / "kernels.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (
            ["--capability", "75"],
            {},
            "capability: expected one of 80, 86, 89, 90, 100, 120, got 75",
        ),
        (["--sizes", "65"], {}, "sizes: expected"),
        (["--capability", "80", "--loops", "hopper"], {}, "loops: expected portable with"),
        ([], {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET: expected not to be set"),
    ],
)
def test_refusals(words, environment, said, tmp_path):
    done = command(*words, "--out", str(tmp_path / "kernels"), **environment)
    assert done.returncode != 0
    assert said in " ".join((done.stdout + done.stderr).split())
