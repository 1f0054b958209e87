"""`path-attention evaluate beside_lm_eval`: the same scores, by lm-eval alone and by us.

Of RULER's tasks that lm-eval makes without fetching anything. Three things are told apart:

- who reads: lm-eval's own model class, or ours, on lm-eval's samples: the same answers but where
  the two likeliest tokens are a rounding apart;
- how many rows at once, the shorter ones padded on their left: the same;
- who makes the samples: lm-eval's generator, or ours with the same words: scores within both
  intervals.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from unittest import mock

import numpy as np
import tyro

from path_attention.evaluation.intervals import score_interval
from path_attention.evaluation.perplexity_by_length import Partial, name_models, parse_lengths
from path_attention.models.loading import (
    choose_device,
    load_model,
    load_tokenizer,
    model_folder,
)
from path_attention.results import device_name, make_result, versions, write_figure, write_result

if TYPE_CHECKING:
    from path_attention.evaluation.generated.background import Background
    from path_attention.evaluation.harness.run import Scored
    from path_attention.evaluation.harness.suites import Planned

THEIRS = {  # our name of a task: lm-eval's
    "niah_single_1": "niah_single_1",
    "niah_multikey_2": "niah_multikey_2",
    "niah_multikey_3": "niah_multikey_3",
    "vt": "ruler_vt",
    "cwe": "ruler_cwe",
    "fwe": "ruler_fwe",
}
_LM_EVAL, _OURS = "lm-eval", "ours"
_MADE = 500  # samples of a length by lm-eval, whatever is asked for


@dataclass(frozen=True, kw_only=True)
class EvaluateBesideLmEval:
    """RULER's tasks that need nothing fetched, by lm-eval's own samples and reader and by ours.

    Writes OUT.json and OUT.png. A row is one way to a score; `same` is the share of its answers
    that are, to the letter, those of lm-eval's reader at the last batch size. What is done is kept
    in OUT.partial.json, and an interrupted run goes on there.
    """

    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of finished runs, or of any transformers causal language model with its tokenizer."""
    out: Path = Path("runs/beside_lm_eval")
    """Where the results go, without an ending."""
    labels: tuple[str, ...] = ()
    """A name for each model; default: the folder's."""
    tasks: tuple[str, ...] = ()
    """niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe, fwe; default: all."""
    lengths: str = "1024,4096"
    """Tokens of context, answer included, with commas between."""
    samples: int = 100
    """Samples of each task and length."""
    batch_sizes: tuple[int, ...] = (1, 16)
    """Rows read at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and activations."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    seed: int = 0
    """Of samples, and of the bootstrap."""

    def run(self) -> None:
        from transformers.utils.logging import disable_progress_bar

        from path_attention.evaluation.suite_figure import draw_ways

        disable_progress_bar()
        models = name_models(self.models, self.labels)
        device = choose_device(self.device)
        self._check()
        lengths = parse_lengths(self.lengths)
        partial = Partial(self.out.with_name(f"{self.out.name}.partial.json"))
        rows = []
        for label, folder in models.items():
            rows += self._measure(label, folder, lengths, device, partial)
        result = make_result(
            what="RULER's tasks by samples that lm-eval makes or we do, read by lm-eval's model "
            "class or ours, so many rows at once (batch): score with its 95 % interval (Wilson's "
            "for shares, else the bootstrap), and the share of answers that are the same as "
            "lm-eval's reader gives at the last batch size",
            rows=rows,
            device=device,
        )
        result["versions"]["lm-eval"] = importlib.metadata.version("lm-eval")
        base = self.out.with_name(f"{self.out.name}.json")
        write_result(base, result)
        write_figure(draw_ways(rows), base.with_suffix(".png"))
        partial.delete()
        for row in rows:
            print({name: value for name, value in row.items() if name != "dtype"})
        print(f"wrote {base} and .png")

    def _check(self) -> None:
        """Raise ValueError on bad options, or if lm-eval's generators are not installed."""
        unknown = sorted(set(self.tasks) - set(THEIRS))
        if unknown:
            raise ValueError(f"tasks: expected of {list(THEIRS)}, got {unknown}")
        if not 2 <= self.samples <= _MADE:
            raise ValueError(f"samples: expected 2 to lm-eval's {_MADE}, got {self.samples}")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes: expected numbers above 0, got {self.batch_sizes}")
        if importlib.util.find_spec("wonderwords") is None:
            raise ValueError(
                "lm-eval: expected what its RULER needs to be installed (`pip install "
                "'.[evaluate]'`), got no wonderwords"
            )

    def _measure(
        self, label: str, folder: Path, lengths: Sequence[int], device: str, partial: Partial
    ) -> list[dict[str, Any]]:
        import torch

        from path_attention.models.prefix_store import fingerprint

        model: Any = load_model(folder, dtype=getattr(torch, self.dtype))
        model.to(torch.device(device))
        settings = [fingerprint(model), device_name(device), versions(), self.dtype, self.seed]
        settings += [self.samples, self.batch_sizes]
        rows: list[dict[str, Any]] = []
        for length in lengths:
            for task in self.tasks or THEIRS:
                text = json.dumps([*settings, task, length])
                key = hashlib.sha256(text.encode()).hexdigest()[:32]
                found: Any = partial.get(key)
                if found is None:
                    found = self._rows(folder, model, task, length)
                    partial.put(key, found)
                rows += [{"model": label, **row, "dtype": self.dtype} for row in found]
        return rows

    def _rows(self, folder: Path, model: Any, task: str, length: int) -> list[dict[str, Any]]:
        """Every way to one task's score at one length, lm-eval's own at the last batch first."""
        tokenizer: Any = load_tokenizer(folder, model)
        theirs = lm_eval_task(task, length, model_folder(folder), self.seed)
        ours = self._our_task(tokenizer, task, length)
        last = self.batch_sizes[-1]
        ways = [(_LM_EVAL, _LM_EVAL, last), *((_LM_EVAL, _OURS, n) for n in self.batch_sizes)]
        ways.append((_OURS, _OURS, last))
        rows, reference = [], None
        for made, reader, batch in ways:
            planned = ours if made == _OURS else theirs
            scored = self._answers(model, tokenizer, planned, reader, batch)
            reference = reference or scored
            same = None if made == _OURS else _share_of_same(scored, reference)
            values = [_score(one) for one in scored]
            low, high = score_interval(values, _mean, self.seed)
            row = {"column": task, "length": length, "samples": made, "reader": reader}
            row |= {"batch": batch, "score": round(_mean(values), 6), "low": low, "high": high}
            rows.append({**row, "documents": len(values), "same": same})
        return rows

    def _our_task(self, tokenizer: Any, task: str, length: int) -> Planned:
        from path_attention.evaluation.harness.data import load_from_hub
        from path_attention.evaluation.harness.language_model import starts_texts
        from path_attention.evaluation.harness.suites import Sources, ruler_suite

        starts = starts_texts(tokenizer)
        sources = Sources(
            load=load_from_hub,  # not called: these tasks fetch nothing
            count_tokens=lambda text: (
                len(tokenizer.encode(text, add_special_tokens=False)) + starts
            ),
            background=lm_eval_words(),
            samples=self.samples,
            lengths=(length,),
            tasks=(task,),
            seed=self.seed,
        )
        (planned,) = ruler_suite(sources)
        return planned

    def _answers(
        self, model: Any, tokenizer: Any, planned: Planned, reader: str, batch: int
    ) -> list[Scored]:
        from lm_eval.models.huggingface import HFLM

        from path_attention.evaluation.harness.language_model import CausalLM
        from path_attention.evaluation.harness.run import answer_tasks

        lm: Any
        if reader == _OURS:
            lm = CausalLM(model, tokenizer, context=None, batch_size=batch)
        else:
            theirs: Any = HFLM  # which takes any arguments, whatever its decorator's types say
            lm = theirs(pretrained=model, tokenizer=tokenizer, batch_size=batch)
        return answer_tasks(lm, [planned], limit=self.samples)


