"""The page of results: every number, the paper's beside it, samples, nothing from elsewhere."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from path_attention import cli
from path_attention.evaluation.report import write_page
from path_attention.results import make_result, write_result


def row(model, column, length, score, metric="score"):
    return {
        **{"model": model, "column": column, "length": length, "filter": "none"},
        **{"metric": metric, "score": score, "low": score - 0.1, "high": score + 0.1},
        **{"documents": 9, "shots": 0, "context": None, "longest": 77, "cut": 0},
    }


@pytest.fixture
def folder(tmp_path):
    rows = [
        row(model, "phonebook", length, score)
        for model, scores in (("mine <1>", (0.5, 0.25)), ("other", (0.75, 0.125)))
        for length, score in zip((2048, 4096), scores, strict=True)
    ]
    write_result(tmp_path / "phonebook.json", make_result(what="Scores", rows=rows, command="c"))
    (tmp_path / "other").mkdir()
    sample = {
        **{"task": "phonebook_2048", "column": "phonebook", "length": 2048, "filter": "none"},
        **{"scores": {"score": 0.0}, "target": "555", "answer": "<script>alert()</script>"},
    }
    lines = [json.dumps({**sample, "document": n, "prompt": f"Ann & Bob {n}:"}) for n in range(9)]
    (tmp_path / "other" / "phonebook.samples.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.seen: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))


def test_the_page_has_all_and_needs_nothing(folder, capsys):
    cli.main(["report", str(folder), "--samples", "3"])
    page = (folder / "report.html").read_text()
    tags = Tags(page).seen
    assert not [tag for tag, _ in tags if tag in ("script", "link", "iframe")]
    (image,) = [attrs["src"] for tag, attrs in tags if tag == "img"]
    assert image.startswith("data:image/png;base64,iVBOR")
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    for shown in ("mine <1>", "50.0 40.0–60.0", "12.5", "PaTH-FoX (paper)", "93.8", "89.6"):
        assert shown in re.sub(r"\s+", " ", text), shown
    assert text.count("Ann & Bob") == 3 and "<script>alert()</script>" in unescape(page)
    assert sum(tag == "tr" for tag, _ in tags) == 3
    assert "report.html" in capsys.readouterr().out


def test_perplexity_by_length_has_its_table_and_figure(tmp_path, folder):
    rows = [
        {
            **{"text": text, "model": model, "training_length": 512, "tokens": 640},
            **{"documents": 5, "by": by, **place, "perplexity": 1234.5, "low": 1200.25},
            **{"high": 1300.75, **(growth if by == "length" else {})},
        }
        for text in ("books & <b>", "code")
        for model in ("mine <1>", "_other $\\foo$")
        for by, places in (
            ("length", ({"length": 512}, {"length": 1024})),
            ("position", ({"from_position": 1, "to_position": 512},)),
        )
        for place, growth in zip(
            places,
            (
                {"growth": 1.0, "growth_low": 1.0, "growth_high": 1.0},
                {"growth": 1.25, "growth_low": 1.125, "growth_high": 1.375},
            ),
            strict=False,
        )
    ]
    own = [row for row in rows if row["text"] == "code"]
    for name, mine in (("perplexity_by_length", rows), ("perplexity_code", own)):
        write_result(folder / f"{name}.json", make_result(what="P", rows=mine, command="c"))
    page = write_page(folder)
    tags = Tags(page).seen
    images = [attrs["src"] for tag, attrs in tags if tag == "img"]
    assert len(images) == 2 and all(src.startswith("data:image/png;base64,") for src in images)
    assert {tag for tag, _ in tags}.isdisjoint({"script", "link", "iframe", "b>"})
    text = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", page)))
    assert "perplexity_code" not in text
    for shown, count in {
        "books & <b>": 1,
        "tokens of context mine <1> _other $\\foo$ ": 2,
        "1,024 1,234.50 1,200.25–1,300.75 × 1.250 1.125–1.375 1,234.50": 2,
        "1–512 1,234.50 1,200.25–1,300.75 1,234.50": 2,
    }.items():
        assert text.count(shown) == count, shown
    write_result(folder / "perplexity_by_length.json", make_result(what="P", rows=own, command="c"))
    for row in own:
        row |= {"text": "else", "low": None, "high": None}
        if row["by"] == "length":
            row |= {"growth_low": None, "growth_high": None}
    write_result(folder / "perplexity_else.json", make_result(what="P", rows=own, command="c"))
    assert "1,234.50<br>× 1.250</span>" in write_page(folder)


def test_bad_input(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="folder: expected results"):
        write_page(tmp_path / "empty")
    with pytest.raises(ValueError, match="samples: expected at least 0, got -1"):
        write_page(folder, -1)
    page = write_page(folder)
    for other in ([1, 2], {"rows": [1]}, {"rows": {"a": 1}}, {"rows": []}, 3):
        (folder / "other.json").write_text(json.dumps(other))
        assert write_page(folder) == page
    (folder / "other.json").write_text('{"rows": [')
    with pytest.raises(ValueError, match=r"folder: expected undamaged results, .*other\.json"):
        write_page(folder)
