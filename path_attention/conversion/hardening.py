"""`path-attention convert checkpoints`: does a RoPE model convert better before it hardens?

Checkpoints of one RoPE run are converted and trained on, all to the same number of tokens, those
before the conversion and its first stage counted. Beside them the RoPE run, and a run of the new
encoding from nothing, are trained on to that number too. Every branch warms up again to the run's
peak rate and falls to the run's final share by the same cosine, with fresh moments.

    OUT/from-N/              a conversion of step N (`pipeline`)
    OUT/rope/ OUT/scratch/   the runs trained on, in pretraining/
    OUT/report.json, .png    losses by tokens, perplexity by length
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from path_attention.conversion.fine_tune import check_one_process
from path_attention.conversion.objectives import Choices, NextToken
from path_attention.conversion.pipeline import convert, stage_recipe
from path_attention.conversion.recipe import NO_SCORES, ConversionRecipe, StageRecipe, Target
from path_attention.conversion.scores import readable_lengths
from path_attention.conversion.starts import StartRule
from path_attention.evaluation.perplexity_by_length import (
    Partial,
    parse_parts,
    perplexity_by_length,
)
from path_attention.models import model_folder
from path_attention.models.loading import hide_loading_bars
from path_attention.results import make_result, read_result, write_figure, write_result
from path_attention.training.corpus import TokenCorpus
from path_attention.training.export import export_step
from path_attention.training.log import read_log
from path_attention.training.loop import Outcome, train
from path_attention.training.recipe import CheckpointRecipe, LogRecipe, Precision

SHARES = (0.1, 0.5, 1.0)
_COLOURS = ("#56B4E9", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What a folder's recipe.json says of a finished run."""

    folder: Path
    steps: int
    batch_tokens: int
    recipe: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, name: str) -> Run:
        """Raises ValueError, naming the argument, on a folder without a finished run."""
        try:
            recipe = json.loads((folder / "recipe.json").read_text())
            if not (folder / "card.json").exists():
                raise ValueError("it is not finished")
            return cls(folder, recipe["steps"], recipe["batch_tokens"], recipe)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{name}: expected a finished run in {folder}, got {error}") from error

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_tokens


