"""The card of a converted model: teacher, data, tokens, scores before and after."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from path_attention.conversion.recipe import ConversionRecipe
from path_attention.conversion.scores import read_completions
from path_attention.models import PathAttentionConfig
from path_attention.results import write_whole
from path_attention.training.mixture import CorpusMixture


def write_card(
    out: Path,
    source: str,
    recipe: ConversionRecipe,
    teacher: PathAttentionConfig,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """conversion_card.json (everything) and README.md, in `out` and in `out`/model.

    rows: of the report; completions are read from `out`/report.
    """
    data, stage_data = (
        CorpusMixture.open(given).info if given else None
        for given in (recipe.data, recipe.stage_data)
    )
    stages = [
        {"stage": name, "trained_tokens": stage.steps * stage.batch_tokens}
        for name, stage in recipe.stages()
    ]
    name = Path(source).name if Path(source).exists() else source  # no path of this machine
    card = {
        "teacher": name,
        "teacher_config": teacher.to_diff_dict(),
        "to": recipe.to,
        "start": recipe.start,
        "stages": stages,
        "recipe": dataclasses.asdict(recipe),
        "data": data,
        "stage_data": stage_data,
        "report": list(rows),
    }
    write_whole(out / "conversion_card.json", json.dumps(card, indent=1, default=str) + "\n")
    text = _readme(card, recipe, rows, read_completions(out / "report"))
    for folder in (out / "model", out):
        write_whole(folder / "README.md", text)


def _readme(
    card: Mapping[str, Any],
    recipe: ConversionRecipe,
    rows: Sequence[Mapping[str, Any]],
    completions: Sequence[Mapping[str, Any]],
) -> str:
    trained = ", ".join(f"{s['stage']} {s['trained_tokens']:,}" for s in card["stages"]) or "none"
    facts = {
        "teacher": card["teacher"],
        "encoding": recipe.to,
        "start of w, β and gates": recipe.start,
        "data": _data(card, recipe),
        "tokens trained on": trained,
    }
    name = Path(card["teacher"]).name
    title = f"{name}, converted to {recipe.to}"
    what = f"whose position encoding was exchanged for {recipe.to}"
    if recipe.to == "rope":  # a conversion's control
        title, what = f"{name}, trained on", "that was trained on as it is"
        del facts["start of w, β and gates"]
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [path_attention]
---
# {title}

A RoPE language model {what} by `path_attention`.

| | |
|---|---|
{table}

{_stages(rows)}{_contexts(rows)}{_suites(rows)}{_completions(completions)}
## Use

    import path_attention.models  # registers the model with transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
"""


def _data(card: Mapping[str, Any], recipe: ConversionRecipe) -> str:
    """The sources of what was trained on, by stage where stages have corpora of their own."""
    stages: dict[str, list[str]] = {}
    for name, _ in recipe.stages():
        own = recipe.stage_data and name != "pretraining"
        stages.setdefault("stage_data" if own else "data", []).append(name)
    texts = {}
    for key in stages or ("data",):
        parts = [] if card[key] is None else card[key]["parts"]
        texts[key] = "; ".join(
            f"{', '.join(part['recipe']['sources'])} (weight {part['weight']})" for part in parts
        )
    if "stage_data" not in texts:
        return texts["data"] or "none"
    return ". ".join(f"{', '.join(stages[key])}: {text}" for key, text in texts.items())


def _stages(rows: Sequence[Mapping[str, Any]]) -> str:
    models = [row for row in rows if row["by"] == "model"]
    if not models:
        return "It was not measured: no held-out documents were given.\n"
    lines = [
        f"| after {row['stage']} ({row['tokens']:,} tokens) | {row['perplexity']:.3f} | "
        f"{row['kl']:.4f} |"
        for row in models
    ]
    first = models[0]
    head = (
        f"On {first['targets']:,} held-out target tokens:\n\n| | perplexity | KL |\n|---|---|---|"
    )
    teacher = f"| the teacher | {first['teacher_perplexity']:.3f} | |"
    return "\n".join([head, teacher, *lines]) + "\n"


def _contexts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Perplexity by length, a table for each corpus."""
    text = ""
    mine = [row for row in rows if row["by"] == "context"]
    for corpus in dict.fromkeys(row["corpus"] for row in mine):
        here = [row for row in mine if row["corpus"] == corpus]
        text += f"\n## Perplexity by tokens of context, {corpus}\n\n| | teacher | student |\n"
        text += "|---|---|---|\n"
        for length in dict.fromkeys(row["length"] for row in here):
            cells = _beside([row for row in here if row["length"] == length], "perplexity", 1)
            text += f"| {length:,} | {cells} |\n"
    return text


def _suites(rows: Sequence[Mapping[str, Any]]) -> str:
    """Scores of suites, before (the teacher) and after (the student), with 95 % intervals."""
    text = ""
    mine = [row for row in rows if row["by"] == "suite"]
    for suite in dict.fromkeys(row["suite"] for row in mine):
        here = [row for row in mine if row["suite"] == suite]
        text += f"\n## {suite}\n\n| task | tokens | metric | teacher | student |\n"
        text += "|---|---|---|---|---|\n"
        names = ("column", "length", "metric", "filter")
        for place in dict.fromkeys(tuple(row[name] for name in names) for row in here):
            column, length, metric, how = place
            found = [row for row in here if tuple(row[name] for name in names) == place]
            cells = _beside(found, "score", 1 if "perplexity" in metric else 100)
            metric = metric if how in ("", "none") else f"{metric}, {how}"
            text += f"| {column} | {'' if length is None else length} | {metric} | {cells} |\n"
    return text


def _beside(rows: Sequence[Mapping[str, Any]], name: str, by: int) -> str:
    """The teacher's and the student's cell."""
    cells = {}
    for row in rows:
        cell = "not finite" if row[name] is None else f"{by * row[name]:.{2 if by == 1 else 1}f}"
        if row["low"] is not None:
            cell += f" ({by * row['low']:.1f}–{by * row['high']:.1f})"
        cells[row["model"]] = cell
    return " | ".join(cells.get(model, "") for model in ("teacher", "student"))


def _completions(lines: Sequence[Mapping[str, Any]]) -> str:
    if not lines:
        return ""
    text = "\n## Completions, before and after\n"
    for prompt in dict.fromkeys(line["prompt"] for line in lines):
        text += f"\n**{prompt}**\n"
        for line in lines:
            if line["prompt"] == prompt:
                answer = line["answer"].strip().replace("\n", "\n> ")
                text += f"\n{line['model']}:\n\n> {answer}\n"
    return text
