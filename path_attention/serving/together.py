"""Several prompts read as one batch: who can be, and how their caches come apart again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from path_attention.models.cache import CACHE_NAME, layer_caches
from path_attention.nn.cache_units import KEPT


def suit(sizes: Sequence[int], size: int, unit: int, most: int) -> bool:
    """Whether prompts with so many tokens left can be read with one of `size`, padded alike.

    They end in the same unit: behind its start a cache takes the padding back that follows the
    shorter ones. Padded they are at most `most` tokens.
    """
    longest, shortest = max(*sizes, size), min(*sizes, size)
    sealed = max(0, longest - KEPT) // unit * unit
    return shortest >= max(1, sealed) and longest * (len(sizes) + 1) <= most


@torch.no_grad()
def read_together(
    model: PreTrainedModel, cache: Cache, rests: Sequence[Sequence[int]]
) -> list[Cache]:
    """Append the rest of each prompt to what all of them start with.

    Args:
        cache: of one row, without padding, that ends at a border or is empty; used up.
        rests: token ids of each, of lengths that `suit`.

    Returns:
        The cache of each prompt, which shares with the others what they start with.
    """
    start, width = cache.get_seq_length(), max(map(len, rests))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rests])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rests])
    if start:
        cache.batch_repeat_interleave(len(rests))
    more = {} if mask.all() else {"attention_mask": mask.to(model.device)}
    model(ids.to(model.device), **{CACHE_NAME: cache}, logits_to_keep=1, **more)
    layers = layer_caches(cache, len(cache.layers))
    return [
        Cache(layers=[layer.row(n, start + len(row)) for layer in layers])
        for n, row in enumerate(rests)
    ]
