"""Find and load a model that was trained or saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def model_folder(path: str | Path) -> Path:
    """The folder with the model's `config.json`: `path` itself, or a run's `path/model`.

    Raises ValueError if there is neither.
    """
    path = Path(path)
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(f"model: expected a run's or a model's folder with config.json, got {path}")


def choose_device(device: str) -> str:
    """A device's name; "auto" takes a GPU where there is one. Raises ValueError naming it."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device: expected one that is here, got {device!r} ({str(error).splitlines()[0]})"
        ) from error
    return device


def hide_loading_bars() -> None:
    """Hide transformers' bars over weights and files that are at hand; downloads keep theirs."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    hidden = are_progress_bars_disabled()
    disable_progress_bar()
    if not hidden:
        enable_progress_bars()


def load_model(path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a causal language model from a run's or a model's folder, in evaluation mode.

    Keyword arguments go to `from_pretrained`. Raises ValueError on a folder that holds none, whose
    files are damaged, or that lacks weights.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    import path_attention.models  # noqa: F401

    folder = model_folder(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, output_loading_info=True, **kwargs
        )
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"model: expected undamaged files in {folder}, got {error}") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"model: expected every weight in {folder}, {len(missing)} lack, as {missing[0]}"
        )
    return model.eval()


def load_model_on(path: str | Path, dtype: str, device: str) -> PreTrainedModel:
    """`load_model` in a dtype ("float32", …), on a device of `choose_device`."""
    device = choose_device(device)
    return load_model(path, dtype=getattr(torch, dtype)).to(device)  # pyright: ignore[reportArgumentType]


def load_tokenizer(
    path: str | Path, model: PreTrainedModel | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside a model, and check that it fits the model's embedding.

    Raises ValueError if there is none, or if it has more tokens than the embedding has rows.
    """
    from transformers import AutoTokenizer

    folder = model_folder(path)
    if not (folder / "tokenizer_config.json").is_file():
        raise ValueError(f"model: expected a tokenizer in {folder}, got no tokenizer_config.json")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if model is not None and len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"tokenizer: expected at most the model's {model.config.vocab_size} tokens, "
            f"got {len(tokenizer)}"
        )
    return tokenizer