def lm_eval_task(task: str, length: int, tokenizer: Path, seed: int = 0) -> Planned:
    """One of lm-eval's RULER tasks at one length, its samples drawn by `seed`."""
    from path_attention.evaluation.harness.suites import Planned, task_manager

    given = {"tokenizer": str(tokenizer), "max_seq_lengths": [length]}
    for name in ("lm_eval", "lm_eval.tasks.ruler"):
        logging.getLogger(name).setLevel(logging.ERROR)
    random.seed(seed)
    np.random.seed(seed)
    chosen = {"task": THEIRS[task], "dataset_kwargs": given}
    with _no_download(), contextlib.redirect_stdout(io.StringIO()):
        loaded: Any = task_manager().load([{"group": task, "task": [chosen]}])
    (found,) = loaded["tasks"].values()
    return Planned(found, task, (str(length),), length)


def _no_download() -> Any:
    """While it lasts, nltk fetches nothing: a model of sentences that these tasks never split."""
    import nltk

    return mock.patch.object(nltk, "download", lambda *_, **__: False)


def lm_eval_words() -> Background:
    """The words that lm-eval's RULER draws from, as a background of one sentence."""
    import wonderwords

    from path_attention.evaluation.generated.background import Background

    kinds: Mapping[str, Sequence[str]] = wonderwords.RandomWord()._categories  # pyright: ignore
    return Background((" ".join(_all_words(kinds)),))


def _all_words(kinds: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for kind in ("noun", "adjective", "verb"):
        yield from kinds[kind]


def _score(one: Scored) -> float:
    return float(one.scores.get("score", one.scores.get(str(one.place), 0.0)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _share_of_same(scored: Sequence[Scored], reference: Sequence[Scored]) -> float:
    """But for blanks before answers, of which lm-eval loses one with SentencePiece's tokenizers."""
    pairs = zip(scored, reference, strict=True)
    same = [a.answer.lstrip(" ") == b.answer.lstrip(" ") for a, b in pairs]
    return round(sum(same) / len(same), 6)