@dataclass(frozen=True, kw_only=True)
class ConvertCheckpoints:
    """Convert checkpoints of a RoPE run, early and late, train all on to the same tokens, and set
    them beside RoPE and the new encoding from nothing. The same command goes on where it stopped.

    `path-attention compare train` keeps a tenth, a half and the end of its rope_seed0; any run with
    enough `--checkpoint.keep` will do.
    """

    run_folder: Annotated[Path, tyro.conf.Positional]
    """The RoPE run's folder."""
    scratch: Path | None = None
    """A run of the new encoding on the same data, trained as long as the RoPE run."""
    steps: tuple[int, ...] = ()
    """Checkpoints to convert; default: a tenth, a half, the end."""
    to: Target = "path_fox"
    start: StartRule = "near_zero"
    direction_rank: int | None = 32
    attention_tokens: int = 2_000_000
    """Of the first stage, which matches attention."""
    more: float = 0.1
    """What all are trained on beyond the RoPE run's end, as a share of its tokens."""
    data: Path | None = None
    """The corpus; default: the RoPE run's."""
    parts: tuple[str, ...] = ()
    """Parts of the held-out documents to measure on, each NAME=PATTERN,PATTERN; default: all."""
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    """Tokens of context that perplexity is measured at, as far as documents go."""
    targets: int = 128
    windows: int = 32
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations where perplexity is measured."""
    only: tuple[str, ...] = ()
    """Branches to do now, as from-153, rope or scratch; the report waits for all. Default: all."""
    micro_batch_tokens: int | None = None
    """Of one forward pass; default: as the run."""
    precision: Precision = "auto"
    compile: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("runs/hardening")

    def run(self) -> None:
        check_one_process()
        hide_loading_bars()
        rope = Run.read(self.run_folder, "run_folder")
        scratch = None if self.scratch is None else Run.read(self.scratch, "scratch")
        branches = self.branches(rope, scratch)
        self._held_out(rope)
        unknown = sorted(set(self.only) - set(branches))
        if unknown:
            raise ValueError(f"only: expected of {list(branches)}, got {unknown}")
        for name, (recipe, source) in branches.items():
            if self.only and name not in self.only:
                continue
            outcome = self._do(name, recipe, source)
            if outcome is not None and outcome.signal is not None:
                raise SystemExit(128 + outcome.signal)
        lacking = [name for name in branches if not self._model(name).is_dir()]
        if lacking:
            print(f"{self.out}: {lacking} are to be done before the report")
            return
        result = self._report(rope, scratch, branches)
        write_result(self.out / "report.json", result)
        draw(result, self.out / "report.png")
        print(self.out / "report.json")

    def branches(
        self, rope: Run, scratch: Run | None
    ) -> dict[str, tuple[ConversionRecipe, tuple[Path, int]]]:
        """A recipe for each branch, with the run and the step that it starts from.

        Raises ValueError if no tokens are left for one, or a run does not fit.
        """
        if rope.recipe["model"]["preset"] != "rope":
            raise ValueError(
                f"run_folder: expected a run of 'rope', got {rope.recipe['model']['preset']!r}"
            )
        if scratch is not None and (
            scratch.recipe["model"]["preset"] != self.to or scratch.tokens != rope.tokens
        ):
            raise ValueError(
                f"scratch: expected a run of {self.to!r} on {rope.tokens:,} tokens, got "
                f"{scratch.recipe['model']['preset']!r} on {scratch.tokens:,}"
            )
        total = round((1 + self.more) * rope.tokens)
        steps = self.steps or tuple(sorted({max(1, round(s * rope.steps)) for s in SHARES}))
        found: dict[str, tuple[ConversionRecipe, tuple[Path, int]]] = {}
        for step in steps:
            left = total - step * rope.batch_tokens
            recipe = self._recipe(rope, self.to, self.attention_tokens, left)
            found[f"from-{step}"] = recipe, (rope.folder, step)
        left = total - rope.tokens
        found["rope"] = self._recipe(rope, "rope", 0, left), (rope.folder, rope.steps)
        if scratch is not None:
            recipe = self._recipe(rope, self.to, 0, left)
            found["scratch"] = recipe, (scratch.folder, scratch.steps)
        return found

    def _recipe(self, rope: Run, to: Target, attention: int, left: int) -> ConversionRecipe:
        """A conversion whose stages take `left` tokens together, by the run's own recipe."""
        run = rope.recipe
        context = run["data"]["context_length"]
        base = ConversionRecipe()
        piece = min(base.attention.context_length, context)
        first = dataclasses.replace(
            base.attention,
            tokens=attention,
            context_length=piece,
            batch_tokens=min(base.attention.batch_tokens, max(rope.batch_tokens, piece)),
        )
        spent = first.steps * first.batch_tokens
        if left <= spent:
            raise ValueError(
                f"more: expected a share that leaves more than the {spent:,} tokens of the first "
                f"stage beyond the last checkpoint, got {self.more}, which leaves {left:,}"
            )
        last = StageRecipe(
            tokens=left - spent,
            context_length=context,
            batch_tokens=rope.batch_tokens,
            micro_batch_tokens=self.micro_batch_tokens or run["micro_batch_tokens"],
            learning_rate=run["optimizer"]["learning_rate"],
            final=run["schedule"]["final"],
            warmup=0.05,
            weight_decay=run["optimizer"]["weight_decay"],
        )
        return dataclasses.replace(
            base,
            to=to,
            start=self.start if attention else "near_zero",
            direction_rank=self.direction_rank,
            attention=first,
            logits=dataclasses.replace(base.logits, tokens=0),
            pretraining=last,
            data=(str(self._data(rope)),),
            report=dataclasses.replace(NO_SCORES, context=context),
            precision=self.precision,
            compile=self.compile,
            device=self.device,
            seed=run["seed"] + 1,  # of the order of the rows, which the run has seen
            checkpoint=CheckpointRecipe(every=max(last.steps // 4, 1), keep=1),
            log=LogRecipe(
                every=max(last.steps // 100, 1),
                heldout_every=max(last.steps // 10, 1),
                heldout_tokens=4 * rope.batch_tokens,
                tensorboard=False,
            ),
        )

    def _data(self, rope: Run) -> Path:
        """The corpus's folder. Raises ValueError if neither the command nor the run names one."""
        data = self.data or rope.recipe["data"]["corpus"]
        if data is None:
            raise ValueError("data: expected a corpus, since the run names none")
        return Path(data)

    def _held_out(self, rope: Run) -> dict[str, TokenCorpus]:
        """What perplexity is measured on, by part. Raises ValueError on bad parts."""
        corpus = TokenCorpus.open(self._data(rope))
        parts = {name: corpus.only(patterns) for name, patterns in parse_parts(self.parts).items()}
        return parts or {"heldout": corpus}

    def _do(self, name: str, recipe: ConversionRecipe, source: tuple[Path, int]) -> Outcome | None:
        out = self.out / name
        start = self.checkpoint(*source)
        if recipe.attention.tokens:
            return convert(start, recipe, out)
        stage = stage_recipe(recipe, "pretraining", recipe.pretraining, start)
        return train(stage, out / "pretraining", objective=NextToken(Choices()))

    def checkpoint(self, run: Path, step: int) -> Path:
        """The model of a step: kept by `compare train`, the run's last, or exported now."""
        kept = run / "models" / f"step-{step}"
        if (kept / "config.json").exists():
            return kept
        if step == json.loads((run / "recipe.json").read_text())["steps"]:
            return model_folder(run)
        folder = self.out / "checkpoints" / f"{run.name}-{step}"
        if not (folder / "config.json").exists():
            export_step(run, step, folder)
        return folder

    def _model(self, name: str) -> Path:
        return self.out / name / "pretraining" / "model"

    def _report(
        self,
        rope: Run,
        scratch: Run | None,
        branches: Mapping[str, tuple[ConversionRecipe, tuple[Path, int]]],
    ) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        for label, run in (("rope, its run", rope), ("scratch, its run", scratch)):
            if run is not None:
                rows += _curve(label, run.folder, 0, run.batch_tokens)
        for name, (recipe, (_, step)) in branches.items():
            first = recipe.attention.steps * recipe.attention.batch_tokens
            before = step * rope.batch_tokens + first
            curve = _curve(name, self.out / name / "pretraining", before, rope.batch_tokens)
            rows += curve
            row = {"by": "branch", "branch": name, "to": recipe.to, "step": step}
            row |= {"share": round(step / rope.steps, 4), "attention_tokens": first}
            row |= {"tokens": before + recipe.pretraining.steps * rope.batch_tokens}
            rows.append({**row, "heldout_loss": curve[-1]["loss"] if curve else None})
        device = "cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu"
        rows += self._lengths(rope, list(branches), device)
        return make_result(
            what="Checkpoints of one RoPE run converted and trained on to the same tokens, beside "
            "RoPE and the new encoding from nothing: held-out loss in nats a token by all tokens "
            "trained on, and perplexity by length of the last models",
            rows=rows,
            device=device,
        )

    def _lengths(self, rope: Run, names: Sequence[str], device: str) -> list[dict[str, Any]]:
        rows = []
        for part, documents in self._held_out(rope).items():
            lengths = readable_lengths(documents, self.lengths, self.targets)
            if not lengths:
                continue
            path = self.out / f"{part}.json"
            partial = Partial(path.with_suffix(".partial.json"))
            found = perplexity_by_length(
                {name: self._model(name) for name in names},
                documents,
                lengths=lengths,
                targets=self.targets,
                windows=self.windows,
                dtype=self.dtype,
                device=device,
                batch_tokens=1 << 15,
                partial=partial,
            )
            write_result(path, make_result(what=f"Perplexity by length on {part}", rows=found))
            partial.delete()
            kept = ("length", "perplexity", "low", "high")
            rows += [
                {"by": "length", "branch": row["model"], "part": part, **{k: row[k] for k in kept}}
                for row in read_result(path)["rows"]
                if row["by"] == "length"
            ]
        return rows


def _curve(name: str, run: Path, before: int, batch_tokens: int) -> list[dict[str, Any]]:
    """Rows by "curve": a run's held-out losses by all tokens that its model was trained on."""
    return [
        {
            "by": "curve",
            "branch": name,
            "tokens": before + line["step"] * batch_tokens,
            "loss": line["heldout_loss"],
        }
        for line in read_log(run / "log.jsonl")
        if "heldout_loss" in line
    ]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a report as a PNG: held-out losses by tokens, the last loss by when a model was
    converted, and perplexity by length."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    rows = result["rows"]
    parts = list(dict.fromkeys(row["part"] for row in rows if row["by"] == "length"))
    figure = Figure(figsize=(5 * (2 + len(parts)), 4.4), layout="constrained", dpi=150)
    panels = figure.subplots(1, 2 + len(parts))
    curves = [row for row in rows if row["by"] == "curve"]
    for name in dict.fromkeys(row["branch"] for row in curves):
        mine = [row for row in curves if row["branch"] == name]
        _line(panels[0], [r["tokens"] / 1e6 for r in mine], [r["loss"] for r in mine], name, rows)
    panels[0].set(xlabel="million tokens of training", ylabel="held-out loss, nats a token")
    _by_share(panels[1], [row for row in rows if row["by"] == "branch"])
    for axes, part in zip(panels[2:], parts, strict=True):
        mine = [row for row in rows if row["by"] == "length" and row["part"] == part]
        for name in dict.fromkeys(row["branch"] for row in mine):
            own = [row for row in mine if row["branch"] == name]
            _line(axes, [r["length"] for r in own], [r["perplexity"] for r in own], name, rows)
        lengths = sorted({row["length"] for row in mine})
        axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="perplexity")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=7)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(part, fontsize=10)
    for axes in panels:
        axes.grid(color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    write_figure(figure, path)


def _line(
    axes: Any, x: Sequence[float], y: Sequence[float], name: str, rows: Sequence[Row]
) -> None:
    branches = [row["branch"] for row in rows if row["by"] == "branch"]
    own, _, its_run = name.partition(", ")
    colour = _COLOURS[branches.index(own) % len(_COLOURS)] if own in branches else "0.5"
    style = ":" if its_run else "-"
    axes.plot(x, y, color=colour, linestyle=style, marker="o", markersize=3, label=name)


def _by_share(axes: Any, rows: Sequence[Row]) -> None:
    converted = [row for row in rows if row["branch"].startswith("from-")]
    axes.plot(
        [row["share"] for row in converted],
        [row["heldout_loss"] for row in converted],
        color="0.2",
        marker="s",
        label="converted",
    )
    for row, style in zip((r for r in rows if r not in converted), (":", "--"), strict=False):
        axes.axhline(row["heldout_loss"], color="0.4", linestyle=style, label=row["branch"])
    axes.set(xlabel="share of the RoPE run before conversion", ylabel="last held-out loss")
