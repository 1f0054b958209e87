"""Language models for transformers. Importing this package registers them with its Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from path_attention.models.cache import PathAttentionCacheLayer, crop_cache, fork_cache
from path_attention.models.configuration import PathAttentionConfig
from path_attention.models.loading import load_model, load_tokenizer, model_folder
from path_attention.models.modeling import (
    PathAttentionForCausalLM,
    PathAttentionModel,
    PathAttentionPreTrainedModel,
)
from path_attention.models.prefix_store import PrefixStore
from path_attention.models.presets import PRESETS
from path_attention.models.static_cache import StaticPathCache, StepGraph

AutoConfig.register(PathAttentionConfig.model_type, PathAttentionConfig, exist_ok=True)
AutoModel.register(PathAttentionConfig, PathAttentionModel, exist_ok=True)
AutoModelForCausalLM.register(PathAttentionConfig, PathAttentionForCausalLM, exist_ok=True)

__all__ = [
    "PRESETS",
    "PathAttentionCacheLayer",
    "PathAttentionConfig",
    "PathAttentionForCausalLM",
    "PathAttentionModel",
    "PathAttentionPreTrainedModel",
    "PrefixStore",
    "StaticPathCache",
    "StepGraph",
    "crop_cache",
    "fork_cache",
    "load_model",
    "load_tokenizer",
    "model_folder",
]
