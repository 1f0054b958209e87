"""The command `path-attention analyze MODEL --data …`: every head's routes, on real tokens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro

from path_attention.analysis.capture import attention_layers, visit_layers
from path_attention.analysis.measure import Probes, Totals, measure
from path_attention.analysis.summary import Row, check_level, mean_rows, summary
from path_attention.models.loading import (
    choose_device,
    load_model,
    load_tokenizer,
    model_folder,
)
from path_attention.results import make_result, write_result
from path_attention.training.corpus import TokenCorpus
from path_attention.training.progress import progress_bar, say

Progress = Callable[[str, int, int], None]  # (label, done, in all)


@dataclass(frozen=True, kw_only=True)
class AnalyzeModel:
    """Measure what the theory speaks of in every head of trained models, on real tokens.

    Writes OUT.json, OUT.png (a row of panels a model) and OUT/MODEL/index.html with a page for each
    head. An interrupted run goes on behind the last window that was done, with the same numbers.
    """

    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of finished runs or of models of this package, with their tokenizers."""
    data: Path
    """Corpus folder of `path-attention corpus build`, whose held-out documents are read; or a text
    file in UTF-8."""
    documents: tuple[str, ...] = ()
    """Patterns of documents' names, as 'prose/*': read those alone that match one; default: all."""
    lengths: str = "512,1024,2048,4096"
    """Tokens of context, rising, with commas between; the longest is each window's length."""
    near: int | None = None
    """Tokens before a query that are near; default: the context that the first model was trained
    at, so that far is what it never saw."""
    windows: int = 4
    """The most windows to read."""
    probes: int = 16
    """Queries to follow at each length of a window."""
    level: float = 0.2
    """What a correlation stays below behind the mixing window."""
    out: Path = Path("runs/analysis")
    """Where the results go, without an ending."""
    labels: tuple[str, ...] = ()
    """A name for each model; default: the folder's."""
    means: bool = False
    """Write means over heads in place of each head's routes, contexts and distributions; pages and
    figure keep them."""
    pages: bool = True
    """Write a page for each head."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the model; what is measured of its activations is computed in float32 at least."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""

    def run(self) -> None:
        from transformers.utils.logging import disable_progress_bar

        from path_attention.analysis.figure import draw_models
        from path_attention.analysis.pages import write_pages

        disable_progress_bar()
        named = self.named()
        lengths = tuple(parse_numbers("lengths", self.lengths))
        Probes.spread(lengths, self.probes, lengths[-1])
        check_level(self.level)
        if self.near is not None and self.near < 1:
            raise ValueError(f"near: expected at least 1, got {self.near}")
        device = choose_device(self.device)
        rows: list[Row] = []
        with progress_bar() as bars:
            tasks: dict[str, Any] = {}

            def report(label: str, done: int, total: int) -> None:
                if label not in tasks:
                    tasks[label] = bars.add_task(label, total=total)
                bars.update(tasks[label], completed=done)

            for label, folder in named.items():
                rows += self.measure(label, folder, lengths, torch.device(device), report)
            result = make_result(
                what="Routes of attention by layer and head: rows of kind head, route (by route "
                "length), context (by tokens of context), scores and tail (distributions); far "
                "keys are `near` tokens or more before the query; path_attention.analysis.summary "
                "says what each column is",
                rows=[_rounded(row) for row in (_over_heads(rows) if self.means else rows)],
                device=device,
            )
            write_result(self.out.with_name(f"{self.out.name}.json"), result)
            draw_models(rows, self.out.with_name(f"{self.out.name}.png"))
            for label in named if self.pages else ():
                mine = [row for row in rows if row["model"] == label]
                heads = sum(row["kind"] == "head" for row in mine)
                write_pages(mine, self.out / label, label, lambda n, h=heads: report("pages", n, h))
        for label in named:
            self.partial(label).unlink(missing_ok=True)
        say(_table(rows))
        say(f"wrote {self.out}.json and {self.out}.png")

    def named(self) -> dict[str, Path]:
        """A different label for each model. Raises ValueError naming models or labels."""
        if not self.models:
            raise ValueError("models: expected at least one folder, got none")
        names = self.labels or tuple(folder.resolve().name for folder in self.models)
        if len(names) != len(self.models) or len(set(names)) != len(names):
            raise ValueError(
                f"labels: expected a different one for each of {len(self.models)} models, "
                f"got {names}"
            )
        if bad := [name for name in names if name in ("", "..") or Path(name).name != name]:
            raise ValueError(f"labels: expected names of files, got {bad}")
        return dict(zip(names, self.models, strict=True))

    def partial(self, label: str) -> Path:
        """Where it is kept what an interrupted run has done of a model."""
        return self.out.with_name(f".{self.out.name}.{label}.partial")

    def measure(
        self,
        label: str,
        folder: Path,
        lengths: Sequence[int],
        device: torch.device,
        report: Progress,
    ) -> list[Row]:
        """The rows of one model. Raises ValueError on bad options."""
        loaded: Any = load_model(model_folder(folder), dtype=getattr(torch, self.dtype))
        model = loaded.to(device)
        windows = self.read(folder, model, lengths[-1])
        near = self.near
        if near is None:
            near = load_model_config(self.models[0]).max_position_embeddings
        probes = Probes.spread(lengths, self.probes, lengths[-1])
        layers = len(attention_layers(model))
        partial = Partial(
            self.partial(label),
            (_files(folder), windows.tolist(), lengths, near, self.probes, self.dtype, str(device)),
        )
        totals, done = partial.read()
        for n in range(done, len(windows)):
            whole = layers * len(windows)

            def visit(layer: int, routes: Any, n: int = n, whole: int = whole) -> None:
                totals.setdefault(layer, Totals()).merge(measure(routes, probes, near))
                report(label, n * layers + layer + 1, whole)

            visit_layers(model, torch.from_numpy(windows[n])[None].to(device), visit)
            partial.write(totals, n + 1)
        names: dict[str, Any] = {"model": label, "near": near, "windows": len(windows)}
        return [
            row
            for layer in range(layers)
            for row in summary(totals[layer], lengths, level=self.level, **names, layer=layer)
        ]

    def read(self, folder: Path, model: Any, length: int) -> np.ndarray:
        """int64 `[N, length]`: windows of held-out documents, or of a text.

        Raises ValueError if none is long enough, or the tokenizer has more tokens than the model.
        """
        tokenizer: Any = load_tokenizer(folder, model)
        if self.windows < 1:
            raise ValueError(f"windows: expected at least 1, got {self.windows}")
        if self.data.is_file():
            text = self.data.read_text(encoding="utf-8")
            documents = [np.asarray(tokenizer(text)["input_ids"], dtype=np.int64)]
        else:
            corpus = TokenCorpus.open(self.data)
            corpus = corpus.only(self.documents) if self.documents else corpus
            if corpus.vocab_size > model.config.vocab_size:
                raise ValueError(
                    f"data: expected tokens below the model's {model.config.vocab_size}, the "
                    f"corpus has {corpus.vocab_size}"
                )
            documents = [corpus.document(int(n)) for n in corpus.documents("heldout")]
        found = [
            document[start * length : (start + 1) * length]
            for start in range(max((len(d) // length for d in documents), default=0))
            for document in documents
            if len(document) >= (start + 1) * length
        ]
        if not found:
            longest = max(map(len, documents), default=0)
            raise ValueError(
                f"lengths: expected at most {longest} with this data, whose longest document has "
                f"{longest} tokens, got {length}"
            )
        return np.stack(found[: self.windows]).astype(np.int64)


class Partial:
    """What an interrupted analysis has done of one model, under all that it depends on."""

    def __init__(self, path: Path, depends: object) -> None:
        self.path = path
        self.key = hashlib.sha256(repr(depends).encode()).hexdigest()

    def read(self) -> tuple[dict[int, Totals], int]:
        """Totals by layer and the number of windows in them; none if other things were asked."""
        if not self.path.exists():
            return {}, 0
        held = torch.load(self.path, weights_only=True)
        if held["key"] != self.key:
            return {}, 0
        return {n: Totals(*parts) for n, parts in held["totals"].items()}, held["windows"]

    def write(self, totals: Mapping[int, Totals], windows: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.part")
        held = {n: (each.sums, each.most) for n, each in totals.items()}
        torch.save({"key": self.key, "totals": held, "windows": windows}, part)
        os.replace(part, self.path)


def load_model_config(folder: Path) -> Any:
    """The configuration of a run's or a model's folder."""
    from path_attention.models import PathAttentionConfig

    return PathAttentionConfig.from_pretrained(model_folder(folder))


def _files(folder: Path) -> list[tuple[str, int, int]]:
    files = sorted(model_folder(folder).iterdir())
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def parse_numbers(name: str, text: str) -> list[int]:
    """From "8,16,…". Raises ValueError with the name."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{name}: expected whole numbers with commas between, got {text!r}"
        ) from None


