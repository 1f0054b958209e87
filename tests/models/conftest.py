"""Small models whose choices are far from ties, so that greedy paths compare token for token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from path_attention.models import PRESETS, PathAttentionConfig, PathAttentionForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "direction_rank": 8,
    "value_head_dim": 12,
    "qk_norm": True,
    "pad_token_id": 0,
}


@pytest.fixture
def make_model() -> Callable[..., PathAttentionForCausalLM]:
    """make_model(preset, dtype=…, **overrides): a model in evaluation mode, weights N(0, 0.2)."""

    def make(
        preset: str = "path_fox", *, dtype: torch.dtype = torch.float32, **overrides
    ) -> PathAttentionForCausalLM:
        torch.manual_seed(0)
        sizes: dict = {**SIZES, "initializer_range": 0.2}
        if PRESETS[preset].get("moves_values"):
            sizes["value_head_dim"] = None
        config = PathAttentionConfig.from_preset(preset, **{**sizes, **overrides})
        return PathAttentionForCausalLM(config).to(dtype).eval()

    return make
