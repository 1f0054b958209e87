"""Perplexity by length: the same target tokens, predicted from shorter and from longer context.

    perplexity(ℓ) = exp(mean over targets of −log p(target | context cut to length ℓ))

How context is counted is said in `evaluation.windows.Windows`. The pass over the longest context
also gives perplexity by position: targets spread evenly over each stretch of positions, each
predicted from the whole window before it. (Those are other tokens in each stretch, so that only
models compare there; over lengths compare the first kind.)

Means weigh each token alike. The interval is the percentile bootstrap over documents, since tokens
of one document are not independent draws.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from path_attention.evaluation.reading import logits_at
from path_attention.evaluation.windows import Corpus, Windows, check_lengths, choose_windows
from path_attention.models.loading import (
    choose_device,
    load_model,
    load_tokenizer,
    model_folder,
)
from path_attention.results import (
    device_name,
    make_result,
    read_kept,
    versions,
    write_result,
    write_whole,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]  # (label, tokens done, tokens in all)
_MOST_LOGITS = 2**28  # of one batch: 1 GiB in float32
_RESAMPLES = 2000
_PROBE_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class EvaluatePerplexity:
    """Perplexity of language models by length, on the same held-out tokens for every length.

    Writes OUT.json (rows with intervals) and OUT.png (the curves). An interrupted run goes on where
    it was and ends with the same numbers; what it keeps meanwhile is OUT.partial.json.
    """

    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of finished runs, or of any transformers causal language model with its tokenizer."""
    data: Path
    """Corpus folder of `path-attention corpus build`; its held-out documents are read."""
    documents: tuple[str, ...] = ()
    """Patterns of documents' names, as 'prose/*': read those alone that match one; default: all."""
    lengths: str = "256,512,1024,2048,4096"
    """Tokens of context, rising, with commas between."""
    targets: int = 128
    """Target tokens at the end of each window; at most the shortest length."""
    windows: int = 64
    """The most windows to read."""
    out: Path = Path("runs/perplexity")
    """Where the results go, without an ending."""
    labels: tuple[str, ...] = ()
    """A name for each model in rows and figure; default: the folder's."""
    training_length: int | None = None
    """Marked in the figure; default: the model's own `max_position_embeddings`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and activations; the loss is taken in float32."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    batch_tokens: int = 8192
    """Context tokens read at once: of several windows, or pieces of one through the cache."""
    seed: int = 0
    """Of the choice of windows and of the bootstrap."""

    def run(self) -> None:
        from transformers.utils.logging import disable_progress_bar

        from path_attention.evaluation.figure import draw
        from path_attention.evaluation.table import print_by_length, show_progress
        from path_attention.training.corpus import TokenCorpus

        disable_progress_bar()
        models = name_models(self.models, self.labels)
        lengths = parse_lengths(self.lengths)
        device = choose_device(self.device)
        partial = Partial(self.out.with_name(f"{self.out.name}.partial.json"))
        corpus = TokenCorpus.open(self.data)
        if self.documents:
            corpus = corpus.only(self.documents)
        with show_progress() as progress:
            rows = perplexity_by_length(
                models,
                corpus,
                lengths=lengths,
                targets=self.targets,
                windows=self.windows,
                dtype=self.dtype,
                device=device,
                batch_tokens=self.batch_tokens,
                training_length=self.training_length,
                seed=self.seed,
                partial=partial,
                progress=progress,
            )
        result = make_result(
            what=f"Perplexity by length on held-out documents: the same {self.targets} targets a "
            "window at every length; growth is over the shortest length; low and high are the ends "
            "of a 95 % bootstrap interval over documents",
            rows=rows,
            device=device,
        )
        write_result(self.out.with_name(f"{self.out.name}.json"), result)
        figure = self.out.with_name(f"{self.out.name}.png")
        draw(result, figure)
        partial.delete()
        print_by_length(rows)
        print(f"wrote {figure.with_suffix('.json')} and {figure}")


def perplexity_by_length(
    models: Mapping[str, Path],
    corpus: Corpus,
    *,
    lengths: Sequence[int],
    targets: int = 128,
    windows: int = 64,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: str = "cpu",
    batch_tokens: int = 8192,
    training_length: int | None = None,
    seed: int = 0,
    partial: Partial | None = None,
    progress: Progress = lambda label, done, total: None,
) -> list[dict[str, Any]]:
    """Measure several models on the same tokens; one row a model and length, or stretch.

    Args:
        models: a label for each model's folder.
        corpus: whose held-out documents are read.
        lengths: tokens of context, rising.
        targets: target tokens at the end of each window.
        windows: the most windows to read.
        dtype: of weights and activations.
        device: where the models run.
        batch_tokens: context tokens read at once; bounds memory: a longer window is read in
            pieces through the model's cache.
        training_length: written into the rows; None takes each model's `max_position_embeddings`.
        seed: of the choice of windows and of the bootstrap.
        partial: keeps what is done, so that an interrupted call goes on.
        progress: called with a model's label, its context tokens done, and those in all.

    Returns:
        Rows with `by` "length" (at `length` tokens of context) or "position" (context from
        `from_position` to `to_position` tokens, in one window); `loss` in nats a token,
        `perplexity` = exp(loss), `low`, `high` its 95 % interval (None with one document). By
        length also `growth` = perplexity over that at the shortest length, with an interval of
        its own (`growth_low`, `growth_high`): much the narrower one, since both are of the same
        tokens.

    Raises:
        ValueError: naming the argument: lengths that do not rise, no document long enough, a
            tokenizer that is not the corpus's, a folder without a model.
    """
    lengths = tuple(lengths)
    check_lengths(lengths, targets)
    chosen = choose_windows(corpus, length=lengths[-1], targets=targets, limit=windows, seed=seed)
    for label, folder in models.items():
        check_tokenizer(label, model_folder(folder), corpus, chosen)
        progress(label, 0, len(chosen.tokens) * sum(lengths))
    rows = []
    for label, folder in models.items():
        folder = model_folder(folder)
        trained = training_length or _training_length(folder)
        names = {"model": label, "training_length": trained, "dtype": dtype, "data": chosen.digest}
        measured = _measure(
            folder,
            chosen,
            lengths,
            dtype,
            device,
            batch_tokens,
            partial,
            lambda done, total, label=label: progress(label, done, total),
        )
        shortest = None
        for group, sums in measured:
            row = {**names, **group.names, **_summary(sums, chosen, len(group.indices), seed)}
            if group.names["by"] == "length":
                shortest = shortest or sums
                row |= _growth(sums, shortest, chosen, seed)
            rows.append(row)
    return sorted(rows, key=lambda row: (list(models).index(row["model"]), row["by"]))


def _measure(
    folder: Path,
    windows: Windows,
    lengths: tuple[int, ...],
    dtype: str,
    device: str,
    batch_tokens: int,
    partial: Partial | None,
    progress: Callable[[int, int], None],
) -> Iterator[tuple[_Group, list[float]]]:
    """One model at all lengths: each group of targets with its sum of losses in each window."""
    model = None
    total = len(windows.tokens) * sum(lengths)
    for n, length in enumerate(lengths):
        before = len(windows.tokens) * sum(lengths[:n])
        groups = _groups(length, lengths, windows.targets)
        key = _key(folder, windows, length, lengths, dtype, device)
        losses = partial.get(key) if partial else None
        if losses is None:
            if model is None:
                model = load_model(folder, dtype=getattr(torch, dtype))
                model.to(torch.device(device))  # type: ignore[arg-type]
            losses = score(
                model,
                windows,
                length,
                groups,
                batch_tokens,
                lambda done, n=length, before=before: progress(before + done * n, total),
            )
            if partial:
                partial.put(key, losses)
        progress(before + len(windows.tokens) * length, total)
        yield from zip(groups, losses, strict=True)


@dataclass(frozen=True)
class _Group:
    """Target positions whose losses are added up, and what their row is called."""

    names: dict[str, Any]
    indices: np.ndarray  # into the length's input tokens: index c − 1 predicts from c tokens


def _groups(length: int, lengths: Sequence[int], targets: int) -> list[_Group]:
    names = {"by": "length", "length": length}
    groups = [_Group(names, np.arange(length - targets, length))]
    if length == lengths[-1]:
        for before, after in zip((0, *lengths), lengths, strict=False):
            count = min(targets, after - before)
            indices = np.linspace(before, after - 1, count).round().astype(np.int64)
            names = {"by": "position", "from_position": before + 1, "to_position": after}
            groups.append(_Group(names, indices))
    return groups


@torch.inference_mode()
def score(
    model: PreTrainedModel,
    windows: Windows,
    length: int,
    groups: Sequence[_Group],
    batch_tokens: int,
    progress: Callable[[int], None] = lambda windows: None,
) -> list[list[float]]:
    """Sums of −log p over each group's targets, in nats: one list a group, one number a window."""
    keep = np.unique(np.concatenate([group.indices for group in groups]))
    columns = [torch.from_numpy(np.searchsorted(keep, group.indices)) for group in groups]
    tokens = torch.from_numpy(windows.tokens[:, windows.longest - length :])
    vocabulary = model.config.get_text_config().vocab_size
    batch = max(1, min(batch_tokens // length, _MOST_LOGITS // (len(keep) * vocabulary)))
    sums: list[list[float]] = [[] for _ in groups]
    for part in tokens.split(batch):
        losses = _losses(model, part, torch.from_numpy(keep), batch_tokens)
        for column, found in zip(columns, sums, strict=True):
            found.extend(losses[:, column].sum(1).tolist())
        progress(len(sums[0]))
    return sums


def _losses(model: PreTrainedModel, tokens: Tensor, keep: Tensor, piece: int) -> Tensor:
    """−log p of the token behind each kept position, float64 `[B, K]`."""
    inputs, found = tokens[:, :-1], []
    asked = torch.zeros(inputs.shape[1], dtype=torch.bool)
    asked[keep] = True
    try:
        for columns, logits in logits_at(model, inputs, asked, piece):
            wanted = tokens[:, columns + 1].to(logits.device)
            found.append(F.cross_entropy(logits.float().mT, wanted, reduction="none").cpu())
    except IndexError as error:
        raise ValueError(
            f"lengths: this model cannot read {inputs.shape[1]} tokens ({error})"
        ) from error
    return torch.cat(found, 1).double()


def _summary(sums: Sequence[float], windows: Windows, targets: int, seed: int) -> dict[str, Any]:
    perplexity, low, high = _interval(np.asarray(sums), windows, targets, seed)
    tokens = len(sums) * targets
    return {
        "perplexity": perplexity,
        "low": low,
        "high": high,
        "loss": round(float(np.sum(sums) / tokens), 6),
        "tokens": tokens,
        "windows": len(sums),
        "documents": len(np.unique(windows.document)),
    }


def _growth(
    sums: Sequence[float], shortest: Sequence[float], windows: Windows, seed: int
) -> dict[str, Any]:
    difference = np.asarray(sums) - np.asarray(shortest)
    growth, low, high = _interval(difference, windows, windows.targets, seed)
    return {"growth": growth, "growth_low": low, "growth_high": high}


def _interval(
    sums: np.ndarray, windows: Windows, targets: int, seed: int
) -> tuple[float | None, ...]:
    """exp of the mean over tokens, and of its interval over documents."""
    _, which = np.unique(windows.document, return_inverse=True)
    loss = np.bincount(which, weights=sums)
    tokens = np.bincount(which) * targets
    ends = (loss.sum() / tokens.sum(), *bootstrap(loss, tokens, seed=seed))
    return tuple(None if end is None else round(float(np.exp(end)), 6) for end in ends)


def bootstrap(
    sums: np.ndarray, weights: np.ndarray, *, seed: int = 0, resamples: int = _RESAMPLES
) -> tuple[float, float] | tuple[None, None]:
    """95 % percentile interval of Σ sums / Σ weights when whole documents are drawn again.

    Args:
        sums: one number a document, `[N]`.
        weights: its tokens, `[N]`.

    Returns:
        The interval's ends; (None, None) with fewer than two documents, where nothing is known.
    """
    if len(sums) < 2:
        return None, None
    drawn = np.random.default_rng(seed).integers(0, len(sums), (resamples, len(sums)))
    low, high = np.percentile(sums[drawn].sum(1) / weights[drawn].sum(1), [2.5, 97.5])
    return float(low), float(high)


class Partial:
    """What an interrupted evaluation has done: sums under the key of all that they depend on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, list[list[float]]] = read_kept(path)

    def get(self, key: str) -> list[list[float]] | None:
        return self.done.get(key)

    def put(self, key: str, losses: list[list[float]]) -> None:
        self.done[key] = losses
        write_whole(self.path, json.dumps(self.done))

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


def _key(
    folder: Path,
    windows: Windows,
    length: int,
    lengths: Sequence[int],
    dtype: str,
    device: str,
) -> str:
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.iterdir())]
    parts = (files, windows.digest, length, lengths, dtype, device_name(device), versions())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def parse_lengths(text: str) -> tuple[int, ...]:
    """Numbers of tokens from "256,512,…". Raises ValueError naming `lengths`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"lengths: expected whole numbers with commas between, got {text!r}"
        ) from None


def parse_parts(texts: Sequence[str]) -> dict[str, list[str]]:
    """Patterns of documents' names by part, of "NAME=PATTERN,PATTERN" each.

    Raises ValueError naming `parts`.
    """
    parts = {}
    for text in texts:
        name, equals, patterns = text.partition("=")
        if not (name and equals and patterns):
            raise ValueError(f"parts: expected NAME=PATTERN,PATTERN, got {text!r}")
        parts[name] = patterns.split(",")
    return parts


def name_models(folders: Sequence[Path], labels: Sequence[str] = ()) -> dict[str, Path]:
    """A different label for each folder: a name that a file may have.

    Raises ValueError naming `models` or `labels`.
    """
    if not folders:
        raise ValueError("models: expected at least one folder, got none")
    if labels and len(labels) != len(folders):
        raise ValueError(
            f"labels: expected one for each of the {len(folders)} models, got {len(labels)}"
        )
    whole = [Path(os.path.abspath(folder)) for folder in folders]  # "." has no name
    names = list(labels) or [f.parent.name if f.name == "model" else f.name for f in whole]
    if bad := [name for name in names if name in ("", "..") or Path(name).name != name]:
        raise ValueError(f"labels: expected names of files, got {bad}")
    if len(set(names)) < len(names):
        raise ValueError(f"labels: expected a different one for each model, got {names}")
    return dict(zip(names, folders, strict=True))


def _training_length(folder: Path) -> int | None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("max_position_embeddings")


def check_tokenizer(label: str, folder: Path, corpus: Corpus, windows: Windows) -> None:
    """Raise ValueError unless the model's tokenizer reads text into the corpus's tokens."""
    theirs, ours = load_tokenizer(folder), corpus.tokenizer()
    text = ours.decode(windows.tokens[0, :_PROBE_TOKENS], skip_special_tokens=True)
    encoded = [t.encode(text, add_special_tokens=False) for t in (theirs, ours)]
    if theirs.get_vocab() != ours.get_vocab() or encoded[0] != encoded[1]:
        raise ValueError(
            f"models: expected {label} to have the corpus's tokenizer ({len(ours)} tokens), got "
            f"another one ({len(theirs)} tokens); build the corpus with --tokenizer {folder}"
        )
