"""Queries that find one key each, if every swap on the way is exact."""

from __future__ import annotations

import torch
from operator_cases import Inputs
from torch import Tensor


def swapped_inputs(T: int, *, heads: tuple[int, int], D: int) -> tuple[Inputs, Tensor]:
    """Float32 inputs with β = 2 and w = (e_a − e_b)/√2, and the key that each query attends.

    Keys are random signs. Query i is its target's key with the swaps between them applied, so its
    score with the target is scale·D and with the others far less (about scale·√D). Values are
    random signs too: with a large scale the output's signs are the target's. The targets,
    `[1, T, HQ]`, are any tokens up to the query.
    """
    HQ, H = heads
    k, v = (torch.randint(2, (1, T, H, D)).float() * 2 - 1 for _ in range(2))
    target = (torch.rand(1, T, HQ) * (torch.arange(T) + 1)[:, None]).long()
    a = torch.randint(D, (T, H))
    b = (a + torch.randint(1, D, (T, H))) % D
    # place[i, h, c]: where swaps 1 … i take coordinate c, so H_i ⋯ H_1 x has x[c] there.
    place, now = [], torch.arange(D).repeat(H, 1)
    for i in range(T):
        x, y = a[i][:, None], b[i][:, None]
        now = torch.where(now == x, y, torch.where(now == y, x, now))
        place.append(now)
    of_head = torch.arange(HQ) // (HQ // H)
    places = torch.stack(place)[:, of_head]  # [T, HQ, D]
    heads_of_target = of_head.expand(T, HQ)
    there = torch.stack(place)[target[0], heads_of_target]
    keys = k[0][target[0], heads_of_target]
    q = torch.zeros(T, HQ, D).scatter(2, places, keys.gather(2, there))
    w = (
        torch.zeros(T, H, D)
        .scatter(2, a[..., None], 0.5**0.5)
        .scatter(2, b[..., None], -(0.5**0.5))
    )
    return Inputs(q[None], k, v, w[None], torch.full((1, T, H), 2.0), None), target
