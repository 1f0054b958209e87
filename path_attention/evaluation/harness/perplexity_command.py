"""`path-attention evaluate perplexity_by_length`: perplexity by length on published long texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from path_attention.evaluation.perplexity_by_length import (
    Partial,
    name_models,
    parse_lengths,
    perplexity_by_length,
)
from path_attention.evaluation.windows import check_lengths, choose_windows
from path_attention.models.loading import choose_device, load_tokenizer, model_folder
from path_attention.results import make_result, write_result

if TYPE_CHECKING:
    from path_attention.training.corpus import TokenCorpus


_TOGETHER = "by_length"  # of the file of all sets, where a set's has its name


@dataclass(frozen=True, kw_only=True)
class EvaluatePerplexityByLength:
    """Perplexity by length on PG-19, CodeParrot and NarrativeQA, or on texts of your own.

    As `evaluate perplexity`, which says how context is counted, with a corpus made for each set of
    texts and tokenizer. Writes OUT/perplexity_SET.json and .png, and of several sets together
    OUT/perplexity_by_length.json and .png. Models with another tokenizer read other tokens: compare
    how they grow.
    """

    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of finished runs, or of any transformers causal language model with its tokenizer."""
    texts: tuple[str, ...] = ("pg19", "codeparrot", "narrativeqa")
    """Each one of these names, or a file, folder or glob of local texts."""
    data_dir: Path | None = None
    """A folder of fetched texts (`path-attention evaluate fetch`); default: the hub."""
    documents: int = 100
    """The most documents of a set that are fetched from the hub."""
    lengths: str = "4096,8192,16384,32768,65536"
    """Tokens of context, rising, with commas between."""
    targets: int = 512
    """Target tokens at the end of each window; at most the shortest length."""
    windows: int = 64
    """The most windows to read."""
    out: Path = Path("runs/evaluation")
    """The folder of results."""
    labels: tuple[str, ...] = ()
    """A name for each model; default: the folder's."""
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

        from path_attention.evaluation.table import print_by_length

        disable_progress_bar()
        models = name_models(self.models, self.labels)
        lengths, device = parse_lengths(self.lengths), choose_device(self.device)
        check_lengths(lengths, self.targets)
        groups = by_tokenizer(models)
        sets = self._sets(groups, lengths)
        together = []
        for name, corpora in sets.items():
            rows = []
            for digest, corpus in corpora.items():
                measured = self._measure(name, corpus, digest, groups[digest], lengths, device)
                rows += [{"text": name, **row} for row in measured]
            print_by_length(rows)
            self._write(f"perplexity_{name}", name, rows, device)
            together += rows
        if len(sets) > 1:
            self._write(f"perplexity_{_TOGETHER}", ", ".join(sets), together, device)

    def _write(self, file: str, texts: str, rows: list[dict[str, Any]], device: str) -> None:
        """A result and its figure."""
        from path_attention.evaluation.figure import draw

        result = make_result(
            what=f"Perplexity by length on {texts}: the same {self.targets} targets a window at "
            "every length; growth is over the shortest length; low and high are the ends of a "
            "95 % bootstrap interval over documents",
            rows=rows,
            device=device,
        )
        path = self.out / f"{file}.json"
        write_result(path, result)
        draw(result, path.with_suffix(".png"))
        print(f"wrote {path} and {path.with_suffix('.png')}")

    def _sets(
        self, groups: Mapping[str, Mapping[str, Path]], lengths: Sequence[int]
    ) -> dict[str, dict[str, _Whole]]:
        """Each set of texts by its name, as a corpus for each tokenizer, before a model is loaded.

        Raises ValueError naming `texts` on two of one name, `lengths` if no document is so long.
        """
        from path_attention.training.corpus import build_corpus

        names = [Path(text).stem for text in self.texts]
        if not names or len({*names, _TOGETHER}) <= len(names):
            raise ValueError(
                f"texts: expected a different name for each and none {_TOGETHER!r}, got {names}"
            )
        sources = {Path(text).stem: self._sources(text) for text in self.texts}
        sets: dict[str, dict[str, _Whole]] = {}
        for name, files in sources.items():
            for digest, models in groups.items():
                corpus = _Whole(
                    build_corpus(
                        files,
                        self.out / "corpora" / f"{name}-{digest}",
                        tokenizer=str(model_folder(next(iter(models.values())))),
                        heldout_fraction=0.0,
                        progress=False,
                    )
                )
                choose_windows(corpus, length=lengths[-1], targets=self.targets, limit=self.windows)
                sets.setdefault(name, {})[digest] = corpus
        return sets

    def _sources(self, text: str) -> tuple[str, ...]:
        """The files of a set of texts."""
        from path_attention.evaluation.harness.texts import TEXTS, fetch_texts, find_texts

        if text not in TEXTS:
            return (text,)
        if self.data_dir is None:
            files = fetch_texts(self.out, text, self.documents)
        else:
            files = find_texts(self.data_dir, text)
        return tuple(map(str, files))

    def _measure(
        self,
        name: str,
        corpus: _Whole,
        digest: str,
        models: dict[str, Path],
        lengths: tuple[int, ...],
        device: str,
    ) -> list[dict[str, Any]]:
        from path_attention.evaluation.table import show_progress

        partial = Partial(self.out / f"perplexity_{name}-{digest}.partial.json")
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
                seed=self.seed,
                partial=partial,
                progress=progress,
            )
        partial.delete()
        return rows


class _Whole:
    """A corpus of which every document is read, since no model was trained on any."""

    def __init__(self, corpus: TokenCorpus) -> None:
        self.document, self.tokenizer = corpus.document, corpus.tokenizer
        self._count = len(corpus.heldout)

    def documents(self, split: Literal["heldout"]) -> range:
        """The numbers of all documents."""
        return range(self._count)


def by_tokenizer(models: dict[str, Path]) -> dict[str, dict[str, Path]]:
    """Models that share a tokenizer's vocabulary, under eight digits of its hash."""
    groups: dict[str, dict[str, Path]] = {}
    for label, folder in models.items():
        vocabulary = json.dumps(load_tokenizer(folder).get_vocab(), sort_keys=True)
        digest = hashlib.sha256(vocabulary.encode()).hexdigest()[:8]
        groups.setdefault(digest, {})[label] = folder
    return groups
