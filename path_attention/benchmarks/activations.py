"""What a trained model hands the operator, layer by layer: captured, saved, loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from path_attention.benchmarks.inputs import Inputs, names_used_by
from path_attention.nn.attention import Attention
from path_attention.nn.encoding import Moved
from path_attention.nn.normalizer import Softmax


def activations_of(
    model_folder: Path, text: Path, tokens: int, device: torch.device
) -> list[Inputs]:
    """The operator's inputs in each layer of a model that reads a text.

    Args:
        model_folder: a run's or a model's folder, with its tokenizer.
        text: a file in UTF-8.
        tokens: the most tokens to read.
        device: where the model runs, in float32.

    Raises:
        ValueError: if the model has no layer of ours, or the text has no token.
    """
    from path_attention.models.loading import load_model, load_tokenizer

    loaded: Any = load_model(model_folder)
    model = loaded.float().to(device)
    tokenizer: Any = load_tokenizer(model_folder, model)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0:
        raise ValueError(f"text: expected a file with text, got an empty one, {text.name}")
    return capture(model, ids[:, :tokens].to(device))


def capture(model: nn.Module, input_ids: Tensor) -> list[Inputs]:
    """The operator's inputs in each `Attention` of a model, on these tokens `[B, T]`.

    Raises ValueError if there is none, or one whose operator is another.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise ValueError(f"model: expected layers of ours, got {type(model).__name__} without any")
    for layer in layers:
        if not isinstance(layer.normalizer, Softmax):
            name = type(layer.normalizer).__name__
            raise ValueError(f"model: expected layers with a softmax, got {name}")
    seen: list[Inputs] = []

    def keep(module: nn.Module, arguments: tuple[Moved, Tensor | None]) -> None:
        moved, log_forget = arguments
        seen.append(Inputs(moved.q, moved.k, moved.v, moved.w, moved.beta, log_forget))

    hooks = [layer.normalizer.register_forward_pre_hook(keep) for layer in layers]
    try:
        with torch.no_grad():
            model(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def save_activations(path: str | os.PathLike[str], layers: Sequence[Inputs]) -> None:
    """Write them as safetensors, each named "LAYER.NAME", NAME as in `path_attention`."""
    from safetensors.torch import save_file

    tensors = {
        f"{n}.{name}": x.detach().cpu().contiguous()
        for n, layer in enumerate(layers)
        for name, x in zip(names_used_by("path_fox"), layer[:6], strict=True)
        if x is not None
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def load_activations(path: str | os.PathLike[str], device: torch.device) -> list[Inputs]:
    """Read what `save_activations` wrote. Raises ValueError on any other file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"activations: expected safetensors, got {error}") from error
    layers: dict[int, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        n, _, which = name.partition(".")
        if not n.isdecimal() or which not in names_used_by("path_fox"):
            raise ValueError(f"activations: expected tensors named LAYER.NAME, got {name!r}")
        layers.setdefault(int(n), {})[which] = x.to(device)
    return [_inputs(n, layers[n]) for n in sorted(layers)]


def _inputs(n: int, tensors: Mapping[str, Tensor]) -> Inputs:
    lacking = {"q", "k", "v"} - set(tensors)
    if lacking or ("w" in tensors) != ("beta" in tensors):
        raise ValueError(f"activations: expected a layer's inputs, got {sorted(tensors)} of {n}")
    return Inputs(*(tensors.get(name) for name in names_used_by("path_fox")))  # type: ignore[arg-type]
