"""Run a suite on one model: its samples with their scores, and rows with intervals."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval.api.task
from lm_eval.evaluator import evaluate

from path_attention.evaluation.harness.language_model import CausalLM
from path_attention.evaluation.harness.suites import Planned, Suite
from path_attention.evaluation.intervals import mean_interval, score_interval
from path_attention.results import write_whole

_FEWSHOT_SEED = 1234  # lm-eval's, so that examples are the ones it draws


@dataclass(frozen=True)
class Scored:
    """One document's answer under one filter.

    Attributes:
        planned: the task.
        place: its column's length, or its bucket ("4000-8000"), or None.
        document: its number in the task.
        prompt: what the model read, before the chat template's end.
        target: what was right.
        answer: what the model wrote, or which choice it took.
        filter: lm-eval's name of how the answer was read.
        scores: by metric.
        difficulty: `Sample.difficulty`.
    """

    planned: Planned
    place: int | str | None
    document: int
    prompt: str
    target: str
    answer: str
    filter: str
    scores: Mapping[str, Any]
    difficulty: int | None = None

    def as_line(self) -> dict[str, Any]:
        """The form in which it is kept."""
        return {
            "task": self.planned.name,
            "column": self.planned.column,
            "length": self.place,
            "difficulty": self.difficulty,
            "document": self.document,
            "filter": self.filter,
            "scores": dict(self.scores),
            "target": self.target,
            "answer": self.answer,
            "prompt": self.prompt,
        }


def answer_tasks(
    lm: CausalLM, planned: Sequence[Planned], *, limit: int | None = None, chat: bool = False
) -> list[Scored]:
    """Ask a model all tasks through lm-eval.

    Args:
        limit: documents of each task; None for all.
        chat: wrap prompts in the tokenizer's chat template.
    """
    for p in planned:
        task: Any = p.task
        task.set_config(key="num_fewshot", value=task.config.num_fewshot or 0)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    tasks: Any = {"tasks": {p.name: p.task for p in planned}, "groups": {}}
    with mock.patch.object(lm_eval.api.task, "tqdm", lambda rows, **_: rows):  # a bar for each task
        results: Any = evaluate(
            lm,
            tasks,
            limit=limit,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            verbosity="ERROR",
        )
    return [
        _scored(p, sample)
        for p in planned
        for sample in sorted(results["samples"][p.name], key=lambda sample: sample["doc_id"])
    ]


def _scored(planned: Planned, sample: Mapping[str, Any]) -> Scored:
    place: int | str | None = planned.length
    if planned.buckets:
        place = bucket(int(sample["doc"]["length"]), planned.buckets)
    answers = sample["filtered_resps"]
    return Scored(
        planned=planned,
        place=place,
        document=sample["doc_id"],
        prompt=str(sample["arguments"][0][0]),
        target=str(sample["target"]),
        answer=answers[0] if isinstance(answers[0], str) else json.dumps(answers),
        filter=sample["filter"],
        scores={name: sample[name] for name in sample["metrics"]},
        difficulty=sample["doc"].get("difficulty") if planned.samples else None,
    )


def bucket(length: int, borders: Sequence[int]) -> str:
    """The name of the stretch between borders that a length lies in.

    >>> bucket(3999, (0, 4000, 8000)), bucket(4000, (0, 4000, 8000)), bucket(9000, (0, 4000, 8000))
    ('0-4000', '4000-8000', '8000+')
    """
    for low, high in zip(borders, [*borders[1:], None], strict=True):
        if high is None or length < high:
            return f"{low}+" if high is None else f"{low}-{high}"
    raise ValueError(f"borders: expected at least one, got {list(borders)}")


def make_rows(
    model: str, lm: CausalLM, suite: Suite, scored: Sequence[Scored], seed: int = 0
) -> list[dict[str, Any]]:
    """A row for each column, length, filter and metric that counts, and for means over columns."""
    groups: defaultdict[tuple[Any, ...], list[Scored]] = defaultdict(list)
    for one in scored:
        for metric in one.planned.metrics or tuple(one.scores):
            groups[one.planned.column, one.place, one.filter, metric].append(one)
    rows = []
    for (column, place, how, metric), mine in groups.items():
        values = [one.scores[metric] for one in mine]
        task: Any = mine[0].planned.task
        aggregate = task.aggregation()[metric]
        score = float(aggregate(values))
        low, high = score_interval(values, aggregate, seed)
        hard = [one.difficulty for one in mine if one.difficulty is not None]
        seen = [lm.contexts[name] for name in {one.planned.name for one in mine}]
        row = {"model": model, "column": column, "length": place, "filter": how, "metric": metric}
        row |= {"score": _finite(score), "low": _finite(low), "high": _finite(high)}
        row |= {
            "documents": len(values),
            "difficulty": round(sum(hard) / len(hard), 2) if hard else None,
            "shots": task.config.num_fewshot or 0,
            "context": lm.context,
            "longest": max(context.longest for context in seen),
            "cut": sum(context.cut for context in seen),
        }
        rows.append(row)
    return rows + _means(rows, suite)


def _means(rows: Sequence[dict[str, Any]], suite: Suite) -> list[dict[str, Any]]:
    """Means over the suite's columns at each length, where all of them are there."""
    if suite.mean_of == ():
        return []
    shares = [row for row in rows if "perplexity" not in row["metric"]]
    means = []
    for length in dict.fromkeys(row["length"] for row in shares):
        mine = [row for row in shares if row["length"] == length]
        if suite.mean_of is not None:
            mine = [row for row in mine if row["column"] in suite.mean_of]
        if len(mine) < 2 or (suite.mean_of is not None and len(mine) < len(suite.mean_of)):
            continue
        score, low, high = mean_interval([(row["score"], row["low"], row["high"]) for row in mine])
        means.append(
            {
                **mine[0],
                "column": f"mean of {len(mine)}",
                "metric": "mean",
                "filter": "",
                "score": score,
                "low": low,
                "high": high,
                "documents": sum(row["documents"] for row in mine),
                "difficulty": None,
                "longest": max(row["longest"] for row in mine),
                "cut": sum(row["cut"] for row in mine),
            }
        )
    return means


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)


def write_samples(path: Path, scored: Sequence[Scored]) -> None:
    """Write one JSON line a document and filter."""
    lines = (json.dumps(one.as_line(), ensure_ascii=False, default=str) for one in scored)
    write_whole(path, "".join(f"{line}\n" for line in lines))
