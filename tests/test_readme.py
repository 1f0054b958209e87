"""README: its code runs, its links lead somewhere, and each number in it is the one in results/.

A measured number is written as a link to its place:

    [7.25](results/x.json#model=path&length=256&column=perplexity)

is the column `perplexity` of the one row whose `model` is path and whose `length` is 256, rounded
to the places shown. In a table every number outside the heading and the first column must be such a
link; elsewhere a number that is none must be listed in `NOT_MEASURED`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]*)\)")
NUMBER = re.compile(r"(?<![\w.])[−-]?\d[\d,]*(?:\.\d+)?")
# Numbers that nobody measured: versions, sizes of a machine, times allowed, lengths chosen.
NOT_MEASURED = {"2", "3", "3.11", "8", "10", "16", "64", "128", "256", "512", "1,024"}
NOT_MEASURED |= {"2,048", "4,096", "8,192", "16,384", "32,768", "131,072", "32", "1.9"}
NOT_MEASURED |= {"1.9999", "1.999", "1", "24", "1,536", "6", "384", "50", "65,536", "760"}


def check_quote(text: str, target: str, root: Path = ROOT) -> None:
    """Fail unless the number in a link's text is the one that its target names."""
    file, _, anchor = target.partition("#")
    wanted = dict(parse_qsl(anchor, strict_parsing=True))
    column = wanted.pop("column")
    rows = json.loads((root / file).read_text(encoding="utf-8"))["rows"]
    found = [r for r in rows if all(str(r.get(name)) == value for name, value in wanted.items())]
    assert len(found) == 1, f"{target}: {len(found)} rows have {wanted}, expected one"
    (shown,) = NUMBER.findall(text)
    shown = Decimal(shown.replace(",", "").replace("−", "-"))
    value = Decimal(repr(found[0][column])).quantize(shown, rounding=ROUND_HALF_EVEN)
    assert shown == value, f"README says {text}, {target} says {found[0][column]}"


def unsourced(markdown: str) -> list[str]:
    """Numbers in a Markdown text that neither are a quote nor are known as not measured."""
    text = re.sub(r"```.*?```", "", markdown, flags=re.S)
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    found = []
    heading = True
    for line in text.splitlines():
        in_table = line.startswith("|")
        if in_table and not heading:
            cells = line.strip().strip("|").split("|")
            for cell in cells[1:]:
                found += NUMBER.findall(_without_links(cell))
            line = cells[0]
        heading = not in_table or (heading and not re.fullmatch(r"[|\s:-]+", line))
        found += [n for n in NUMBER.findall(_without_links(line)) if n not in NOT_MEASURED]
    return found


def _without_links(text: str) -> str:
    return LINK.sub(lambda m: "" if m[2].startswith("results/") else m[1], text)


def test_every_quoted_number_is_the_one_in_its_file():
    for text, target in LINK.findall(README):
        if target.startswith("results/") and "#" in target:
            check_quote(text, target)


def test_numbers_of_the_choice_of_an_encoding_are_those_of_their_files():
    text = (ROOT / "docs" / "how-to-choose-an-encoding.md").read_text(encoding="utf-8")
    quotes = [(shown, target) for shown, target in LINK.findall(text) if "#" in target]
    assert len(quotes) > 15
    for shown, target in quotes:
        check_quote(shown, target.removeprefix("../"))


def test_every_number_has_a_source():
    assert not unsourced(README), "link them to results/, or list them in NOT_MEASURED"


def test_links_lead_somewhere():
    for _, target in LINK.findall(README):
        if not re.match(r"https?:|#", target):
            assert (ROOT / target.partition("#")[0]).exists(), target


def test_links_of_documents_lead_somewhere():
    linked = {target.partition("#")[0] for _, target in LINK.findall(README)}
    for document in sorted((ROOT / "docs").glob("*.md")):
        assert f"docs/{document.name}" in linked, document.name
        text = re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(encoding="utf-8"), flags=re.S)
        for _, target in LINK.findall(text):
            if not re.match(r"https?:|#", target):
                assert (document.parent / target.partition("#")[0]).exists(), (document, target)


def test_what_is_told_to_install_is_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    assert f"Python {project['requires-python'].removeprefix('>=')} or later." in README
    files = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("path_attention/**/*.py"),
    ]
    told = set()
    for file in files:
        text = re.sub(r'"\n +"', "", file.read_text(encoding="utf-8"))  # a literal over two lines
        for words in re.findall(r"pip install ([^`\n]*)", text):
            extra = re.match(r"(?:-e )?'?\.(?:\[([\w{}]+)\])?'?(?=\s|$)", words)
            assert extra, f"{file.name}: pip install {words}"
            told |= {extra[1]} - {None, "{extra}"}
    assert told <= extras and {"models", "train", "fused", "convert", "evaluate", "serve"} <= told


def test_the_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len(blocks[0].splitlines()) <= 8
    namespace: dict = {}
    exec(compile(blocks[0], "README.md", "exec"), namespace)
    assert namespace["out"].shape == namespace["v"].shape
    assert namespace["out"].isfinite().all()


def test_the_commands_exist():
    commands = {
        tuple(words.split()[:2])
        for words in re.findall(r"^path-attention ([a-z]+(?: [a-z]+)?)", README, flags=re.M)
    }
    assert commands
    usage = subprocess.run(
        [sys.executable, "-m", "path_attention.cli", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for words in commands:
        assert re.search(rf"^ +{words[0]}( {words[-1]})?\b", usage, flags=re.M), words


ROWS = [
    {"model": "path", "length": 256, "perplexity": 7.2549},
    {"model": "path", "length": 512, "perplexity": 1234.5},
    {"model": "path", "length": 512, "perplexity": 1.0},
]


@pytest.mark.parametrize(
    ("text", "anchor", "right"),
    [
        ("7.25", "model=path&length=256&column=perplexity", True),
        ("7.3", "model=path&length=256&column=perplexity", True),
        ("**7** nats", "model=path&length=256&column=perplexity", True),
        ("7.26", "model=path&length=256&column=perplexity", False),
        ("7.2", "model=path&length=256&column=perplexity", False),
        ("7.25", "model=rope&length=256&column=perplexity", False),
        ("1,234.5", "length=512&column=perplexity", False),
    ],
)
def test_quotes_are_checked(tmp_path, text, anchor, right):
    (tmp_path / "x.json").write_text(json.dumps({"rows": ROWS}))
    if right:
        check_quote(text, f"x.json#{anchor}", tmp_path)
    else:
        with pytest.raises(AssertionError):
            check_quote(text, f"x.json#{anchor}", tmp_path)


@pytest.mark.parametrize(
    ("markdown", "numbers"),
    [
        ("| model | 256 |\n|---|---|\n| path 3 | [7.2](results/x.json#a=b&column=c) |", []),
        ("| model | 256 |\n|---|---|\n| path | 7.2 |", ["7.2"]),
        ("| model | 256 |\n|---|---|\n| path | [7.2](docs/log.md) |", ["7.2"]),
        ("| model | 257 |\n|---|---|\n| path | |", ["257"]),
        ("It is 3.7 times as fast, on Python 3.11.", ["3.7"]),
        ("`x = 3.7`\n```\n3.7\n```\n[3.7](results/x.json#a=b&column=c)", []),
    ],
)
def test_numbers_without_a_source_are_found(markdown, numbers):
    assert unsourced(markdown) == numbers