def _over_heads(rows: Sequence[Row]) -> list[Row]:
    """Each head's own row, and means of the others over a model's layers and heads."""
    others = [row for row in rows if row["kind"] != "head"]
    return [row for row in rows if row["kind"] == "head"] + mean_rows(others, ("layer", "head"))


def _rounded(row: Row) -> Row:
    """Six digits of each number: what is measured has fewer."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}


def _table(rows: Sequence[Row]) -> str:
    """Markdown: each model's medians over heads at the longest context."""
    lines = [
        "| model | ‖E M‖ | mixing window | far mass | bound | values in step |",
        "|" + "---|" * 6,
    ]
    last = max(row["length"] for row in rows if row["kind"] == "context")
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        heads = [row for row in mine if row["kind"] == "head"]
        ends = [row for row in mine if row["kind"] == "context" and row["length"] == last]
        cells = [_middle(heads, "spectral_norm"), _middle(heads, "mixing_window")]
        cells += [_middle(ends, name) for name in ("far_mass", "bound", "in_step")]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _middle(rows: Sequence[Row], column: str) -> str:
    values = [row[column] for row in rows if row[column] is not None]
    lacking = "" if len(values) == len(rows) else f" ({len(rows) - len(values)} heads: none)"
    return f"{np.median(values):.4g}{lacking}" if values else "none"
