"""Batches and packed documents as groups of equally long, padded, head-major sequences.

docs/algorithm.md §3: each document is a tree of its own; those of as many blocks share a group.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Group(NamedTuple):
    """Sequences that are padded to one length and computed together."""

    rows: Tensor | None  # [n, L] token of the packed batch; None: the batch as it is
    valid: Tensor | None  # [n, L] where rows is not padding
    tokens: int  # T, where rows is None
    length: int  # L, a multiple of block
    block: int
    documents: Tensor | None  # [n] which of the packed ones they are; None: the batch


class Heads(NamedTuple):
    """Head-major inputs; N is sequences × key heads.

    Each token has G rows of queries, one behind the other: the query heads that share its key. So
    it has F rows of w: its factors in their order.
    """

    q: Tensor  # [N, L·G, D]
    k: Tensor  # [N, L, D]
    v: Tensor  # [N, L, DV]
    w: Tensor | None  # [N, L·F, D]
    beta: Tensor | None  # [N, L·F]
    log_forget: Tensor | None  # [N, L, G]


def make_groups(cu_seqlens: Tensor | None, B: int, T: int, unit: int | None) -> list[Group]:
    """Group the sequences by their number of blocks of `unit` tokens.

    No unit: one block is the whole sequence, padded to a multiple of 64 so that few lengths differ.
    """
    if cu_seqlens is None:
        if B * T == 0:
            return []
        block = T if unit is None else min(unit, T)
        return [Group(None, None, T, -(-T // block) * block, block, None)]
    borders = cu_seqlens.tolist()
    step = unit or 64
    documents: dict[int, list[tuple[int, int, int]]] = {}
    for n, (start, stop) in enumerate(pairwise(borders)):
        if stop > start:
            documents.setdefault(-(-(stop - start) // step), []).append((start, stop - start, n))
    groups = []
    for blocks, members in sorted(documents.items()):
        starts, lengths, places = torch.tensor(members, device=cu_seqlens.device).unbind(1)
        length = blocks * step if blocks > 1 else max(n for _, n, _ in members)
        offset = torch.arange(length, device=cu_seqlens.device)
        valid = offset < lengths[:, None]
        rows = (starts[:, None] + offset).where(valid, 0)
        block = length if unit is None or blocks == 1 else unit
        groups.append(Group(rows, valid, T, length, block, places))
    return groups


def to_heads(group: Group, x: Tensor, H: int) -> Tensor:
    """[B, T, H·G, E] → [n·H, L·G, E], padded with zeros: H = I, no decay, scores and lse of 0."""
    if group.rows is not None and group.valid is not None:
        x = x[0][group.rows].where(group.valid[..., None, None], 0)
    elif group.length > group.tokens:
        x = F.pad(x, (0, 0, 0, 0, 0, group.length - group.tokens))
    n, L, heads, E = x.shape
    return x.unflatten(2, (H, heads // H)).transpose(1, 2).reshape(n * H, L * (heads // H), E)


def gather(group: Group, q, k, v, w, beta, log_forget) -> Heads:
    H = k.shape[2]
    G = q.shape[2] // H
    return Heads(
        to_heads(group, q, H),
        to_heads(group, k, H),
        to_heads(group, v, H),
        None if w is None else to_heads(group, w, H),
        None if beta is None else to_heads(group, beta[..., None], H)[..., 0],
        None
        if log_forget is None
        else to_heads(group, log_forget[..., None], H).unflatten(1, (-1, G))[..., 0],
    )


def scatter(group: Group, whole: Tensor, x: Tensor) -> None:
    """Write x `[n·H, L·G, E]` to its tokens of whole `[B, T, H·G, E]`."""
    heads, E = whole.shape[2:]
    G = x.shape[1] // group.length
    x = x.reshape(-1, heads // G, group.length, G, E).transpose(1, 2).flatten(2, 3)
    if group.rows is None or group.valid is None:
        whole.copy_(x[:, : group.tokens])
    else:
        whole[0, group.rows[group.valid]] = x[group.valid]
