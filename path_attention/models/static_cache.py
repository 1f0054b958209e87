"""A model's cache of fixed size, and its steps as CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from path_attention.models.cache import CACHE_NAME, PathAttentionCacheLayer
from path_attention.nn.static_cache import StaticLayerCache
from path_attention.ops.decode import triton_lacks

if TYPE_CHECKING:
    from path_attention.models.configuration import PathAttentionConfig
    from path_attention.models.modeling import PathAttentionForCausalLM


class StaticPathCacheLayer(StaticLayerCache, PathAttentionCacheLayer):
    """`StaticLayerCache` as a layer of transformers' `Cache`."""

    _layer_type = None  # `DynamicCache` goes on with the layer that grows

    def __init__(self, room: int, unit: int | None = None, *, croppable: bool = True) -> None:
        StaticLayerCache.__init__(self, room, unit, croppable=croppable)
        self.device: torch.device | None = None

    @property
    def is_croppable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As transformers asks before it takes drafts back."""
        return self.croppable

    def get_max_length(self) -> int:
        """The tokens that there is room for."""
        return self.room

    get_max_cache_shape = get_max_length


class StaticPathCache(Cache):
    """Room for `room` tokens in each layer, allocated once: what `generate` builds for
    `cache_implementation="static"`.

    A prompt goes in as into any cache. From then on, single tokens without gradients are CUDA
    graphs on a GPU: the first step of a batch runs as it is, the second one is captured, all others
    replay it. A captured step reads no mask: every token of it is real. Softmax attention on NVIDIA
    GPUs only.
    """

    def __init__(self, config: PathAttentionConfig, room: int, *, croppable: bool = True) -> None:
        """croppable: whether tokens can be taken back, which takes memory (`StaticLayerCache`);
        drafts need it."""
        layers = range(config.num_hidden_layers)
        super().__init__(layers=[StaticPathCacheLayer(room, croppable=croppable) for _ in layers])
        self._graph: StepGraph | None = None
        self._ready: tuple[object, ...] | None = None  # what a step ran for as it is

    def step(self, model: PathAttentionForCausalLM, ids: Tensor) -> Tensor | None:
        """Logits `[B, 1, vocab_size]` of one more token a row by a graph; None if there is none.

        There is none before a step has run as it is, and again after rows or tensors changed.
        """
        layers = [layer for layer in self.layers if isinstance(layer, StaticPathCacheLayer)]
        if ids.device.type != "cuda" or any(layer.state is None for layer in layers):
            return None
        if layers[0].seen >= layers[0].room:
            raise ValueError(
                f"cache: expected room for {layers[0].seen + 1} tokens, got {layers[0].room}"
            )
        now = (id(model), len(ids), *(layer.placed for layer in layers))
        if now != self._ready:
            self._ready, self._graph = now, None
            return None
        if self._graph is None:
            self._graph = StepGraph(model, self, ids)
        return self._graph.replay(ids)

    def reset(self) -> None:
        """Forget everything."""
        self._graph = self._ready = None
        super().reset()


def steps_lack(model: PathAttentionForCausalLM) -> str | None:
    """What a model would need for steps as CUDA graphs of a static cache; None if it has it."""
    if model.device.type != "cuda":
        return f"an NVIDIA GPU, got {model.device.type}"
    for n in range(model.config.num_hidden_layers):
        layer = model.config.of_layer(n)
        if layer.normalizer != "softmax":
            return f"the normalizer softmax, got {layer.normalizer}"
        like = torch.empty(1, 1, 1, 0, device=model.device, dtype=model.dtype)
        sizes: Any = (layer.head_dim, layer.value_head_dim)
        lacks = triton_lacks(*(like.new_empty(1, 1, 1, size) for size in sizes))
        if lacks is not None:
            return lacks
    return None


class StepGraph:
    """One step of a model on a static cache that has settled, captured and replayed.

    Attributes:
        logits: of the last replay, `[B, T, vocab_size]`, overwritten by the next one.
    """

    def __init__(
        self, model: PathAttentionForCausalLM, cache: StaticPathCache, ids: Tensor
    ) -> None:
        """Capture a step for token ids `[B, T]`; a step of this shape must have run before."""
        self.layers = [x for x in cache.layers if isinstance(x, StaticPathCacheLayer)]
        self.ids = ids.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            hidden = model.model(input_ids=self.ids, **{CACHE_NAME: cache}).last_hidden_state
            self.logits = model.lm_head(hidden)
        for layer in self.layers:
            layer.seen -= ids.shape[1]  # nothing ran yet

    def replay(self, ids: Tensor) -> Tensor:
        """Logits of a step for these ids; shared with the next step's."""
        self.ids.copy_(ids)
        self.graph.replay()
        for layer in self.layers:
            layer.seen += ids.shape[1]
        return self.logits
