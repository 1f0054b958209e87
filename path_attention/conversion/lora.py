"""Low-rank updates of a model's matrices, by peft, that are merged where the model is exported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "default"  # peft's, of an adapter


@dataclass(frozen=True, kw_only=True)
class LoraRecipe:
    """W + (alpha / rank) B A in place of W (arXiv 2106.09685).

    Attributes:
        rank: rows of A.
        alpha: of the factor.
        matrices: last part of the names of what is updated.
    """

    rank: int = 16
    alpha: float = 32.0
    matrices: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank: expected at least 1, got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"alpha: expected a number above 0, got {self.alpha}")

    def course(self) -> dict[str, Any]:
        """What numbers hang on, flat."""
        return {"lora.rank": self.rank, "lora.alpha": self.alpha, "lora.matrices": self.matrices}


def check_peft() -> None:
    """Raise ValueError if peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "trainable: expected peft to be installed for 'lora' (`pip install '.[convert]'`), "
            f"got {error}"
        ) from error


def add_adapters(model: nn.Module, recipe: LoraRecipe, seed: int) -> None:
    """Put adapters into a model in place; A is drawn by `seed`, B is 0.

    Raises ValueError if peft is not installed or a matrix is not there.
    """
    check_peft()
    from peft import LoraConfig, inject_adapter_in_model

    device = next(model.parameters()).device
    torch.manual_seed(seed)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=list(recipe.matrices),
    )
    inject_adapter_in_model(config, model, adapter_name=_NAME)
    model.to(device)
    if not any(".lora_A." in name for name, _ in model.named_parameters()):
        raise ValueError(f"matrices: expected names of the model's, got {recipe.matrices}")


def merge_adapters(state: dict[str, Tensor], recipe: LoraRecipe) -> dict[str, Tensor]:
    """A whole state with adapters as that of the model without, their updates added."""
    merged: dict[str, Tensor] = {}
    for name, value in state.items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        prefix = re.sub(r"base_layer\.weight$", "", name)
        a, b = (state.get(f"{prefix}lora_{part}.{_NAME}.weight") for part in "AB")
        if name.endswith("base_layer.weight") and a is not None and b is not None:
            value = value + (recipe.alpha / recipe.rank) * (b @ a).to(value)
        merged[plain] = value
    return merged
