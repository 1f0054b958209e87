"""The command `path-attention analyze swaps_trained`: what training finds of the construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from path_attention.analysis.construction import (
    ASK,
    HEAD,
    HEADS,
    HIDDEN,
    SWAP,
    YES,
    swap_tracker,
)
from path_attention.analysis.swaps_task import TrackedSwaps
from path_attention.models.loading import choose_device
from path_attention.results import make_result, with_ending, write_figure, write_result
from path_attention.tasks.engine import Engine
from path_attention.tasks.measure import Counts, measure
from path_attention.tasks.recipe import Options, TaskRecipe
from path_attention.tasks.replicas import Replicas
from path_attention.tasks.task import check_range

_TRAINED = ("path", "rope")
_LABELS = {"path": "PaTH, trained", "rope": "RoPE, trained", "hand_set": "PaTH, hand-set"}
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
    learning_rates: str = "0.003,0.01"
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
        device = choose_device(self.device)
        rows = self.measure(torch.device(device), lambda line: print(line, flush=True))
        result = make_result(
            what="Share of right answers to questions (which item is at a place) and claims (is it "
            "this one) by the number of swaps before them, more than the row before and at most "
            "its own: one PaTH layer with hand-set weights, and one of PaTH and of RoPE of the "
            "same size, trained; kind mean: over seeds, kind rate: of both at the training length, "
            "kind beta: mean strength β of tokens by head",
            rows=rows,
            device=device,
        )
        write_result(with_ending(self.out, ".json"), result)
        draw(result, with_ending(self.out, ".png"))

    def measure(self, device: torch.device, say: Callable[[str], None]) -> list[dict[str, Any]]:
        """The rows of the result. Raises ValueError on bad options."""
        task = TrackedSwaps(swaps=self.swaps)
        parts = task.parts(_numbers("ends", self.ends, int), self.answers)
        rates = _numbers("learning_rates", self.learning_rates, float)
        check_range("seeds", self.seeds, 1)
        rows: list[dict[str, Any]] = []

        def test(name: str, models: list[Any], of_each: list[dict[str, Any]]) -> None:
            found = measure(Replicas(models, device), parts, None)
            own = [
                {"kind": "seed", "model": name, **of_one, **_shares(counts)}
                for counts_of_one, of_one in zip(found, of_each, strict=True)
                for counts in counts_of_one
            ]
            means = _means(own)
            rows.extend(own + means)
            for model, of_one in zip(models, of_each, strict=True):
                rows.extend({"kind": "beta", "model": name, **of_one, **b} for b in _betas(model))
            shown = ", ".join(f"{row['swaps']}: {row['questions']:.3f}" for row in means)
            say(f"{_LABELS[name]}, questions answered right after up to … swaps: {shown}")

        all_recipes = {name: self._recipes(task, name, rates) for name in _TRAINED}
        for name, recipes in all_recipes.items():
            engine = Engine(recipes, device=str(device))
            errors = dict.fromkeys(rates, 0.0)
            for outcome in engine.run(say=say):
                of_one, (counts,) = _of(outcome.recipe), outcome.tests
                errors[of_one["learning_rate"]] += counts.share
                own = {**of_one, "swaps": self.swaps, "right": 1 - counts.share}
                rows.append({"kind": "rate", "model": name, **own})
            best = min(errors, key=errors.__getitem__)
            kept = [n for n, recipe in enumerate(recipes) if recipe.learning_rate == best]
            test(name, [engine.model(n) for n in kept], [_of(recipes[n]) for n in kept])
        test("hand_set", [swap_tracker()], [{"learning_rate": None, "seed": None}])
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


@torch.no_grad()
def _betas(model: Any) -> list[dict[str, Any]]:
    """For each head of PaTH, the mean β of swaps and of questions and claims; of RoPE nothing.

    Nothing else than the token decides it: there is one layer and no convolution.
    """
    block = model.model.layers[0]
    if model.config.transport != "householder":
        return []
    x = block.attention_norm(model.model.embed_tokens.weight)
    beta = block.attention.transport.beta_max * block.attention.transport.beta_proj(x).sigmoid()
    swaps, others = beta[SWAP:ASK].mean(0).tolist(), beta[ASK:YES].mean(0).tolist()
    return [
        {"head": n, "beta_of_swaps": a, "beta_of_others": b}
        for n, (a, b) in enumerate(zip(swaps, others, strict=True))
    ]


def _means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each number of swaps, over seeds."""
    means = []
    for end in dict.fromkeys(row["swaps"] for row in rows):
        at_end = [row for row in rows if row["swaps"] == end]
        of_all = {"kind": "mean", "seed": None, "answers": sum(row["answers"] for row in at_end)}
        shares = {kind: fmean(row[kind] for row in at_end) for kind in _CHANCE}
        means.append({**at_end[0], **of_all, **shares})
    return means


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result of the command as a PNG: right answers by number of swaps, a panel a kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4), layout="constrained", dpi=150)
    rows = result["rows"]
    trained_at = max(row["swaps"] for row in rows if row["kind"] == "rate")
    titles = {"questions": "which item is at a place", "claims": "is this item at that place"}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        for n, (name, label) in enumerate(_LABELS.items()):
            own = [row for row in rows if row["model"] == name and row["kind"] in ("seed", "mean")]
            seeds = dict.fromkeys(row["seed"] for row in own if row["kind"] == "seed")
            for seed in seeds:
                line = [row for row in own if row["kind"] == "seed" and row["seed"] == seed]
                x, y = [row["swaps"] for row in line], [row[column] for row in line]
                axes.plot(x, y, color=f"C{n}", alpha=0.4, linewidth=0.8)
            line = [row for row in own if row["kind"] == "mean"]
            x, y = [row["swaps"] for row in line], [row[column] for row in line]
            axes.plot(x, y, "o-", color=f"C{n}", label=label, markersize=3)
        axes.axhline(_CHANCE[column], color="grey", linestyle=":", linewidth=1, label="guessing")
        axes.axvspan(1, trained_at, color="grey", alpha=0.12, linewidth=0, label="trained at")
        axes.set_xscale("log")
        axes.set_xlabel("swaps before it, up to")
        axes.set_title(title)
        axes.set_ylim(0, 1.03)
        axes.spines[["top", "right"]].set_visible(False)
    left, right = panels
    left.set_ylabel("share of right answers")
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle("One layer, five items under swaps: thin lines are seeds")
    write_figure(figure, path)
