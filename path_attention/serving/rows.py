"""One step of many sequences that each have a cache of their own, of any length.

Projections and MLPs run over all rows at once, attention row by row. The number of rows is always a
multiple of `TILE`: with fewer, matrix libraries take other kernels, and elementwise loops leave
whole vectors for their last elements, both of which round differently; a row's results would then
depend on how many others there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from path_attention.models.cache import CACHE_NAME, PathAttentionCacheLayer, layer_caches
from path_attention.nn.cache import LayerCache
from path_attention.nn.encoding import Chunk, Record

TILE = 32  # rows; elements come by twice a vector of 16


class RowsLayer(PathAttentionCacheLayer):
    """A layer's caches of several sequences, as one cache of rows; lives for one step.

    A row has its own number of new tokens; what follows them in the chunk is padding, of which no
    cache learns.
    """

    _layer_type = None  # `DynamicCache` goes on with the layer of one cache

    def __init__(
        self, rows: Sequence[LayerCache], counts: Sequence[int], lengths: Tensor, size: int
    ) -> None:
        """rows: one cache without padding each; counts: their new tokens; lengths: int64 `[size]`,
        what each has seen; size: rows of the batch, of which those beyond `rows` are padding."""
        super().__init__()
        self.rows, self.counts, self.size = rows, counts, size
        self.lengths, self.seen = lengths, max(row.seen for row in rows)
        self.before = self._join_records()

    def _join_records(self) -> dict[str, Tensor]:
        known = {name: x for row in self.rows for name, x in row.before.items()}
        joined = {}
        for name, like in known.items():
            each = [row.before.get(name, torch.zeros_like(like)) for row in self.rows]
            each += [torch.zeros_like(like)] * (self.size - len(each))
            joined[name] = torch.cat([x.to(like.dtype) for x in each])
        return joined

    def attend(self, *args: Tensor | None, scale: float, chunk: Chunk) -> Tensor:
        """As `LayerCache.attend`, row by row."""
        return self._each(LayerCache.attend, args, scale, chunk)

    def extend_stick_breaking(self, *args: Tensor | None, scale: float, chunk: Chunk) -> Tensor:
        """As `LayerCache.extend_stick_breaking`, row by row."""
        return self._each(LayerCache.extend_stick_breaking, args, scale, chunk)

    def extend_linear(self, *args: Tensor | None, scale: float, chunk: Chunk) -> Tensor:
        """As `LayerCache.extend_linear`, row by row."""
        return self._each(LayerCache.extend_linear, args, scale, chunk)

    def _each(
        self,
        method: Callable[..., Tensor],
        args: Sequence[Tensor | None],
        scale: float,
        chunk: Chunk,
    ) -> Tensor:
        out: Tensor | None = None
        for n, (row, count) in enumerate(zip(self.rows, self.counts, strict=True)):
            # Copies: where in memory a row lies must not matter either, and to libraries it does.
            own = [None if x is None else x[n : n + 1, :count].clone() for x in args]
            result = method(row, *own, scale=scale, chunk=_row_of(chunk, row, n, count))
            if out is None:
                out = result.new_zeros(*chunk.positions.shape, *result.shape[2:])
            out[n, :count] = result[0]
        assert out is not None
        return out


def _row_of(chunk: Chunk, row: LayerCache, n: int, count: int) -> Chunk:
    def cut(x: Tensor) -> Tensor:
        return x[n : n + 1, :count]

    ids = None if chunk.token_ids is None else cut(chunk.token_ids)
    records = {name: Record(cut(values), kept) for name, (values, kept) in chunk.records.items()}
    return Chunk(cut(chunk.positions), ids, before=row.before, records=records)


@torch.no_grad()
def step_rows(
    model: PreTrainedModel, caches: Sequence[Cache], tokens: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Append tokens to each sequence, one at least.

    Args:
        caches: of one row each, extended in place.
        tokens: of each, any number.

    Returns:
        Next-token logits after each of them, `[count, V]` a sequence.
    """
    counts = [len(row) for row in tokens]
    size, width = -(-len(caches) // TILE) * TILE, max(counts)
    padded = [[*row, *[0] * (width - len(row))] for row in tokens]
    padded += [[0] * width] * (size - len(padded))
    ids = torch.tensor(padded, device=model.device)
    every = [layer_caches(cache, len(cache.layers)) for cache in caches]
    lengths = [layers[0].seen for layers in every] + [0] * (size - len(every))
    seen = torch.tensor(lengths, device=model.device)
    joined: Any = Cache(
        layers=[RowsLayer(rows, counts, seen, size) for rows in zip(*every, strict=True)]
    )
    logits = model(ids, **{CACHE_NAME: joined}).logits
    return [logits[n, :count] for n, count in enumerate(counts)]
