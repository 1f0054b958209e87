"""`path-attention report DIR`: one page of all that was evaluated, beside the paper's numbers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any

import tyro

from path_attention.evaluation.figure import by_text, draw_by_length
from path_attention.evaluation.published import MODELS, PUBLISHED
from path_attention.evaluation.suite_figure import draw_suite, scale
from path_attention.results import png, read_result, write_whole

Row = Mapping[str, Any]
_SUITE = {"column", "metric", "score"}  # columns that tell a result's kind
_BY_LENGTH = {"by", "model", "perplexity", "low", "high", "training_length", "tokens"}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .2rem .6rem; text-align: right }
th { border-bottom: 1px solid #888 } td:first-child, th:first-child { text-align: left }
.interval, .note { color: #666; font-size: 85% } .paper { background: #f3f3f3 }
pre { white-space: pre-wrap; background: #f7f7f7; max-height: 24rem; overflow: auto }
summary { cursor: pointer } img { max-width: 100% }
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write DIR/report.html: tables and a figure for each suite, and single samples to look into.

    The page holds everything and opens without a server.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """The folder that `path-attention evaluate SUITE --out` wrote into."""
    samples: int = 5
    """Samples of each model, task and length that are shown."""

    def run(self) -> None:
        page = write_page(self.folder, self.samples)
        write_whole(self.folder / "report.html", page)
        print(f"wrote {self.folder / 'report.html'}")


def write_page(folder: Path, samples: int = 5) -> str:
    """The page of a folder's results.

    Raises ValueError naming `folder` if there are none, or `samples` below 0.
    """
    if samples < 0:
        raise ValueError(f"samples: expected at least 0, got {samples}")
    results = {
        path.stem: read_result(path) for path in sorted(folder.glob("*.json")) if _is_ours(path)
    }
    if not results:
        raise ValueError(
            f"folder: expected results of `path-attention evaluate`, {folder} has none"
        )
    results = {name: one for name, one in results.items() if not _is_part(one, results.values())}
    parts = [_suite(name, result, folder, samples) for name, result in results.items()]
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8><title>Evaluation</title>"
        f"<style>{_STYLE}</style><h1>Evaluation</h1>\n{''.join(parts)}</html>\n"
    )


def _is_ours(path: Path) -> bool:
    """Whether a file is a suite's result, or one of perplexity by length.

    Raises ValueError naming `folder` on a damaged one.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"folder: expected undamaged results, {path}: {error}") from error
    rows = found.get("rows") if isinstance(found, dict) else None
    first = rows[0] if isinstance(rows, list) and rows else None
    return isinstance(first, dict) and any(first.keys() >= x for x in (_SUITE, _BY_LENGTH))


def _is_part(result: Mapping[str, Any], results: Iterable[Mapping[str, Any]]) -> bool:
    """Whether another result has all its rows and more, as that of all sets of texts has."""
    rows = result["rows"]
    larger = (one["rows"] for one in results if len(one["rows"]) > len(rows))
    return any(all(row in theirs for row in rows) for theirs in larger)


def _suite(name: str, result: Mapping[str, Any], folder: Path, samples: int) -> str:
    rows = result["rows"]
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items() if v)
    about = f"{result['command']} · {result['device']} · {versions} · {result['commit'] or ''}"
    title = escape(name)
    parts = [
        f'<h2 id="{title}">{title}</h2>\n<p class=note>{escape(result["what"])}<br>{escape(about)}'
    ]
    if rows[0].keys() >= _SUITE:
        parts.append(_table(name, rows))
        figure = draw_suite(name, rows)
    else:
        parts += _tables_by_length(rows)
        figure = draw_by_length(rows)
    figure = base64.b64encode(png(figure)).decode()
    parts.append(f'<img alt="{title}" src="data:image/png;base64,{figure}">')
    for model in dict.fromkeys(row["model"] for row in rows):
        parts += _drill_down(folder / model / f"{name}.samples.jsonl", model, samples)
    return "\n".join(parts)


