"""HTML pages of an analysed model: an index of its heads, and a page for each head."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from path_attention.analysis.figure import draw_heads, head_png
from path_attention.results import write_whole

Row = Mapping[str, Any]
_STYLE = """<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1150px }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .6rem; text-align: right }
th { border-bottom: 1px solid #999; font-weight: 600 } tr:nth-child(even) { background: #f5f5f5 }
td:first-child, th:first-child { text-align: left } img { max-width: 100%; height: auto }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #ddd }
 tr:nth-child(even) { background: #222 } a { color: #8bf }
 img { filter: invert(.9) hue-rotate(180deg) } }
</style>"""
_HEAD = {
    "spectral_norm": "spectral norm ‖E M‖ of one step",
    "spectral_mean": "tr(E M)/D, left of a direction on average",
    "norm_window": "window that the norm promises",
    "mixing_window": "mixing window of scores, tokens",
    "query_window": "mixing window of queries, tokens",
    "score_most": "greatest |score|",
    "norm_bound": "scale · max ‖q‖ · max ‖k‖",
    "half_by_bound": "context at which the bound is 1/2",
    "half_by_gap": "context at which the measured gap gives 1/2",
    "near_mean": "near scores: mean",
    "near_deviation": "near scores: deviation",
    "far_mean": "far scores: mean",
    "far_deviation": "far scores: deviation",
}
_CONTEXT = {
    "length": "context",
    "far_keys": "far keys M",
    "far_mass": "far mass",
    "bound": "its bound",
    "spread": "2λ",
    "gap": "gap, mean",
    "gap_most": "gap, greatest",
    "in_step": "values in step",
    "incoherent": "random values",
    "mixing_window": "window, scores",
    "query_window": "window, queries",
}


def write_pages(
    rows: Sequence[Row], folder: Path, title: str, progress: Callable[[int], None]
) -> None:
    """Write index.html, heads.png and a page a head into a folder; progress counts pages."""
    heads: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        heads.setdefault((row["layer"], row["head"]), []).append(row)
    order = list(heads)
    folder.mkdir(parents=True, exist_ok=True)
    for n, (layer, head) in enumerate(order):
        before = page_name(*order[n - 1]) if n else None
        after = page_name(*order[n + 1]) if n + 1 < len(order) else None
        page = _head_page(title, layer, head, heads[layer, head], before, after)
        write_whole(folder / page_name(layer, head), page)
        progress(n + 1)
    draw_heads(rows, folder / "heads.png")
    write_whole(folder / "index.html", _index(title, heads))


def page_name(layer: int, head: int) -> str:
    """The file of a head's page."""
    return f"layer-{layer:02}-head-{head:02}.html"


def _head_page(
    title: str, layer: int, head: int, rows: Sequence[Row], before: str | None, after: str | None
) -> str:
    of = next(row for row in rows if row["kind"] == "head")
    picture = base64.b64encode(head_png(rows)).decode()
    numbers = [(text, _number(of[name])) for name, text in _HEAD.items()]
    contexts = [
        tuple(_number(row[name]) for name in _CONTEXT) for row in rows if row["kind"] == "context"
    ]
    around = ((before, "← before"), (after, "next →"))
    links = [f'<a href="{file}">{text}</a>' for file, text in around if file]
    body = [
        f'<p><a href="index.html">{html.escape(title)}</a> {" ".join(links)}</p>',
        f"<h1>Layer {layer}, head {head}</h1>",
        '<img alt="routes, scores, tails, far mass, far values" '
        f'src="data:image/png;base64,{picture}">',
        f"<p>Far keys are {of['near']:,} tokens or more before the query; a mixing window is where "
        f"a correlation stays below {of['level']:g}.</p>",
        _table(("of the head", "value"), numbers),
        _table(tuple(_CONTEXT.values()), contexts),
    ]
    return _page(f"Layer {layer}, head {head}: {title}", body)


def _index(title: str, heads: Mapping[tuple[int, int], Sequence[Row]]) -> str:
    columns = ("spectral_norm", "mixing_window", "score_most", "half_by_bound", "half_by_gap")
    lines = []
    last = 0
    for (layer, head), rows in heads.items():
        of = next(row for row in rows if row["kind"] == "head")
        context = [row for row in rows if row["kind"] == "context"][-1]
        last = context["length"]
        link = f'<a href="{page_name(layer, head)}">layer {layer}, head {head}</a>'
        cells = [_number(of[name]) for name in columns]
        cells += [_number(context[name]) for name in ("far_mass", "bound", "in_step")]
        lines.append((link, *cells))
    titles = ("head", *(_HEAD[name] for name in columns))
    titles += (f"far mass at {last:,}", "its bound", "far values in step")
    body = [
        f"<h1>{html.escape(title)}</h1>",
        '<img alt="four numbers of each head" src="heads.png">',
        _table(titles, lines),
    ]
    return _page(title, body)


def _page(title: str, body: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title>{_STYLE}\n" + "\n".join(body) + "\n</html>\n"
    )


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in line) + "</tr>" for line in lines)
    return f"<table><tr>{head}</tr>{body}</table>"


def _number(x: float | int | None) -> str:
    if x is None:
        return "–"
    return f"{x:,}" if isinstance(x, int) else f"{x:,.4g}"
