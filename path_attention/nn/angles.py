"""Angles that are learned: how far each token turns the route."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from path_attention.nn.configuration import AttentionConfig
from path_attention.nn.frequencies import Frequencies
from path_attention.nn.normalization import Float32Linear


class AngleTable(nn.Embedding):
    """A row of numbers for each token id, zero at the start."""

    weight_std = 0.0

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class LearnedAngles(nn.Module):
    """The angle of each pair of a key head that a token turns the route by, in float32.

        θ_t = π tanh(u_t) − ω,   u_t = E[token t]               rotation_angles "learned_token"
                                 u_t = (A x_t + a) / width      rotation_angles "learned_state"

    E is zero at the start and A small, so a model starts as RoPE, whose angles a step are ω, and
    any pair can be turned back or by half a turn. What a token's angle changes by reaches every
    pair of tokens that it lies between, in one direction for a whole route. Adam moves a weight by
    up to its rate η a step: an angle of E by π η, and an angle A x_t + a of its own by η ‖x_t‖₁,
    a route of 512 tokens at width 384 and η = 2e-3 then by 50 turns a step. Such a model never
    learns to attend: its angles' gradient is nearly all of the clipped norm (docs/log.md). Hence
    the division by the width, after which A moves u as E does.

    "learned_token" is what arXiv 2606.24975 calls learned token-dependent rotations, by the numbers
    of its author's notes; where angles come from hidden states they learn to tell the place, and
    hold less far. It costs vocab_size · H · D/2 parameters a layer, and no products.
    """

    def __init__(self, config: AttentionConfig, heads: int, pairs: int) -> None:
        super().__init__()
        self.heads, self.pairs, self.width = heads, pairs, config.hidden_size
        self.frequencies = Frequencies(config)
        if config.rotation_angles == "learned_token":
            self.table: AngleTable | None = AngleTable(config.vocab_size, heads * pairs)
        else:
            self.table = None
            self.proj = Float32Linear(config.hidden_size, heads * pairs)

    def forward(self, x: Tensor, token_ids: Tensor | None) -> Tensor:
        """x `[B, T, hidden_size]`, token ids int64 `[B, T]` → θ `[B, T, H, D/2]`, at least float32.

        Raises ValueError without the token ids that a table is read by.
        """
        if self.table is None:
            u = self.proj(x) / self.width
        elif token_ids is None:
            raise ValueError(
                "token_ids: expected int64 [B, T] (a model's input_ids) with rotation_angles "
                "'learned_token', got None"
            )
        else:
            u = self.table(token_ids)
            u = u.to(torch.promote_types(u.dtype, torch.float32))
        turns = u.unflatten(2, (self.heads, self.pairs)).tanh()
        return math.pi * turns - self.frequencies.a_step(self.pairs, turns)
