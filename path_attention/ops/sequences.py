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


class Heads(NamedTuple):
    """Head-major inputs; N is sequences × key heads, G the query heads of a key head."""

    q: Tensor  # [N, G, L, D]
    k: Tensor  # [N, L, D]
    v: Tensor  # [N, L, DV]
    w: Tensor | None  # [N, L, D]
    beta: Tensor | None  # [N, L]
    log_forget: Tensor | None  # [N, G, L]


def make_groups(cu_seqlens: Tensor | None, B: int, T: int, unit: int | None) -> list[Group]:
    """Group the sequences by their number of blocks of `unit` tokens.

    No unit: one block is the whole sequence, padded to a multiple of 64 so that few lengths differ.
    """
    if cu_seqlens is None:
        if B * T == 0:
            return []
        block = T if unit is None else min(unit, T)
        return [Group(None, None, T, -(-T // block) * block, block)]
    borders = cu_seqlens.tolist()
    step = unit or 64
    documents: dict[int, list[tuple[int, int]]] = {}
    for start, stop in pairwise(borders):
        if stop > start:
            documents.setdefault(-(-(stop - start) // step), []).append((start, stop - start))
    groups = []
    for blocks, members in sorted(documents.items()):
        starts, lengths = torch.tensor(members, device=cu_seqlens.device).unbind(1)
        length = blocks * step if blocks > 1 else max(n for _, n in members)
        offset = torch.arange(length, device=cu_seqlens.device)
        valid = offset < lengths[:, None]
        rows = (starts[:, None] + offset).where(valid, 0)
        block = length if unit is None or blocks == 1 else unit
        groups.append(Group(rows, valid, T, length, block))
    return groups


def to_heads(group: Group, x: Tensor, G: int) -> Tensor:
    """[B, T, H·G, E] → [n·H, G, L, E], padded with zeros: H = I, no decay, scores and lse of 0."""
    if group.rows is None or group.valid is None:
        if group.length > group.tokens:
            x = F.pad(x, (0, 0, 0, 0, 0, group.length - group.tokens))
    else:
        x = x[0][group.rows].where(group.valid[..., None, None], 0)
    n, L, HG, E = x.shape
    return x.transpose(1, 2).reshape(n * HG // G, G, L, E)


def gather(group: Group, q, k, v, w, beta, log_forget) -> Heads:
    G = q.shape[2] // k.shape[2]
    return Heads(
        to_heads(group, q, G),
        to_heads(group, k, 1)[:, 0],
        to_heads(group, v, 1)[:, 0],
        None if w is None else to_heads(group, w, 1)[:, 0],
        None if beta is None else to_heads(group, beta[..., None], 1)[:, 0, :, 0],
        None if log_forget is None else to_heads(group, log_forget[..., None], G)[..., 0],
    )


def scatter(group: Group, whole: Tensor, x: Tensor) -> None:
    """Write x `[n·H, (G,) L(, E)]` to its tokens of whole `[B, T, heads, E]`."""
    E = whole.shape[3]
    n = whole.shape[0] if group.rows is None else group.rows.shape[0]
    x = x.reshape(n, -1, group.length, E).transpose(1, 2)  # [n, L, heads, E]
    if group.rows is None or group.valid is None:
        whole.copy_(x[:, : group.tokens])
    else:
        whole[0, group.rows[group.valid]] = x[group.valid]
