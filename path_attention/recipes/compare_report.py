"""The command `path-attention compare report`: results and figures of `compare train`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from path_attention.evaluation.figure import draw as draw_by_length
from path_attention.evaluation.merge_seeds import merge_seeds
from path_attention.recipes.language_models import MODELS
from path_attention.results import (
    command_line,
    plain_label,
    read_result,
    with_ending,
    write_figure,
    write_result,
)
from path_attention.training.log import read_log

Row = dict[str, Any]
_POINTS = 50  # of a loss curve
# Okabe and Ito's colours, apart for colour-blind readers and in grey; markers tell them apart too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"


@dataclass(frozen=True, kw_only=True)
class ReportModels:
    """Results and figures of the runs in a folder.

    Writes TO.json and TO.png (each run's losses, speed and memory, and its loss by tokens) and, for
    each part, TO_PART.json and TO_PART.png (perplexity by length, mean of the seeds).
    """

    out: Path = Path("runs/language_models")
    """The folder of the runs, as `compare train` has it."""
    to: Path = Path("results/language_models")
    """Where the results go, without an ending."""
    command: str | None = None
    """Written into the results as the command that makes them again; default: this one."""

    def run(self) -> None:
        runs = find_runs(self.out)
        command = self.command or command_line(sys.argv)
        parts = sorted({path.stem for run in runs for path in run.parts})
        if not parts:
            raise ValueError(f"out: expected measured runs in {self.out}, found none")
        by_part = {part: merge_part(runs, part, command) for part in parts}
        first = next(iter(by_part.values()))
        result = {
            **first,
            "what": "Language models that differ in their encoding alone: a row a run (losses in "
            "nats a token, speed, memory), and losses by tokens of training, means of stretches",
            "rows": loss_rows(runs),
        }
        write_result(with_ending(self.to, ".json"), result)
        draw(result["rows"], with_ending(self.to, ".png"))
        for part, merged in by_part.items():
            path = with_ending(self.to, f"_{part}.json")
            write_result(path, merged)
            draw_by_length(merged, path.with_suffix(".png"))
        print(table(result["rows"], by_part))


@dataclass(frozen=True)
class Run:
    """A finished run: its model's name, its seed, and its folder."""

    model: str
    seed: int
    folder: Path

    @property
    def parts(self) -> list[Path]:
        """Its measured parts."""
        kept = ("card", "recipe", "model_config")
        found = sorted(self.folder.glob("*.json"))
        return [path for path in found if path.stem not in kept and "." not in path.stem]


def find_runs(folder: Path) -> list[Run]:
    """The finished runs of a folder, by model and seed. Raises ValueError if there is none."""
    found = []
    for card in folder.glob("*_seed*/card.json"):
        model, _, seed = card.parent.name.rpartition("_seed")
        if not seed.isdecimal():
            raise ValueError(f"out: expected folders named MODEL_seedN, got {card.parent}")
        found.append(Run(model, int(seed), card.parent))
    if not found:
        raise ValueError(f"out: expected finished runs in {folder}, found none")
    order = {name: n for n, name in enumerate(MODELS)}
    return sorted(found, key=lambda run: (order.get(run.model, len(order)), run.seed))


def merge_part(runs: Sequence[Run], part: str, command: str) -> dict[str, Any]:
    """Perplexity by length of each model over the seeds that it has: `seeds` of a row.

    Runs that went on over several commits have none. Raises ValueError on several devices or
    versions.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        path = run.folder / f"{part}.json"
        if path.exists():
            results.setdefault(run.model, []).append(read_result(path))
    every = [result for mine in results.values() for result in mine]
    for key in ("device", "versions"):
        if any(result[key] != every[0][key] for result in every):
            found = {str(result[key]) for result in every}
            raise ValueError(f"out: expected the same {key} in all {part}.json, got {found}")
    commits = {result["commit"] for result in every}
    head = {**every[0], "commit": commits.pop() if len(commits) == 1 else None}
    rows = []
    for mine in results.values():
        alike = [{**result, "commit": head["commit"]} for result in mine]
        merged = merge_seeds(alike, command) if len(mine) > 1 else alike[0]
        rows += [{"seeds": 1, **row} for row in merged["rows"]]
    most = max(map(len, results.values()))
    what = f"Perplexity by length on held-out {part}"
    if most > 1:
        what += (
            f", up to {most} training seeds a model (seeds): mean, standard deviation (std), least "
            "(low) and greatest (high) seed; the same targets at every length, and growth since "
            "the shortest"
        )
    return {**head, "what": what, "command": command, "rows": rows}


def loss_rows(runs: Sequence[Run]) -> list[Row]:
    """A row a run (`kind` "run"), and its losses: "training" (a stretch's mean), "heldout"."""
    rows: list[Row] = []
    for run in runs:
        card = json.loads((run.folder / "card.json").read_text())
        log = read_log(run.folder / "log.jsonl")
        rows.append(_run_row(run, card, log))
        names = {"model": run.model, "seed": run.seed}
        batch = card["recipe"]["batch_tokens"]
        for line in _stretches([line for line in log if "loss" in line]):
            rows.append({"kind": "training", **names, **line})
        for line in (line for line in log if "heldout_loss" in line):
            at = {"step": line["step"], "tokens": line["step"] * batch}
            rows.append({"kind": "heldout", **names, **at, "loss": line["heldout_loss"]})
    return rows


def _run_row(run: Run, card: Mapping[str, Any], log: Sequence[Mapping[str, Any]]) -> Row:
    lines = [line for line in log if "loss" in line]
    tail = lines[-max(len(lines) // 20, 1) :]
    used = [line["mfu"] for line in lines if "mfu" in line]
    memory = [line["peak_memory_gb"] for line in lines if "peak_memory_gb" in line]
    recipe, heldout = card["recipe"], card["loss"]["heldout"]
    return {
        "kind": "run",
        "model": run.model,
        "seed": run.seed,
        "preset": recipe["model"]["preset"],
        "parameters": card["model"]["parameters"],
        "tokens": card["training"]["tokens"],
        "epochs": round(card["training"]["epochs"], 3),
        "steps": recipe["steps"],
        "precision": card["environment"]["precision"],
        "compile": recipe["compile"],
        "fused": recipe["fused"],
        "loss": round(fmean(line["loss"] for line in tail), 5),
        "heldout_loss": heldout,
        "heldout_perplexity": None if heldout is None else round(math.exp(heldout), 4),
        "skipped": sum("skipped" in line.get("event", "") for line in log),
        "seconds": card["training"]["seconds"],
        "tokens_per_second": round(median(line["tokens_per_second"] for line in lines)),
        "mfu": median(used) if used else None,
        "peak_memory_gb": max(memory) if memory else None,
    }


def _stretches(lines: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """At most `_POINTS` means over lines one behind the other, at the last one's step."""
    size = -(-len(lines) // _POINTS)
    for n in range(0, len(lines), size):
        part = lines[n : n + size]
        loss = round(fmean(line["loss"] for line in part), 5)
        yield {"step": part[-1]["step"], "tokens": part[-1]["tokens"], "loss": loss}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw losses by tokens as a PNG: training (means of stretches) left, held-out right.

    Lines are means over seeds, shaded from the least to the greatest.
    """
    figure = Figure(figsize=(10, 4.6), layout="constrained", dpi=150)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, kind in zip(panels, ("training", "heldout"), strict=True):
        mine = [row for row in rows if row["kind"] == kind]
        for n, model in enumerate(dict.fromkeys(row["model"] for row in mine)):
            _curve(axes, [row for row in mine if row["model"] == model], model, n)
        axes.set_xlabel("million tokens of training")
        axes.set_title({"training": "training", "heldout": "held-out documents"}[kind], fontsize=10)
        axes.grid(color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    losses = [row["loss"] for row in rows if row["kind"] == "training"]
    later = losses and sorted(losses)[: max(len(losses) * 9 // 10, 1)][-1]
    panels[0].set_ylim(top=later or None)
    panels[0].set_ylabel("loss, nats a token")
    panels[0].legend(frameon=False)
    seeds = len({row["seed"] for row in rows})
    first = next(row for row in rows if row["kind"] == "run")
    shade = f"mean of {seeds} seeds, shaded from the least to the greatest"
    figure.suptitle(
        f"{first['parameters'] / 1e6:,.0f}M parameters, {first['tokens'] / 1e6:,.0f}M tokens, "
        f"{first['precision']} ({shade if seeds > 1 else 'one seed'})",
        fontsize=11,
    )
    write_figure(figure, path)


def _curve(axes: Axes, rows: Sequence[Row], model: str, n: int) -> None:
    at = sorted({row["tokens"] for row in rows})
    losses = [[row["loss"] for row in rows if row["tokens"] == tokens] for tokens in at]
    style: dict[str, Any] = {"color": _COLOURS[n % 7], "marker": _MARKERS[n % 7], "markersize": 3}
    style |= {"linewidth": 1.2}
    millions = [tokens / 1e6 for tokens in at]
    axes.plot(millions, [fmean(each) for each in losses], label=plain_label(model), **style)
    low, high = [min(each) for each in losses], [max(each) for each in losses]
    axes.fill_between(millions, low, high, color=style["color"], alpha=0.18, linewidth=0)


def table(rows: Sequence[Row], by_part: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: each run, and each part's perplexity by length."""
    head = ("model", "seed", "loss", "heldout_loss", "tokens_per_second", "mfu", "skipped")
    lines = [head, ("---",) * len(head)]
    lines += [tuple(row[name] for name in head) for row in rows if row["kind"] == "run"]
    for part, result in by_part.items():
        mine = [row for row in result["rows"] if row["by"] == "length"]
        lengths = sorted({row["length"] for row in mine})
        lines += [(), (part, *lengths), ("---",) * (len(lengths) + 1)]
        for model in dict.fromkeys(row["model"] for row in mine):
            found = {row["length"]: row["perplexity"] for row in mine if row["model"] == model}
            lines.append((model, *(f"{found[length]:.2f}" for length in lengths)))
    return "\n".join("| " + " | ".join(map(str, line)) + " |" if line else "" for line in lines)
