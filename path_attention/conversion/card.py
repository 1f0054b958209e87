"""The card of a converted model: teacher, data, tokens, scores before and after."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from path_attention.conversion.recipe import ConversionRecipe
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
    """conversion_card.json (everything) and README.md, in `out` and in `out`/model."""
    mixture = CorpusMixture.open(recipe.data) if recipe.data else None
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
        "data": None if mixture is None else mixture.info,
        "report": list(rows),
    }
    write_whole(out / "conversion_card.json", json.dumps(card, indent=1, default=str) + "\n")
    text = _readme(card, recipe, rows)
    for folder in (out / "model", out):
        write_whole(folder / "README.md", text)


def _readme(
    card: Mapping[str, Any], recipe: ConversionRecipe, rows: Sequence[Mapping[str, Any]]
) -> str:
    sources = "none"
    if card["data"] is not None:
        sources = "; ".join(
            f"{', '.join(part['recipe']['sources'])} (weight {part['weight']})"
            for part in card["data"]["parts"]
        )
    trained = ", ".join(f"{s['stage']} {s['trained_tokens']:,}" for s in card["stages"]) or "none"
    facts = {
        "teacher": card["teacher"],
        "encoding": recipe.to,
        "start of w, β and gates": recipe.start,
        "data": sources,
        "tokens trained on": trained,
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [path_attention]
---
# {Path(card["teacher"]).name}, converted to {recipe.to}

A RoPE language model whose position encoding was exchanged for {recipe.to} by `path_attention`.

| | |
|---|---|
{table}

{_scores(rows)}
Use it with

    import path_attention.models  # registers the model with transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
"""


def _scores(rows: Sequence[Mapping[str, Any]]) -> str:
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
