"""Layers with parameters: encodings, attention, and the state that decoding keeps."""

from path_attention.nn.attention import Attention
from path_attention.nn.cache import LayerCache
from path_attention.nn.configuration import AttentionConfig
from path_attention.nn.encoding import (
    Chunk,
    Decay,
    Moved,
    Transport,
    register_decay,
    register_transport,
)
from path_attention.nn.normalization import Float32Linear, RMSNorm
from path_attention.nn.normalizer import Normalizer
from path_attention.nn.static_cache import StaticLayerCache

__all__ = [
    "Attention",
    "AttentionConfig",
    "Chunk",
    "Decay",
    "Float32Linear",
    "LayerCache",
    "Moved",
    "Normalizer",
    "RMSNorm",
    "StaticLayerCache",
    "Transport",
    "register_decay",
    "register_transport",
]
