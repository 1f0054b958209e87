"""A recipe's model, made, started and spread over the processes of a run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig

from path_attention.models import (
    PRESETS,
    PathAttentionConfig,
    PathAttentionForCausalLM,
    load_model,
    model_folder,
)
from path_attention.training.flops import ModelFlops, attention_size
from path_attention.training.objective import Objective
from path_attention.training.processes import Processes, spread
from path_attention.training.recipe import ModelRecipe, Recipe


def build_model(
    recipe: Recipe,
    config: PathAttentionConfig,
    dtype: torch.dtype,
    processes: Processes,
    objective: Objective | None = None,
    made: nn.Module | None = None,
) -> tuple[nn.Module, ModelFlops, int]:
    """The model ready to train, what it computes, and the number of its parameters.

    Args:
        recipe: of the run.
        config: of the model.
        dtype: of its matrix products.
        processes: of the run.
        objective: of the run; prepares the model before it is compiled and spread.
        made: the model on the device, made elsewhere; None makes it by the recipe.

    Raises:
        ValueError: what `recipe.model.start` holds, or a start on the meta device beside it.
    """
    meta = recipe.initialisation == "meta"
    torch.manual_seed(recipe.seed)
    if made is not None:
        model = made
    elif recipe.model.start is not None:
        model = _load_start(recipe, config)
    else:
        with torch.device("meta" if meta else "cpu"):
            model = cast(nn.Module, PathAttentionForCausalLM(config))
    parameters = sum(p.numel() for p in model.parameters())
    if recipe.fused:
        from path_attention.training.fused import use_fused_kernels

        use_fused_kernels(model, processes.device)
    if objective is not None:
        if not meta:
            model = model.to(processes.device)
        objective.prepare(model, recipe, processes, dtype)
    flops = (objective or Objective()).flops(model, attention_size(config))
    if recipe.activation_checkpointing:
        old = cast(Any, model).gradient_checkpointing_enable  # its name until transformers 5.24
        getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
    if recipe.compile is not None:
        for block in cast(Any, model).model.layers:
            block.compile(backend=recipe.compile)
    if not meta:
        model = model.to(processes.device)
    elif recipe.parallel != "fsdp" or processes.count == 1:
        initialise(model.to_empty(device=processes.device), config, recipe.seed)
    compiled = recipe.compile is not None
    model = spread(model, recipe.parallel, processes, dtype, compiled=compiled)
    if any(p.is_meta for p in model.parameters()):
        initialise(model.to_empty(device=processes.device), config, recipe.seed)
    return model, flops, parameters


def start_config(recipe: ModelRecipe) -> PathAttentionConfig:
    """The configuration of the model that a run starts from.

    Raises ValueError if it is no model of this library or has another encoding than the preset.
    """
    folder = model_folder(cast(Path, recipe.start))
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if not isinstance(config, PathAttentionConfig):
        raise ValueError(
            f"model.start: expected a model of this library in {folder}, got {config.model_type!r}"
        )
    expected = PRESETS.get(recipe.preset)
    if expected is None:
        raise ValueError(f"preset: expected one of {sorted(PRESETS)}, got {recipe.preset!r}")
    transport = {"rotary_householder": "householder"}.get(config.transport, config.transport)
    found = {"transport": transport, "decay": config.decay, "normalizer": config.normalizer}
    wanted = {"normalizer": "softmax", **expected}
    if any(wanted[name] != value for name, value in found.items()):
        raise ValueError(
            f"model.start: expected the encoding of preset {recipe.preset!r} in {folder}, "
            f"got {found}"
        )
    return config


def start_digest(folder: Path) -> str:
    """Hash of a model's configuration and of its weights' sizes and both ends (a mebibyte each)."""
    total = hashlib.sha256()
    for path in sorted(model_folder(folder).iterdir()):
        if path.suffix == ".safetensors":
            size = path.stat().st_size
            total.update(f"{path.name}\0{size}\n".encode())
            with open(path, "rb") as file:
                total.update(file.read(1 << 20))
                file.seek(max(0, size - (1 << 20)))
                total.update(file.read())
        elif path.name == "config.json":
            total.update(path.read_bytes())
    return total.hexdigest()


def _load_start(recipe: Recipe, config: PathAttentionConfig) -> nn.Module:
    if recipe.initialisation == "meta":
        raise ValueError(
            f'initialisation: expected "whole" with model.start = {recipe.model.start}, got "meta"'
        )
    start = cast(Path, recipe.model.start)
    return load_model(start, config=config, dtype=torch.float32).train()


@torch.no_grad()
def initialise(model: nn.Module, config: PathAttentionConfig, seed: int) -> None:
    """Start a model whose parameters are there and hold nothing yet, spread (DTensors) or not.

    Each module's own parameters are drawn whole on this process's device, by (seed, the module's
    name), then cut: the same model under any number of processes, and no more memory than one
    module's on top.
    """
    cast(Any, model).tie_weights()
    device = next(model.parameters()).device
    with torch.device("meta"):
        twin = cast(Any, PathAttentionForCausalLM(config))
    seen: set[int] = set()
    todo = []
    for name, module in twin.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        if own:
            todo.append((name, module))
    for name, module in todo:
        module.to_empty(device=device, recurse=False)
        torch.manual_seed(_mixed(seed, name))
        twin._init_weights(module)
        for key, drawn in module.named_parameters(recurse=False):
            _copy(model.get_submodule(name).get_parameter(key), drawn)
        module.to(device="meta")


def _copy(parameter: nn.Parameter, drawn: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        part = distribute_tensor(drawn, mesh, placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(drawn)


def _mixed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