def _table(suite: str, rows: Sequence[Row]) -> str:
    models = list(dict.fromkeys(row["model"] for row in rows))
    published = PUBLISHED.get(suite, {})
    paper = MODELS if any(_key(row) in published for row in rows) else ()
    heads = ["task", "length", "metric", *models]
    head = "".join(f"<th>{escape(h)}" for h in heads)
    head += "".join(f"<th class=paper>{m} (paper)" for m in paper)
    lines = [f"<table><tr>{head}"]
    for key in dict.fromkeys((*_key(row), row["filter"]) for row in rows):
        cells = {r["model"]: _cell(r) for r in rows if (*_key(r), r["filter"]) == key}
        column, length, metric, how = key
        metric = metric if how in ("", "none") else f"{metric}, {how}"
        line = f"<tr><td>{escape(column)}<td>{'' if length is None else length}<td>{escape(metric)}"
        line += "".join(f"<td>{cells.get(model, '')}" for model in models)
        numbers = published.get(key[:3], ("",) * len(paper)) if paper else ()
        lines.append(line + "".join(f"<td class=paper>{number}" for number in numbers))
    return "\n".join([*lines, "</table>"])


def _key(row: Row) -> tuple[str, int | str | None, str]:
    return row["column"], row["length"], row["metric"]


def _cell(row: Row) -> str:
    if row["score"] is None:
        return "not finite"
    by = scale(row)
    text = f"{by * row['score']:.1f}"
    if row["low"] is not None:
        text += f" <span class=interval>{by * row['low']:.1f}–{by * row['high']:.1f}</span>"
    cut = f", {row['cut']} cut" if row["cut"] else ""
    return (
        f'<span title="{row["documents"]} documents, to {row["longest"]} tokens{cut}">{text}</span>'
    )


def _tables_by_length(rows: Sequence[Row]) -> Iterator[str]:
    """Perplexity of each set of texts: lengths by models, and folded the stretches of positions."""
    for text, mine in by_text(rows).items():
        if text:
            yield f"<h3>{escape(text)}</h3>"
        yield _grid("tokens of context", [row for row in mine if row["by"] == "length"])
        yield "<details><summary>By position in one long window</summary>"
        yield _grid("positions", [row for row in mine if row["by"] == "position"])
        yield "</details>"


def _grid(head: str, rows: Sequence[Row]) -> str:
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells = {(_place(row), row["model"]): _perplexity(row) for row in rows}
    lines = ["<table><tr>" + "".join(f"<th>{escape(h)}" for h in (head, *models))]
    for place in dict.fromkeys(map(_place, rows)):
        line = "".join(f"<td>{cells.get((place, model), '')}" for model in models)
        lines.append(f"<tr><td>{place}{line}")
    return "\n".join([*lines, "</table>"])


def _place(row: Row) -> str:
    if row["by"] == "length":
        return f"{row['length']:,}"
    return f"{row['from_position']:,}–{row['to_position']:,}"


def _perplexity(row: Row) -> str:
    """Perplexity with its interval, and below how it grew since the shortest length."""
    text = f"{row['perplexity']:,.2f}{_ends(row, 'low', 'high', 2)}"
    if "growth" in row:
        text += f"<br>× {row['growth']:.3f}{_ends(row, 'growth_low', 'growth_high', 3)}"
    about = f"{row['tokens']:,} target tokens of {row['documents']} documents"
    return f'<span title="{about}">{text}</span>'


def _ends(row: Row, low: str, high: str, digits: int) -> str:
    if row[low] is None:
        return ""
    return f" <span class=interval>{row[low]:,.{digits}f}–{row[high]:,.{digits}f}</span>"


def _drill_down(path: Path, model: str, samples: int) -> Iterator[str]:
    """Foldable samples of one model, task by task."""
    if samples == 0 or not path.is_file():
        return
    groups: dict[tuple[str, Any, str], list[Mapping[str, Any]]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            told = json.loads(line)
            place = (told["column"], told["length"], told["filter"])
            mine = groups.setdefault(place, [])
            if len(mine) < samples:
                mine.append(told)
    yield f"<details><summary>Samples of {escape(model)}</summary>"
    for (column, length, how), mine in groups.items():
        where = "" if length is None else f", {length}"
        yield f"<details><summary>{escape(column)}{where}, {escape(how)}</summary>"
        for told in mine:
            scores = ", ".join(f"{name} {value}" for name, value in told["scores"].items())
            yield (
                f"<p>document {told['document']}: <b>{escape(scores)}</b>; right: "
                f"<code>{escape(told['target'])}</code>; answer: <code>{escape(told['answer'])}"
                f"</code></p><details><summary>prompt</summary><pre>{escape(told['prompt'])}</pre>"
                "</details>"
            )
        yield "</details>"
    yield "</details>"
