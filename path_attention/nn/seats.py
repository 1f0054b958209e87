"""Rows of a model's static caches, each of which a sequence takes in all layers at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from path_attention.nn.cache import LayerCache, lay
from path_attention.nn.cache_storage import Buffers, lasting
from path_attention.nn.static_cache import StaticLayerCache
from path_attention.ops.decode import DecodeState

_ALIGNED = 512  # bytes: where a layer's part of a tensor may begin


class Seats:
    """Rows of static caches, of which each tensor is a part of one for all layers that are alike.

    A sequence's caches are joined over the layers before they are copied: as many launches as one
    layer takes, which is what the time goes to. Rows differ in length, which the layers' `seen`
    doesn't tell: the caller minds the room.
    """

    def __init__(self, layers: Sequence[StaticLayerCache], rows: int) -> None:
        """Give layers that have settled with one row so many rows, all of them empty.

        Raises ValueError on caches whose tokens can be taken back, or that have not settled.
        """
        for layer in layers:
            if layer.croppable:
                raise ValueError(
                    "layers: expected caches made with croppable=False to seat rows, "
                    "got croppable=True"
                )
        alike: dict[object, list[int]] = {}
        for n, layer in enumerate(layers):
            alike.setdefault(_sizes(layer), []).append(n)
        self._layers = layers
        self._parts = [_Part([layers[n] for n in some], some, rows) for some in alike.values()]

    def seat(self, row: int, sources: Sequence[LayerCache]) -> None:
        """Make a row what a cache of one row has seen in each layer, which stays as it is.

        Raises ValueError on sources of several rows or with padding, and where they are too long.
        """
        for layer, source in zip(self._layers, sources, strict=True):
            rows = 1 if source.lengths is None else len(source.lengths)
            if rows != 1 or source.has_padding or source.seen > layer.room:
                raise ValueError(
                    f"sources: expected one row of at most {layer.room} tokens without padding, "
                    f"got {rows} of {source.seen} columns"
                )
        with lasting():
            for part in self._parts:
                part.seat(row, [sources[n] for n in part.places])

    def forget(self, rows: Sequence[int]) -> None:
        """Rows are empty again."""
        for layer in self._layers:
            layer.seen = 0
        for part in self._parts if rows else ():
            part.state["seen"][:, list(rows)] = 0


class _Part:
    """Layers whose tensors are of the same sizes.

    Attributes:
        places: which layers of all.
        state, before: their tensors by name, `[layers, rows, …]`.
    """

    def __init__(self, layers: Sequence[StaticLayerCache], places: list[int], rows: int) -> None:
        self.places = places
        self._like = _settled(layers[0])
        self.state = _rooms(self._like.tensors(), len(layers), rows)
        self.before = _rooms(layers[0].before, len(layers), rows)
        for n, layer in enumerate(layers):
            state, before = (
                {name: x[n] for name, x in y.items()} for y in (self.state, self.before)
            )
            layer.lie_in(self._like._replace(**state), before)

    def seat(self, row: int, sources: Sequence[LayerCache]) -> None:
        views = {name: x[:, row] for name, x in self.state.items()}
        for x in views.values():  # what another left is no number, if it failed
            x.zero_()
        lay(sources, self._like._replace(**views))
        for name, x in self.before.items():
            known = [source.before[name] for source in sources if name in source.before]
            x[:, row] = torch.cat(known) if known else 0


def _settled(layer: StaticLayerCache) -> DecodeState:
    if layer.state is None:
        raise ValueError("layers: expected caches that have settled, got one without its tensors")
    return layer.state


def _sizes(layer: StaticLayerCache) -> object:
    tensors: Any = (*_settled(layer).tensors().items(), *sorted(layer.before.items()))
    return layer.kind, layer.unit, *((name, x.shape[1:], x.dtype) for name, x in tensors)


def _rooms(like: Buffers, layers: int, rows: int) -> dict[str, Tensor]:
    """Zeros `[layers, rows, …]` for tensors `[1, …]`; each layer's begins where it is aligned."""
    rooms = {}
    for name, x in like.items():
        size, unit = rows * x[0].numel(), max(1, _ALIGNED // x.itemsize)
        flat = x.new_zeros(layers, math.ceil(size / unit) * unit)
        rooms[name] = flat[:, :size].unflatten(1, (rows, *x.shape[1:]))
    return rooms
