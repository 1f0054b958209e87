"""`path-attention serve` as a process of its own: it starts, answers, and ends as it is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from small_server import make_model, make_tokenizer

from path_attention import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path) -> Path:
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_server_ends_with_its_answers(folder) -> None:
    command = [sys.executable, "-m", "path_attention.cli", "serve", str(folder), "--port", "0"]
    environment = {**os.environ, "PATH_ATTENTION_API_KEY": "sesame", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            address = None
            for line in process.stderr:
                found = re.search(r"http://127\.0\.0\.1:\d+", line)
                if found:
                    address = found[0]
                    break
            assert address is not None
            assert httpx.get(f"{address}/v1/models").status_code == 401
            body = {"model": "path-attention", "prompt": "a", "max_tokens": 60, "stream": True}
            body["logit_bias"] = {"0": -100}
            headers = {"authorization": "Bearer sesame"}
            url = f"{address}/v1/completions"
            with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
            process.stderr.read()
            assert process.wait(30) in (0, -signal.SIGTERM)
        finally:
            process.kill()


def test_without_a_model(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["serve"], ["serve", "nowhere"]):
        with pytest.raises(SystemExit):
            cli.main(words)
        assert capsys.readouterr().err.startswith("error: model: expected a")
