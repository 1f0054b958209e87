"""Padded batches: real tokens are moved to each row's left once, and back at the end.

Below the model everything sees rows whose padding only follows their real tokens: causal attention
then needs no mask, and convolutions run over neighbours that are real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from path_attention.nn.cache_units import KEPT
from path_attention.ops.packing import Packing


@dataclass(frozen=True)
class Rows:
    """How the real tokens lie in a padded batch.

    Attributes:
        valid: bool `[B, T]`, True for the real tokens after compaction; None without padding.
        order: int64 `[B, T]`, where each compacted column comes from; None if nothing moves.
        end: where the last column with padding ends, if it goes into a cache and anything moves.
    """

    valid: Tensor | None = None
    order: Tensor | None = None
    end: int | None = None

    @classmethod
    def of(
        cls, x: Tensor, attention_mask: Tensor | None, packing: Packing | None, *, seen: int | None
    ) -> Rows:
        """From a mask over x `[B, T, …]`, or over `seen` columns of a cache and x.

        With a cache (`seen` given), a mask without padding is none: attention to the past is faster
        and the cache smaller without, which is worth a look at the mask.
        Raises ValueError on a mask of another shape, or one together with packing.
        """
        B, T = x.shape[:2]
        if packing is not None and (B != 1 or packing.total != T):
            raise ValueError(f"packing: expected a batch [1, {packing.total}], got {[B, T]}")
        if attention_mask is None:
            return cls()
        if packing is not None:
            raise ValueError("attention_mask: expected None with packed documents, got a tensor")
        shapes = [[B, T], [B, (seen or 0) + T]]
        if list(attention_mask.shape) not in shapes:
            raise ValueError(
                f"attention_mask: expected {' or '.join(map(str, shapes[: 1 + bool(seen)]))}, "
                f"got {list(attention_mask.shape)}"
            )
        past = seen if seen is not None and attention_mask.shape[1] != T else 0
        real = attention_mask[:, past:].bool().to(x.device)
        if seen is not None and real.all():
            return cls()
        if T == 1 or (seen is not None and not (real[:, 1:] > real[:, :-1]).any()):
            return cls(real)
        order = (~real).to(torch.int8).argsort(dim=1, stable=True)
        end = None if seen is None else int((~real).any(0).nonzero()[-1]) + 1
        return cls(real.gather(1, order), order, end)

    def cut(self, length: int) -> int:
        """Where a chunk of so many columns is cut: its last `KEPT`, if all padding ends before.

        So a cache can take them back column by column: in a compacted row the last tokens lie
        before its padding, which would go first.
        """
        return length if self.end is None else max(self.end, length - KEPT)

    def compact(self, x: Tensor) -> Tensor:
        """x `[B, T]` or `[B, T, C]` with each row's real tokens first, in their order."""
        if self.order is None:
            return x
        order = self.order if x.dim() == 2 else self.order[..., None].expand_as(x)
        return x.gather(1, order)

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of `compact`, of x `[B, T, C]`."""
        if self.order is None:
            return x
        back = self.order.to(x.device).argsort(1)  # the last layer may be on another device
        return x.gather(1, back[..., None].expand_as(x))

    def check_positions(self, position_ids: Tensor, positions: Tensor) -> None:
        """Raise ValueError unless `position_ids` `[B or 1, T]` of real tokens are `positions`."""
        shapes = [list(positions.shape), [1, positions.shape[1]]]
        if list(position_ids.shape) not in shapes:
            raise ValueError(f"position_ids: expected {shapes[0]}, got {list(position_ids.shape)}")
        given = position_ids.to(positions.device).expand_as(positions)
        if self.order is not None:
            given = given.gather(1, self.order)
        differ = given != positions
        if self.valid is not None:
            differ = differ & self.valid
        if differ.any():
            raise ValueError(
                "position_ids: expected each row's running count of real tokens, got others; name "
                "packed documents by packing"
            )


def in_two(
    run: Callable[..., Any],
    x: Tensor,
    others: tuple[Tensor | None, ...],
    mask: Tensor,
    cut: int,
    seen: int,
    told: tuple[Any, ...],
) -> Any:
    """Outputs of a chunk's columns up to `Rows.cut`, and of the rest, as those of one chunk.

    run: takes `Rows`, a part of x `[B, T, …]` and of the others `[B or 1, T]`, and `told`.
    """
    parts = []
    for columns in (slice(0, cut), slice(cut, x.shape[1])):
        given = (None if y is None else y[:, columns] for y in others)
        real = mask[:, -x.shape[1] :][:, columns]
        rows = Rows.of(x[:, columns], real, None, seen=seen + columns.start)
        parts.append(run(rows, x[:, columns], *given, *told))
    first, whole = parts
    whole.last_hidden_state = torch.cat([first.last_hidden_state, whole.last_hidden_state], 1)
    if whole.hidden_states is not None:
        layers = zip(first.hidden_states, whole.hidden_states, strict=True)
        whole.hidden_states = tuple(torch.cat(states, 1) for states in layers)
    return whole
