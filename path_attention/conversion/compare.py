"""`path-attention convert compare`: several conversions side by side, as a result and a figure."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from path_attention.results import (
    make_result,
    plain_label,
    read_result,
    with_ending,
    write_figure,
    write_result,
)
from path_attention.training.log import read_log

STAGES = ("attention", "logits", "pretraining")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@dataclass(frozen=True, kw_only=True)
class CompareConversions:
    """Training losses by tokens, and what the reports say, of several conversions.

    Writes OUT.json and OUT.png. A point of a curve is the mean of the logged losses up to it since
    the point before. A slope says by what factor a stage's held-out loss changes when its tokens
    double, over the second half of them. By "context" are both models' perplexities by length.
    """

    conversions: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of conversions."""
    labels: tuple[str, ...] = ()
    """A name for each; default: the folder's."""
    points: int = 40
    """Of each curve."""
    out: Path = Path("runs/conversions")
    """Where the results go, without an ending."""

    def run(self) -> None:
        labels = self.labels or tuple(path.name for path in self.conversions)
        if len(labels) != len(self.conversions) or len(set(labels)) != len(labels):
            raise ValueError(
                f"labels: expected one for each of {len(self.conversions)} conversions, all "
                f"different, got {list(labels)}"
            )
        rows: list[dict[str, Any]] = []
        device = "cpu"
        for label, folder in zip(labels, self.conversions, strict=True):
            rows += curves(folder, label, self.points)
            rows += slopes(folder, label)
            rows += reports(folder, label)
            rows += contexts(folder, label)
            device = read_result(folder / "report.json")["device"]
        result = make_result(
            what="Conversions side by side: training losses by tokens (attention: mean squared "
            "error; logits: divergence in nats a token; pretraining: cross-entropy in nats a "
            "token), and perplexity and divergence on the same held-out tokens after each stage",
            rows=rows,
        )
        result["device"] = device
        write_result(with_ending(self.out, ".json"), result)
        draw(result, with_ending(self.out, ".png"))
        print(with_ending(self.out, ".json"))


def curves(folder: Path, label: str, points: int) -> list[dict[str, Any]]:
    """Rows by "curve": a stage's losses in at most so many points."""
    rows = []
    for stage in STAGES:
        lines = [line for line in read_log(folder / stage / "log.jsonl") if "loss" in line]
        size = -(-len(lines) // points) if lines else 1
        for first in range(0, len(lines), size):
            part = lines[first : first + size]
            loss = sum(line["loss"] for line in part) / len(part)
            rows.append(
                {
                    "by": "curve",
                    "conversion": label,
                    "stage": stage,
                    "tokens": part[-1]["tokens"],
                    "loss": loss,
                    "kl": None,
                    "perplexity": None,
                    "teacher_perplexity": None,
                }
            )
    return rows


def reports(folder: Path, label: str) -> list[dict[str, Any]]:
    """Rows by "model", of a conversion's report. Raises ValueError if it has none."""
    path = folder / "report.json"
    if not path.exists():
        raise ValueError(f"conversions: expected a finished one with a report, {folder} has none")
    return [
        {
            "by": "model",
            "conversion": label,
            "stage": row["stage"],
            "tokens": row["tokens"],
            "loss": None,
            "kl": row["kl"],
            "perplexity": row["perplexity"],
            "teacher_perplexity": row["teacher_perplexity"],
        }
        for row in read_result(path)["rows"]
        if row["by"] == "model"
    ]


def slopes(folder: Path, label: str) -> list[dict[str, Any]]:
    """Rows by "slope": of each stage with at least three held-out losses in its second half."""
    rows = []
    for stage in STAGES:
        path = folder / stage / "recipe.json"
        if not path.exists():
            continue
        recipe = json.loads(path.read_text())
        lines = [x for x in read_log(folder / stage / "log.jsonl") if "heldout_loss" in x]
        later = [x for x in lines if 2 * x["step"] >= recipe["steps"] and x["heldout_loss"] > 0]
        if len(later) < 3:
            continue
        tokens = [x["step"] * recipe["batch_tokens"] for x in later]
        losses = [x["heldout_loss"] for x in later]
        exponent = _exponent(tokens, losses)
        rows.append(
            {
                "by": "slope",
                "conversion": label,
                "stage": stage,
                "tokens": tokens[-1],
                "heldout_loss": losses[-1],
                "per_doubling": round(2**exponent, 4),
            }
        )
    return rows


def _exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y over log x, by least squares.

    >>> round(_exponent([1, 2, 4], [8, 4, 2]), 6)
    -1.0
    """
    a, b = [math.log(value) for value in x], [math.log(value) for value in y]
    middle_a, middle_b = sum(a) / len(a), sum(b) / len(b)
    along = sum((p - middle_a) * (q - middle_b) for p, q in zip(a, b, strict=True))
    return along / sum((p - middle_a) ** 2 for p in a)


def contexts(folder: Path, label: str) -> list[dict[str, Any]]:
    """Rows by "context": the student's perplexity at each length, and its ratio to the teacher."""
    rows = [r for r in read_result(folder / "report.json")["rows"] if r["by"] == "context"]
    theirs = {(r["corpus"], r["length"]): r["perplexity"] for r in rows if r["model"] == "teacher"}
    found = []
    for row in (row for row in rows if row["model"] == "student"):
        teacher = theirs[row["corpus"], row["length"]]
        kept = {name: row[name] for name in ("corpus", "length", "perplexity")}
        ratio = round(row["perplexity"] / teacher, 5)
        kept |= {"teacher_perplexity": teacher, "ratio": ratio}
        found.append({"by": "context", "conversion": label, **kept})
    return found


def draw(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """A panel for each stage's losses, and one of perplexity against tokens of all stages."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    present = [s for s in STAGES if any(_is(row, "curve", s) for row in rows)]
    names = list(dict.fromkeys(row["conversion"] for row in rows))
    panels = len(present) + 1
    figure = Figure(figsize=(4.4 * panels, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for panel, stage in zip(axes, present, strict=False):
        for n, name in enumerate(names):
            mine = [r for r in rows if _is(r, "curve", stage) and r["conversion"] == name]
            _curve(panel, mine, "loss", n, name)
        panel.set(title=stage, xlabel="tokens", ylabel="loss", yscale="log")
    last = axes[-1]
    for n, name in enumerate(names):
        mine = [r for r in rows if r["by"] == "model" and r["conversion"] == name]
        _curve(last, mine, "perplexity", n, name, marker="o")
    teacher = next(r["teacher_perplexity"] for r in rows if r["by"] == "model")
    last.axhline(teacher, color="0.3", linestyle=":", label="teacher")
    last.set(title="held-out text", xlabel="tokens", ylabel="perplexity", yscale="log")
    last.legend(frameon=False, fontsize=8)
    for panel in axes:
        panel.grid(color="0.9", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


def _is(row: Mapping[str, Any], by: str, stage: str) -> bool:
    return row["by"] == by and row["stage"] == stage


def _curve(
    panel: Any, rows: Sequence[Mapping[str, Any]], y: str, n: int, label: str, marker: str = ""
) -> None:
    panel.plot(
        [row["tokens"] for row in rows],
        [row[y] for row in rows],
        color=_COLOURS[n % len(_COLOURS)],
        marker=marker,
        markersize=4,
        label=plain_label(label),
    )
