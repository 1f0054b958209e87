"""The form of results: what is written can be read, what has not the form is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from path_attention import results
from path_attention.results import (
    check_result,
    command_line,
    make_result,
    read_result,
    with_ending,
    write_result,
)

ROOT = Path(__file__).parents[1]
UNDRAWN = {"gpu_tests.json"}  # a list of tests
ROWS = [{"model": "path", "length": 256, "perplexity": 7.25, "low": None, "exact": True}]


def test_every_committed_result_has_the_form_and_its_figure():
    folder = ROOT / "results"
    files = sorted(folder.rglob("*.json"))
    expected = {folder / "README.md", folder / "tasks" / "report.md"}
    for file in files:
        assert len(read_result(file)["command"].split()) > 1, f"{file.name} has no command"
        figure = file.with_suffix(".png")
        expected |= {file, figure}
        assert figure.is_file() or file.name in UNDRAWN, f"{file.name} has no figure"
    strangers = {path for path in folder.rglob("*") if path.is_file()} - expected
    assert not strangers, f"neither a result nor a result's figure: {strangers}"


def test_a_run_of_tests_is_written_as_a_result(tmp_path):
    (tmp_path / "test_three.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('n', [1, 2])\ndef test_two(n):\n    pass\n\n"
        "def test_bad():\n    assert 0\n\n@pytest.mark.gpu\ndef test_gpu():\n    pytest.skip('x')\n"
    )
    out = tmp_path / "tests.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--confcutdir", str(ROOT), "-p", "conftest"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    subprocess.run([*command, str(tmp_path), "--results", str(out)], env=environment, check=False)
    result = read_result(out)
    found = {row["test"]: (row["passed"], row["failed"], row["skipped"]) for row in result["rows"]}
    assert found == {"test_two": (2, 0, 0), "test_bad": (0, 1, 0), "test_gpu": (0, 0, 1)}
    assert result["command"].startswith("pytest -q") and "--results" in result["command"]


def test_written_is_read(tmp_path):
    result = make_result(what="Perplexity", rows=ROWS, command="path-attention evaluate")
    write_result(tmp_path / "new" / "x.json", result)
    assert read_result(tmp_path / "new" / "x.json") == result
    assert result["rows"] == ROWS
    assert result["versions"]["python"] == sys.version.split()[0]
    assert result["versions"]["torch"]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("given", "name"),
    [("a", "a"), ("torch2.13", "torch2.13"), ("a.json", "a"), ("a.png", "a"), ("a.json.b", None)],
)
def test_a_dot_in_the_name_of_a_result_stays(given, name):
    assert with_ending(Path("x.y", given), ".png") == Path("x.y", f"{name or given}.png")


def test_a_row_is_a_line(tmp_path):
    rows = [{"a": n, "b": "ß"} for n in range(3)]
    write_result(tmp_path / "x.json", make_result(what="x", rows=rows, command="x"))
    lines = (tmp_path / "x.json").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines if '"b"' in line] == rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"what": ""}, "what: expected words"),
        ({"commit": "main"}, "commit: expected 40 hexadecimal digits"),
        ({"versions": {}}, "versions: expected an object with python"),
        ({"rows": []}, "rows: expected at least one row"),
        ({"rows": [{"a": [1]}]}, "rows: expected flat values, got a"),
        ({"rows": [{"a": float("nan")}]}, "rows: expected finite numbers, got a: nan at index 0"),
        ({"rows": [3]}, "rows: expected objects"),
        ({"command": "python /home/me/x.py"}, "no path of a machine in it, got '/home/me/x.py'"),
        ({"rows": [{"data": "~/corpus"}]}, "no path of a machine"),
        ({"rows": [{"data": "C:\\corpus"}]}, "no path of a machine"),
        ({"extra": 1}, "expected an object with the keys"),
    ],
)
def test_what_has_not_the_form_is_refused(tmp_path, change, message):
    good = make_result(what="x", rows=ROWS, command="x")
    check_result(good)
    with pytest.raises(ValueError, match=message):
        write_result(tmp_path / "x.json", good | change)
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json: "):
        read_result(tmp_path / "x.json")


def test_the_command_names_no_machine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    argv = ["/usr/bin/path-attention", "evaluate", f"{tmp_path}/runs/a", "/mnt/data/corpus"]
    argv += ["--lengths=8,16", f"--out={tmp_path}/x", "--labels", "two words", "runs/b"]
    command = command_line(argv)
    module = str(Path(results.__file__).with_name("cli.py"))
    assert command_line([module, "train"]) == "python -m path_attention.cli train"
    assert command == (
        "path-attention evaluate runs/a corpus --lengths=8,16 --out=x --labels 'two words' runs/b"
    )
    check_result(make_result(what="x", rows=ROWS, command=command))


def test_the_commit_is_that_of_the_source(monkeypatch, tmp_path):
    def git(*words: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
        done = subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    source = tmp_path / "results.py"
    source.write_text("one\n")
    monkeypatch.setattr(results, "__file__", str(source))
    git("init", "-q")
    assert results.source_commit() is None
    git("add", "results.py")
    git("commit", "-q", "-m", "x")
    assert results.source_commit() == git("rev-parse", "HEAD")
    source.write_text("two\n")
    assert results.source_commit() == git("rev-parse", "HEAD") + "-changed"


def test_the_device_has_a_name_and_cores():
    assert re.search(r"\S.*, \d+ cores$", results.device_name("cpu"))
