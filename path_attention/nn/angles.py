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

    def resize(self, rows: int) -> None:
        """Keep the first rows; new ones are zero."""
        kept, old = min(rows, self.num_embeddings), self.weight
        new = old.new_zeros(rows, self.embedding_dim)
        new[:kept] = old.detach()[:kept]
        self.weight = nn.Parameter(new, requires_grad=old.requires_grad)
        self.num_embeddings = rows


class LearnedAngles(nn.Module):
    """The angle of each pair of a key head that a token turns the route by, in float32.

        θ_t = π tanh(u_t) − ω,   u_t = E[token t]               rotation_angles "learned_token"
                                 u_t = (A x_t + a) / width      rotation_angles "learned_state"

    E is zero at the start and A small: a model starts as RoPE, whose angle a step is ω
    (`Frequencies`). What a token's angle changes by adds up along a route, and reaches every pair
    of tokens that it lies between. Adam moves a weight by up to its rate η a step, an angle of E
    thus by π η, but an angle A x_t + a by η ‖x_t‖₁: a route of 512 tokens, at width 384 and
    η = 2e-3, by 50 turns a step. Such a model does not learn to attend, and its angles' gradient is
    nearly all of the norm that is clipped. Hence the division by the width: A moves u as E does.

    arXiv 2606.24975 says no more than that angles depend on tokens. The form of "learned_token" is
    that of its author's notes (mahesh-godavarti/slotbasedembeddings, experiments/pos_agnostic),
    where angles of hidden states learn to tell the place, too, and hold less far. A table costs
    vocab_size · H · D/2 parameters a layer, and no products.
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
