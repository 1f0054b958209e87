"""The attention layer's cache as a layer of transformers' `Cache`."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import configuration_utils
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from path_attention.nn.cache import LayerCache
from path_attention.nn.cache_units import memory

LAYER_TYPE = "path_attention"
# transformers 5.24 renamed the output, and warns at the old name.
CACHE_NAME = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"

if LAYER_TYPE not in configuration_utils.ALLOWED_ATTN_LAYER_TYPES:
    configuration_utils.ALLOWED_ATTN_LAYER_TYPES += (LAYER_TYPE,)


class PathAttentionCacheLayer(LayerCache, CacheLayerMixin):
    """`LayerCache`, which `DynamicCache(config=…)` and `generate` build for each layer."""

    _layer_type = LAYER_TYPE
    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, unit: int | None = None, **kwargs: Any) -> None:
        LayerCache.__init__(self, unit)
        self.device: torch.device | None = None  # where to come back to, once offloaded

    @property
    def is_initialized(self) -> bool:
        """Whether a chunk was appended."""
        return self.lengths is not None

    def get_seq_length(self) -> int:
        """The number of columns seen, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns seen after a chunk of this length, 0)."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """−1: no limit."""
        return -1

    get_max_cache_shape = get_max_length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate ahead."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> NoReturn:
        """Refused: keys alone don't say how to move the past."""
        raise ValueError("cache: expected path_attention's Attention to extend it, got update()")

    def offload(self) -> None:
        """Take everything to the host."""
        if self.lengths is not None and self.lengths.device.type != "cpu":
            self.device = self.lengths.device
            self.move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Bring everything back to its device."""
        if self.device is not None:
            self.move(self.device)

    def note_moved(self, columns: int) -> None:
        """So many next columns will lie in another order than they came, padding last (`Rows`)."""
        self._moved = (*self._moved, (self.seen, self.seen + columns))

    def nearest_crops(self, length: int) -> tuple[int, int]:
        """As in `LayerCache`; none where padding has moved, since tokens lie elsewhere there."""
        below, above = super().nearest_crops(length)
        for start, stop in reversed(self._moved):
            if start < below < stop:
                below = super().nearest_crops(start)[0]
        for start, stop in self._moved:
            if start < above < stop:
                above = super().nearest_crops(stop)[1]
        return below, above

    def check_crop(self, length: int) -> None:
        """Raise ValueError, naming the nearest lengths, where `keep` can't do this one."""
        for start, stop in self._moved:
            if start < length < stop:
                below, above = self.nearest_crops(length)
                raise ValueError(
                    f"length: expected {below} or {above}, the nearest that can be taken back to: "
                    f"padding among columns {start} to {stop} has moved; got {length}"
                )
        super().check_crop(length)

    def keep(self, length: int) -> None:
        """Keep the first `length` columns: `LayerCache.crop`.

        Raises ValueError where a sealed unit would have to be undone, or where padding has moved.
        """
        super().crop(length)
        self._moved = tuple(columns for columns in self._moved if columns[1] <= length)

    def reset(self) -> None:
        """Forget everything."""
        self._moved: tuple[tuple[int, int], ...] = ()
        super().reset()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Drop the last −tokens_to_remove columns, as transformers counts; `keep` the others.

        Raises ValueError on a number above 0, and as `keep`.
        """
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(
                "tokens_to_remove: expected at most 0, minus the number of tokens to drop, "
                f"got {tokens_to_remove}"
            )
        if self.seen:
            self.keep(max(0, self.seen + tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row n becomes what row beam_idx[n] was, in all state."""
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row; sealed units are shared, not repeated."""
        if self.lengths is not None:
            rows = torch.arange(len(self.lengths), device=self.lengths.device)
            self.select(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.select(indices)


def layer_caches(cache: Cache, layers: int) -> list[PathAttentionCacheLayer]:
    """The caches of a model's layers; an empty `DynamicCache()` is filled with them.

    Raises ValueError on a cache of another kind or number of layers.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"cache: expected a transformers Cache, got {type(cache).__name__}")
    if not cache.layers and cache.layer_class_to_replicate is not None:
        cache.layers.extend(PathAttentionCacheLayer() for _ in range(layers))
        cache.layer_class_to_replicate = None
    ours = [layer for layer in cache.layers if isinstance(layer, PathAttentionCacheLayer)]
    if len(ours) != len(cache.layers) or len(ours) != layers:
        raise ValueError(
            f"cache: expected DynamicCache(config=model.config) of {layers} layers, got {cache}"
        )
    return ours


def fork_cache(cache: Cache) -> Cache:
    """Another cache of the same past; both share every sealed unit: `LayerCache.fork`.

    Raises ValueError on a cache of another kind.
    """
    other = copy.copy(cache)
    layers: list[Any] = [layer.fork() for layer in layer_caches(cache, len(cache.layers))]
    other.layers = layers
    return other


def crop_cache(cache: Cache, length: int) -> None:
    """Keep the first `length` columns of every layer, or of none if one can't.

    Raises ValueError naming the nearest lengths that it can do.
    """
    layers = layer_caches(cache, len(cache.layers))
    for layer in layers:
        layer.check_crop(length)
    for layer in layers:
        layer.keep(length)


def cache_bytes(cache: Cache) -> int:
    """Bytes that a cache's tensors take, free room included and shared ones counted once."""
    return memory(layer_caches(cache, len(cache.layers)))
