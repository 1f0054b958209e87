"""Tiny random models of transformers, one of each family and of each kind of RoPE."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_biased": {"model_type": "llama", "attention_bias": True, "head_dim": 8},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 6},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_untied": {"model_type": "qwen2", "rms_norm_eps": 1e-5},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0], "num_attention_heads": 4},
}
_SHORT = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", **_SHORT},
    "dynamic": {"rope_type": "dynamic", **_SHORT},
    "yarn": {"rope_type": "yarn", **_SHORT},
    "llama3": {
        "rope_type": "llama3",
        **_SHORT,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "rope_type": "longrope",
        **_SHORT,
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 8.0],
    },
}


def make_teacher(family: str, **fields: Any) -> Any:
    """A model in evaluation mode, no weight at its start."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**_SIZES, **FAMILIES[family], **fields})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    return model
