"""The command `path-attention extrapolation report`: ratios of perplexity beside published ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from path_attention.analysis.figure import finish
from path_attention.recipes.compare_report import Row, find_runs, merge_part
from path_attention.recipes.extrapolation import CONTEXT, PUBLISHED, TITLES
from path_attention.results import (
    command_line,
    plain_label,
    read_result,
    with_ending,
    write_figure,
    write_result,
)

HOLDS = 1.1  # a model holds at a length where its perplexity is at most this times the shortest's
# Okabe and Ito's colours, apart for colour-blind readers; then again with another line.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--")
_MARKERS = "osD^vPX"


@dataclass(frozen=True, kw_only=True)
class ReportExtrapolation:
    """Tables and figure of the runs in a folder: how perplexity grows with the context.

    Writes TO.json and TO.png and prints a table beside the published ratios. With what `analyze`
    wrote of the same runs, also the contexts at which far mass is predicted to win.
    """

    out: Path = Path("runs/extrapolation")
    """The folder of the runs, as `extrapolation train` has it."""
    routes: tuple[Path, ...] = ()
    """What `path-attention analyze OUT/*_seed0 … --out OUT/routes` wrote, of all models or one file
    a model; default: OUT/routes.json, or else OUT/routes/*.json, if they are there."""
    to: Path = Path("results/extrapolation")
    """Where the results go, without an ending."""
    command: str | None = None
    """Written into the results as the command that makes them again; default: this one."""

    def run(self) -> None:
        runs = find_runs(self.out)
        command = self.command or command_line(sys.argv)
        parts = sorted({path.stem for run in runs for path in run.parts})
        if not parts:
            raise ValueError(f"out: expected measured runs in {self.out}, found none")
        merged = {part: merge_part(runs, part, command) for part in parts}
        rows = [row for part, result in merged.items() for row in ratio_rows(part, result["rows"])]
        found = self.found_routes()
        for part in parts:
            rows += verdicts(part, [row for row in rows if row["part"] == part], found)
        result = {
            **next(iter(merged.values())),
            "what": "Perplexity at each length over that at the shortest, the same held-out "
            "targets, trained at the shortest (kind ratio; least and greatest of seeds or an "
            "interval over documents), beside published ratios; and how far each model holds, with "
            f"a perplexity of at most {HOLDS} times the shortest's (kind verdict)",
            "command": command,
            "rows": rows,
        }
        write_result(with_ending(self.to, ".json"), result)
        draw(rows, with_ending(self.to, ".png"))
        print(table(rows))

    def found_routes(self) -> list[Row]:
        """The rows of every file of routes. Raises ValueError on two of one model."""
        whole = self.out / "routes.json"
        default = [whole] if whole.exists() else sorted((self.out / "routes").glob("*.json"))
        rows: list[Row] = []
        for path in self.routes or default:
            more = read_result(path)["rows"]
            twice = {row["model"] for row in rows} & {row["model"] for row in more}
            if twice:
                raise ValueError(f"routes: expected each model once, got {sorted(twice)} in {path}")
            rows += more
        return rows


def ratio_rows(part: str, rows: Sequence[Row]) -> list[Row]:
    """A row for each model and length; published ratios where ours are over the same length."""
    lengths = [row["length"] for row in rows if row["by"] == "length"]
    published = PUBLISHED if min(lengths, default=0) == CONTEXT else {}
    return [
        {
            "kind": "ratio",
            "part": part,
            "model": row["model"],
            "title": TITLES.get(row["model"], row["model"]),
            "length": row["length"],
            "perplexity": row["perplexity"],
            "ratio": row["growth"],
            "low": row["growth_low"],
            "high": row["growth_high"],
            "published": published.get((row["model"], row["length"])),
            "seeds": row.get("seeds", 1),
        }
        for row in rows
        if row["by"] == "length"
    ]


def verdicts(part: str, rows: Sequence[Row], routes: Sequence[Row]) -> list[Row]:
    """How far each model holds, and what its routes predict.

    holds_to: the greatest length up to which each ratio is at most HOLDS; rises_at: the next one.
    best: whether it is the model with the best perplexity at the shortest length among those that
    hold to the longest. Of its routes, medians over heads: half_by_bound, half_by_gap and
    mixing_window of `analysis.summary.head_row`, where a head that has none is beyond every length;
    far_mass, bound and in_step at the longest context.
    """
    found: list[Row] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = sorted((r for r in rows if r["model"] == model), key=lambda row: row["length"])
        broken = next((r["length"] for r in mine if r["ratio"] > HOLDS), None)
        held = [r["length"] for r in mine if broken is None or r["length"] < broken]
        found.append(
            {
                "kind": "verdict",
                "part": part,
                "model": model,
                "title": mine[0]["title"],
                "shortest": mine[0]["perplexity"],
                "longest_ratio": mine[-1]["ratio"],
                "holds_to": held[-1] if held else None,
                "rises_at": broken,
                **_predicted(model, routes),
            }
        )
    holding = [row for row in found if row["rises_at"] is None]
    best = min(holding, key=lambda row: row["shortest"], default=None)
    return [{**row, "best": row is best} for row in found]


def _predicted(model: str, routes: Sequence[Row]) -> Row:
    mine = [row for row in routes if row["model"].rpartition("_seed")[0] == model]
    heads = [row for row in mine if row["kind"] == "head"]
    contexts = [row for row in mine if row["kind"] == "context"]
    last = max((row["length"] for row in contexts), default=None)
    ends = [row for row in contexts if row["length"] == last]
    predicted: Row = {}
    for name in ("half_by_bound", "half_by_gap", "mixing_window"):
        values = [math.inf if row[name] is None else row[name] for row in heads]
        predicted[name] = _finite(median(values)) if values else None
    for name in ("far_mass", "bound", "in_step"):
        values = [row[name] for row in ends if row[name] is not None]
        predicted[name] = median(values) if values else None
    return predicted


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw ratios by length as a PNG, a panel a part; stars are published ratios."""
    from matplotlib.figure import Figure

    parts = list(dict.fromkeys(row["part"] for row in rows))
    figure = Figure(figsize=(5.2 * len(parts) + 3.5, 5), layout="constrained", dpi=130)
    panels = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
    ratios = [row for row in rows if row["kind"] == "ratio"]
    most = max(row["seeds"] for row in ratios)
    order = list(dict.fromkeys(row["model"] for row in ratios))
    for axes, part in zip(panels, parts, strict=True):
        for n, model in enumerate(order):
            mine = [row for row in ratios if (row["part"], row["model"]) == (part, model)]
            if not mine:
                continue  # measured on other parts so far
            mine.sort(key=lambda row: row["length"])
            colour, style = _COLOURS[n % 7], _STYLES[n // 7 % 2]
            at, low, high = ([row[c] for row in mine] for c in ("length", "low", "high"))
            axes.plot(
                at, [row["ratio"] for row in mine], style, color=colour,
                label=plain_label(_title(mine[0], most)), marker=_MARKERS[n % 7], markersize=4,
                linewidth=1.3, markerfacecolor=colour if n < 7 else "white",
            )  # fmt: skip
            if None not in low:
                axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
            said = [row for row in mine if row["published"]]
            axes.plot(
                [row["length"] for row in said], [row["published"] for row in said], "*",
                color=colour, markersize=13, markerfacecolor="none",
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.axhline(1, color="0.7", linewidth=0.8, zorder=0)
        axes.set(xlabel="tokens of context", title=plain_label(part))
        finish(axes, legend=False)
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside right center", frameon=False, fontsize=8)
    panels[0].set_ylabel("perplexity over that at the training length")
    shade = (
        f"mean of {most} seeds, shaded from the least to the greatest" if most > 1 else "one seed"
    )
    stars = "; stars: published" if any(row["published"] for row in ratios) else ""
    between = " " if len(parts) > 1 else "\n"  # one panel is too narrow for a line
    figure.suptitle(f"How far encodings extrapolate{between}({shade}{stars})", fontsize=11)
    write_figure(figure, path)


def _title(row: Mapping[str, Any], most: int) -> str:
    """A model's title, and of how many seeds it is where others have more."""
    few = row["seeds"]
    return row["title"] if few == most else f"{row['title']} ({few} seed{'s' * (few > 1)})"


def table(rows: Sequence[Row]) -> str:
    """Markdown: each part's ratios by length with the published ones behind, and verdicts."""
    lines: list[str] = []
    most = max(row["seeds"] for row in rows if row["kind"] == "ratio")
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        lengths = sorted({row["length"] for row in mine if row["kind"] == "ratio"})
        lines += [f"**{part}**", ""]
        head = ["model", f"perplexity at {lengths[0]:,}", *(f"{n:,}" for n in lengths[1:])]
        lines += _markdown([*head, "holds to", "half by bound", "half by gap"])
        for verdict in (row for row in mine if row["kind"] == "verdict"):
            own = {r["length"]: r for r in mine if r["kind"] == "ratio" and _same(r, verdict)}
            title = _title(own[lengths[0]], most)
            cells = [f"**{title}**" if verdict["best"] else title]
            cells.append(f"{verdict['shortest']:.2f}")
            cells += [_ratio(own[n]) for n in lengths[1:]]
            cells += [_length(verdict[n]) for n in ("holds_to", "half_by_bound", "half_by_gap")]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    lines.append(
        f"× perplexity at the shortest length, published in brackets; holds: at most {HOLDS} ×; "
        "bold: best at the shortest length of those that hold to the longest"
    )
    return "\n".join(lines)


def _markdown(head: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]


def _same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return row["model"] == other["model"]


def _ratio(row: Mapping[str, Any]) -> str:
    said = row["published"]
    return f"{row['ratio']:.2f}" + (f" ({said:g})" if said else "")


def _length(x: float | None) -> str:
    return "–" if x is None else f"{x:,.3g}" if x >= 1e6 else f"{x:,.0f}"
