"""What a finished run leaves: the model's folder for `from_pretrained`, and its card."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from path_attention.results import put_in_place
from path_attention.training.checkpoint import find_damage
from path_attention.training.corpus import TokenCorpus
from path_attention.training.mixture import CorpusMixture
from path_attention.training.objective import Objective
from path_attention.training.processes import Processes
from path_attention.training.recipe import ModelRecipe, Recipe

if TYPE_CHECKING:
    from path_attention.models import PathAttentionConfig

MODEL_CONFIG = "model_config.json"  # of a run, from its start


def export_model(
    model: nn.Module,
    config: PathAttentionConfig,
    corpus: TokenCorpus | CorpusMixture,
    folder: Path,
    processes: Processes,
    objective: Objective,
) -> None:
    """Gather the model from all processes and write it with its tokenizer, replacing `folder`.

    It gets config.json, model.safetensors, generation_config.json and the tokenizer's files.
    """
    from transformers.utils import logging

    from path_attention.models import PathAttentionForCausalLM

    state = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=processes.count > 1)
    )
    if not processes.first:
        return
    config, state = objective.exported(config, cast(dict[str, torch.Tensor], state))
    whole = PathAttentionForCausalLM(config)
    whole.load_state_dict(state)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        logging.disable_progress_bar()
        whole.save_pretrained(partial)
        corpus.tokenizer().save_pretrained(partial)
        put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def export_step(run: Path, step: int | None, out: Path, dtype: str = "float32") -> int:
    """Write a checkpoint of a run as a model's folder, with the tokenizer if the run has one yet.

    `out` appears when it is complete.

    Args:
        run: the run's folder.
        step: of the checkpoint; None for the latest.
        out: a new folder.
        dtype: of the weights written, "float32" or "bfloat16".

    Returns:
        The step.

    Raises:
        ValueError: no such checkpoint, or a damaged one; one of a run that trained by another
            objective's parameters (low-rank updates); `out` is there.
    """
    from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM

    found = {int(p.name.split("-")[1]): p for p in (run / "checkpoints").glob("step-*")}
    if not found or (step is not None and step not in found):
        raise ValueError(f"step: expected one of {sorted(found)} in {run}, got {step}")
    if out.exists():
        raise ValueError(f"out: expected a new folder, {out} is there")
    step = max(found) if step is None else step
    problem = find_damage(found[step])
    if problem is not None:
        raise ValueError(f"step: {found[step]} is damaged ({problem})")
    config = PathAttentionConfig.from_json_file(run / MODEL_CONFIG)
    model = PathAttentionForCausalLM(config)
    states = {"model": model.state_dict()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(states, checkpoint_id=found[step], no_dist=True)
    except (RuntimeError, CheckpointException) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"step: {found[step]} holds no whole model: {reason}") from error
    model.load_state_dict(states["model"])
    cast(nn.Module, model).to(getattr(torch, dtype))
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for source in (run / "model", run.parent / "start"):
        if (source / "tokenizer_config.json").exists():
            for path in source.iterdir():
                if path.name not in ("config.json", "generation_config.json", "README.md") and (
                    path.suffix != ".safetensors"
                ):
                    shutil.copy2(path, partial / path.name)
            break
    os.rename(partial, out)
    return step


def write_card(
    out: Path,
    *,
    recipe: Recipe,
    config: PathAttentionConfig,
    corpus: TokenCorpus | CorpusMixture,
    processes: Processes,
    dtype: torch.dtype,
    parameters: int,
    log: list[dict[str, Any]],
) -> None:
    """Write card.json (everything) and README.md (for readers; also into model/)."""
    losses = [line["loss"] for line in log if "loss" in line]
    heldout = [line["heldout_loss"] for line in log if "heldout_loss" in line]
    seconds = sum(line["seconds"] for line in log if "loss" in line)
    card = {
        "name": recipe.name,
        "command": _command(),
        "recipe": recipe.to_dict(),
        "model": {"parameters": parameters, "config": config.to_diff_dict()},
        "data": {"folder": str(corpus.path), **corpus.info},
        "loss": {
            "train_last": losses[-1] if losses else None,
            "heldout": heldout[-1] if heldout else None,
            "heldout_perplexity": math.exp(heldout[-1]) if heldout else None,
        },
        "training": {
            "tokens": recipe.steps * recipe.batch_tokens,
            "epochs": recipe.steps
            * recipe.batch_tokens
            / (corpus.info["tokens"] - corpus.info["heldout_tokens"]),
            "seconds": round(seconds, 1),
        },
        "environment": _environment(processes, dtype),
    }
    for folder in (out / "model", out):
        _replace(folder / "README.md", _readme(card, recipe))
    _replace(out / "card.json", json.dumps(card, indent=1) + "\n")  # last: it says all is there


def _command() -> str:
    program = Path(sys.argv[0]).name
    return shlex.join(["path-attention" if program == "cli.py" else program, *sys.argv[1:]])


def _environment(processes: Processes, dtype: torch.dtype) -> dict[str, Any]:
    import transformers

    import path_attention

    cuda = processes.device.type == "cuda"
    return {
        "path_attention": path_attention.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name()
        if cuda
        else f"CPU ({torch.backends.cpu.get_cpu_capability()})",
        "processes": processes.count,
        "threads": torch.get_num_threads(),
        "precision": str(dtype).removeprefix("torch."),
    }


def _readme(card: dict[str, Any], recipe: Recipe) -> str:
    loss, data, environment = card["loss"], card["data"], card["environment"]
    heldout = (
        "none held out"
        if loss["heldout"] is None
        else f"{loss['heldout']:.4f} nats a token (perplexity {loss['heldout_perplexity']:.2f})"
    )
    rows = {
        "parameters": f"{card['model']['parameters']:,}",
        "encoding": _encoding(recipe.model),
        "context length": f"{recipe.data.context_length} tokens",
        "trained on": f"{card['training']['tokens']:,} tokens, {card['training']['epochs']:.2f} "
        f"epochs of {', '.join(data['recipe']['sources'])}",
        "held-out loss": heldout,
        "held out": f"{data['heldout_documents']} of {data['documents']} documents",
        "made with": ", ".join(f"{name} {value}" for name, value in environment.items()),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [path_attention]
---
# {card["name"]}

A language model trained by `path_attention`.

| | |
|---|---|
{table}

Made by

    {card["command"]}

Use it with

    import path_attention.models  # registers the model with transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
"""


def _encoding(model: ModelRecipe) -> str:
    """The preset, and what else than sizes was chosen."""
    options = ", ".join(f"{name} {value}" for name, value in model.options.items())
    return f"{model.preset} ({options})" if options else model.preset


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)
