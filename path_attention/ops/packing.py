"""Packed sequences: documents behind one another in a batch of one, named by their borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """The borders of packed documents, validated once.

    Validation reads the borders on the host, so building a `Packing` waits for the device; using
    one does not. Build it where the batch is made and hand it to every layer.

    Attributes:
        cu_seqlens: int32 `[N + 1]`, the running sum of lengths: 0 first, the number of tokens last.
        lengths: the N lengths as Python integers; empty documents are allowed.
        total: the number of tokens. A number of its own, so that a compiled step depends on it
            alone and not on each length.
        host_lengths: int64 `[N]` on the CPU, whatever the device of `cu_seqlens`.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    total: int = field(init=False)
    host_lengths: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.lengths))
        object.__setattr__(self, "host_lengths", torch.tensor(self.lengths, dtype=torch.int64))

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Packing:
        """Pack documents of these lengths (in tokens). Raises ValueError on a negative length."""
        lengths = tuple(int(n) for n in lengths)
        if any(n < 0 for n in lengths):
            raise ValueError(f"lengths: expected non-negative integers, got {min(lengths)}")
        borders = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        borders[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        return cls(borders.to(device=device, dtype=torch.int32), lengths)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, total: int | None = None) -> Packing:
        """Validate borders given as a tensor.

        Args:
            cu_seqlens: integer `[N + 1]`; starts at 0, never decreases, ends at `total`.
            total: the number of tokens T that the borders must cover; None skips that check.

        Raises:
            ValueError: naming `cu_seqlens`, what came, and what was expected.
        """
        if not isinstance(cu_seqlens, Tensor):
            raise ValueError(
                f"cu_seqlens: expected a tensor or a Packing, got {type(cu_seqlens).__name__}"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
            raise ValueError(f"cu_seqlens: expected shape [N + 1], got {list(cu_seqlens.shape)}")
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"cu_seqlens: expected int32 or int64, got {cu_seqlens.dtype}")
        borders = cu_seqlens.tolist()
        if borders[0] != 0:
            raise ValueError(f"cu_seqlens: expected to start at 0, got {borders[0]}")
        lengths = tuple(b - a for a, b in pairwise(borders))
        for n, length in enumerate(lengths):
            if length < 0:
                raise ValueError(
                    f"cu_seqlens: expected borders that never decrease, got {borders[n]} then "
                    f"{borders[n + 1]} at index {n + 1}"
                )
        if total is not None and borders[-1] != total:
            raise ValueError(
                f"cu_seqlens: expected to end at T = {total}, the number of tokens, "
                f"got {borders[-1]}"
            )
        return cls(cu_seqlens.to(torch.int32), lengths)

    def to(self, device: torch.device | str) -> Packing:
        """The same packing with `cu_seqlens` on another device."""
        return Packing(self.cu_seqlens.to(device), self.lengths)

    def position_ids(self) -> Tensor:
        """int64 `[T]`: each token's position in its own document."""
        token = torch.arange(self.total, device=self.cu_seqlens.device)
        borders = self.cu_seqlens.to(torch.int64)
        return token - borders[torch.searchsorted(borders, token, right=True) - 1]
