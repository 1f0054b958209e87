"""The command `path-attention analyze swaps_trained`: what training finds of the construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from path_attention.analysis.construction import HEAD, HEADS, HIDDEN, swap_tracker
from path_attention.analysis.swaps_task import TrackedSwaps
from path_attention.results import make_result, write_result
from path_attention.tasks.engine import Engine
from path_attention.tasks.measure import Counts, measure
from path_attention.tasks.recipe import Options, TaskRecipe
from path_attention.tasks.replicas import Replicas
from path_attention.tasks.task import check_range

_HAND_SET = "PaTH, hand-set"
_TRAINED = {"PaTH, trained": "path", "RoPE, trained": "rope"}
_CHANCE = {"questions": 0.2, "claims": 0.6}  # five items; half right, and one in five of the others


@dataclass(frozen=True, kw_only=True)
class AnalyzeSwapsTrained:
    """One layer of PaTH and one of RoPE trained to track five items under swaps, by their number.

    Both have the width, heads and head size of the construction that `analyze swaps` measures, and
    the same MLP; they start at random and train on the same sequences for as many steps, a question
    and a claim after each swap. That construction answers the same test beside them. Writes
    OUT.json and OUT.png and prints the table.
    """

    swaps: int = 16
    """Swaps in a training sequence."""
    steps: int = 600
    """Optimizer steps of each run; over the first half training sequences grow to full length."""
    batch: int = 16
    """Sequences of a step."""
    learning_rates: str = "0.001,0.003"
    """Peaks of AdamW's rate, with commas between: of each encoding the one with the fewest errors
    at the training length counts, a mean over seeds."""
    seeds: int = 3
    """Runs of each, from seed 0 on."""
    ends: str = "1,2,4,8,16,32,64,128,256,1024,4096,10000"
    """Numbers of swaps that end a part of the test, with commas between."""
    answers: int = 2000
    """Questions in a part of the test, and as many claims, at least."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    out: Path = Path("results/trained_swaps")
    """Where the results go, without an ending."""

    def run(self) -> None:
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        rows = self.measure(torch.device(device), lambda line: print(line, flush=True))
        result = make_result(
            what="Share of right answers to questions (which item is at a place) and claims (is it "
            "this one) by the number of swaps before them, more than the row before and at most "
            "its own: one PaTH layer with hand-set weights, and one of PaTH and of RoPE of the "
            "same size, trained; kind rate: share of both at the training length by learning rate",
            rows=rows,
            device=device,
        )
        write_result(self.out.with_suffix(".json"), result)
        draw(result, self.out.with_suffix(".png"))

    def measure(self, device: torch.device, say: Callable[[str], None]) -> list[dict[str, Any]]:
        """The rows of the result. Raises ValueError on bad options."""
        task = TrackedSwaps(swaps=self.swaps)
        parts = task.parts(_numbers("ends", self.ends, int), self.answers)
        rates = _numbers("learning_rates", self.learning_rates, float)
        check_range("seeds", self.seeds, 1)
        recipes = {name: self._recipes(task, kind, rates) for name, kind in _TRAINED.items()}
        rows = []

        def test(name: str, replicas: Replicas, of_each: list[dict[str, Any]]) -> None:
            for found, own in zip(measure(replicas, parts, None), of_each, strict=True):
                rows.extend({"kind": "swaps", "model": name, **own, **_shares(c)} for c in found)
            say(_line(name, rows))

        for name, of_name in recipes.items():
            engine = Engine(of_name, device=str(device))
            outcomes = engine.run(say=say)
            by_rate = dict.fromkeys(rates, 0.0)
            for outcome in outcomes:
                recipe, (counts,) = outcome.recipe, outcome.tests
                by_rate[recipe.learning_rate] += counts.share
                own = {**_of(recipe), "swaps": self.swaps, "right": 1 - counts.share}
                rows.append({"kind": "rate", "model": name, **own})
            best = min(by_rate, key=by_rate.__getitem__)
            kept = [n for n, recipe in enumerate(of_name) if recipe.learning_rate == best]
            replicas = Replicas([engine.model(n) for n in kept], device)
            test(name, replicas, [_of(of_name[n]) for n in kept])
        test(_HAND_SET, Replicas([swap_tracker()], device), [{"learning_rate": None, "seed": None}])
        return rows

    def _recipes(self, task: TrackedSwaps, encoding: str, rates: list[float]) -> list[TaskRecipe]:
        options: Options = {"head_dim": HEAD}
        if encoding == "path":
            options |= {"direction_rank": None, "direction_conv_size": 0}  # as the construction
        return [
            TaskRecipe(
                task=task,
                encoding=encoding,
                width=HIDDEN,
                heads=HEADS,
                options=options,
                steps=self.steps,
                batch=self.batch,
                learning_rate=rate,
                warmup_steps=min(50, self.steps),
                curriculum_steps=self.steps // 2,
                precision="float32",
                check_every=max(self.steps // 8, 1),
                seed=seed,
            )
            for rate in rates
            for seed in range(self.seeds)
        ]


def _numbers(name: str, words: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(word) for word in words.split(",")]
    except ValueError as error:
        raise ValueError(f"{name}: expected numbers with commas between, got {words!r}") from error


def _of(recipe: TaskRecipe) -> dict[str, Any]:
    return {"learning_rate": recipe.learning_rate, "seed": recipe.seed}


def _shares(counts: Counts) -> dict[str, Any]:
    right = [1 - e / n for e, n in zip(counts.errors, counts.counted, strict=True)]
    found = dict(zip(counts.levels, right, strict=True))
    return {"swaps": int(counts.test), "answers": min(counts.counted), **found}


def _line(name: str, rows: list[dict[str, Any]]) -> str:
    own = [row for row in rows if row["kind"] == "swaps" and row["model"] == name]
    shown = [f"{end}: {_mean(own, end, 'questions'):.3f}" for end in _ends(own)]
    return f"{name}, questions answered right after up to … swaps: " + ", ".join(shown)


def _ends(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({row["swaps"] for row in rows})


def _mean(rows: Sequence[Mapping[str, Any]], end: int, column: str) -> float:
    return fmean(row[column] for row in rows if row["swaps"] == end)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result of the command as a PNG: right answers by number of swaps, a panel a kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4), layout="constrained", dpi=150)
    rows = [row for row in result["rows"] if row["kind"] == "swaps"]
    longest = max(row["swaps"] for row in result["rows"] if row["kind"] == "rate")
    titles = {"questions": "which item is at a place", "claims": "is this item at that place"}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        for n, name in enumerate(dict.fromkeys(row["model"] for row in rows)):
            own = [row for row in rows if row["model"] == name]
            places = _ends(own)
            for seed in {row["seed"] for row in own}:
                shares = [row[column] for row in own if row["seed"] == seed]
                axes.plot(places, shares, color=f"C{n}", alpha=0.35, linewidth=0.8)
            means = [_mean(own, end, column) for end in places]
            axes.plot(places, means, "o-", color=f"C{n}", label=name, markersize=3)
        axes.axhline(_CHANCE[column], color="grey", linestyle=":", linewidth=1, label="guessing")
        axes.axvspan(1, longest, color="grey", alpha=0.12, linewidth=0, label="trained at")
        axes.set_xscale("log")
        axes.set_xlabel("swaps before it, up to")
        axes.set_title(title)
        axes.set_ylim(0, 1.03)
        axes.spines[["top", "right"]].set_visible(False)
    left, right = panels
    left.set_ylabel("share of right answers")
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle("One layer, five items under swaps: thin lines are seeds")
    figure.savefig(path)
