"""Kernels that reading prompts takes, compiled before anybody waits for them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from path_attention.models.cache import CACHE_NAME, crop_cache, fork_cache, layer_caches
from path_attention.serving.together import read_together

_SIZES = (5, 20, 50, 100)  # of pieces, one for each size of a kernel's tiles


@torch.no_grad()
def read_every_kind(model: PreTrainedModel) -> None:
    """Read pieces of each kind: from nothing, a kept prefix, and behind a tail; alone and together.

    Kernels are compiled for each kind when it first comes, which takes seconds.
    """

    def read(cache: Cache, count: int) -> None:
        ids = torch.zeros(1, count, dtype=torch.int64, device=model.device)
        model(ids, **{CACHE_NAME: cache}, logits_to_keep=1)

    begun = DynamicCache(config=model.config)
    read(begun, 1)
    unit = max(64, *(layer.unit for layer in layer_caches(begun, len(begun.layers))))
    tails = []
    for length in (unit + 64, unit + 65):  # of a tail whose length 16 divides, and of another
        tails.append(DynamicCache(config=model.config))
        read(tails[-1], length)
    kept = fork_cache(tails[0])
    crop_cache(kept, unit)
    for size in _SIZES:
        for cache in (kept, *tails):
            read(fork_cache(cache), size)
        for cache in (DynamicCache(config=model.config), fork_cache(kept)):
            read_together(model, cache, [[0] * size, [0] * (size - 1)])
