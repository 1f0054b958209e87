"""The attention layer written out literally: one matrix a token, one pair of tokens at a time.

    score_ij = scale · k_jᵀ M_{j+1} ⋯ M_i q_i,      Σ log_forget from j+1 to i
    moved value = (M_{j+1} ⋯ M_i)ᵀ v_j

with M_t the token's transport: the identity, a rotation, a product of Householder factors. Nothing
here is shared with the package but the names of parameters and configuration fields.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from path_attention.nn import AttentionConfig


def literal_layer(config: AttentionConfig, p: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
    """The layer with parameters p on whole sequences x `[B, T, hidden_size]`, ids `[B, T]`."""
    return torch.stack([_row(config, p, row, tokens) for row, tokens in zip(x, ids, strict=True)])


def _row(c: AttentionConfig, p: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
    T, HQ, H = len(x), c.num_attention_heads, c.num_key_value_heads
    outputs = []
    q, k, v = (_linear(p, f"{n}_proj", x).unflatten(1, (-1, s)) for n, s in _heads(c))
    if c.qk_norm:
        q, k = _rms(q, p["q_norm.weight"]), _rms(k, p["k_norm.weight"])
    beta = None
    if c.transport in ("householder", "rotary_householder", "delta_rule"):
        logits = _linear(p, "transport.beta_proj", x)
        beta = c.beta_max / (1 + (-logits).exp())
    if c.transport == "delta_rule":
        k = k / k.square().sum(-1, keepdim=True).sqrt()
        v = beta[..., None] * v
    moves = _transport(c, p, x, ids, k, beta)
    gates = _decay(c, p, x)
    for i in range(T):
        for h in range(HQ):
            kv = h // (HQ // H)
            out = _query(c, i, q[:, h], k[:, kv], v[:, kv], moves[:, kv], gates[:, h])
            outputs.append(_rms(out, p["o_norm.weight"]) if c.output_norm else out)
    return _linear(p, "o_proj", torch.stack(outputs).unflatten(0, (T, HQ)).flatten(1))


def _linear(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _query(c: AttentionConfig, i: int, q, k, v, moves, gates) -> Tensor:
    """One query of one head: q, k `[T, D]`, v `[T, DV]`, moves `[T, D, D]`, gates `[T]`."""
    D = q.shape[1]
    route, decay = torch.eye(D, dtype=q.dtype), torch.zeros((), dtype=q.dtype)
    scores, decays, values = [], [], []
    for j in range(i, -1, -1):
        scores.append(k[j] @ route @ q[i] * (c.attention_scale or D**-0.5))
        decays.append(decay)
        values.append(route.T @ v[j] if c.moves_values else v[j])
        route, decay = moves[j] @ route, decay + gates[j]
    if c.normalizer == "softmax":
        weights = [(s + d).exp() for s, d in zip(scores, decays, strict=True)]
        weights = [w / sum(weights) for w in weights]
    elif c.normalizer == "linear":
        weights = [s * d.exp() for s, d in zip(scores, decays, strict=True)]
    else:
        weights, left = [torch.zeros((), dtype=q.dtype)], torch.ones((), dtype=q.dtype)
        for score in scores[1:]:  # the query's own key is left out
            part = 1 / (1 + (-score).exp())
            weights.append(left * part)
            left = left * (1 - part)
    return sum(w * u for w, u in zip(weights, values, strict=True))  # pyright: ignore


def _transport(c: AttentionConfig, p, x: Tensor, ids: Tensor, k: Tensor, beta) -> Tensor:
    """M `[T, H, D, D]`."""
    T, H, D = len(x), c.num_key_value_heads, c.head_dim
    eye = torch.eye(D, dtype=x.dtype)
    if c.transport == "none":
        return eye.expand(T, H, D, D)
    given = c.rope_frequencies or [c.rope_theta ** (-2 * n / D) for n in range(D // 2)]
    angles = torch.tensor(given, dtype=x.dtype)
    if c.transport == "rotary":
        return _turn(angles).expand(T, H, D, D)
    if c.transport == "accumulated_rotation":
        return torch.stack([_turn(-a) for a in _angles(c, p, x, ids).flatten(0, 1)]).unflatten(
            0, (T, H)
        )
    if c.transport == "delta_rule":
        return eye - beta[..., None, None] * k[..., :, None] * k[..., None, :]
    w = _directions(c, p, x)  # [T, H, n, D]
    beta = beta.unflatten(1, (H, -1))
    moves = eye.expand(T, H, D, D)
    for m in range(c.householders_per_token):
        moves = moves @ (
            eye - beta[:, :, m, None, None] * w[:, :, m, :, None] * w[:, :, m, None, :]
        )
    if c.transport == "rotary_householder":  # turned by its place before and after
        turns = [_turn(t * angles) for t in range(-1, T)]
        moves = torch.stack([a.T @ m @ b for a, m, b in zip(turns, moves, turns[1:], strict=False)])
    return moves


def _directions(c: AttentionConfig, p, x: Tensor) -> Tensor:
    if c.direction_rank is None:
        y = x @ p["transport.w_proj.weight"].T
    else:
        y = x @ p["transport.w_proj.0.weight"].T @ p["transport.w_proj.1.weight"].T
    if c.direction_conv_size:
        taps = p["transport.w_conv"]
        rows = []
        for t in range(len(y)):
            rows.append(sum(taps[:, -1 - s] * y[t - s] for s in range(len(taps[0])) if s <= t))
        y = torch.stack(rows)
    y = y / (1 + (-y).exp())
    y = y.unflatten(1, (c.num_key_value_heads, c.householders_per_token, c.head_dim))
    return y / y.square().sum(-1, keepdim=True).sqrt()


def _angles(c: AttentionConfig, p, x: Tensor, ids: Tensor) -> Tensor:
    """θ `[T, H, D/2]`."""
    H, P = c.num_key_value_heads, c.head_dim // 2
    if c.rotation_angles.startswith("learned"):
        if c.rotation_angles == "learned_token":
            u = torch.stack([p["transport.learned.table.weight"][n] for n in ids.tolist()])
        else:
            u = _linear(p, "transport.learned.proj", x) / c.hidden_size
        turns = (u.exp() - (-u).exp()) / (u.exp() + (-u).exp())
        a_step = torch.tensor([c.rope_theta ** (-n / P) for n in range(P)], dtype=x.dtype)
        return math.pi * turns.unflatten(1, (H, P)) - a_step
    keys = ids.tolist() if c.rotation_angles == "random_token" else range(len(x))
    drawn = [[_draw(key, column, c) for column in range(H * P)] for key in keys]
    return torch.tensor(drawn, dtype=x.dtype).unflatten(1, (H, P))


def _draw(key: int, column: int, c: AttentionConfig) -> float:
    row = _mix(_mix(key) ^ _mix(c.rotation_seed + 0x51))
    drawn = _mix(_mix((row + (column + 1) * 0x9E3779B1) % 2**32) ^ _mix(column + 1))
    P = c.head_dim // 2
    bound = c.rotation_bound or c.rope_theta ** (-(column % P) / P)
    return bound * ((drawn + 0.5) / 2**31 - 1)


def _mix(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x21F0AAAD % 2**32
    x = (x ^ (x >> 15)) * 0x735A2D97 % 2**32
    return x ^ (x >> 15)


def _decay(c: AttentionConfig, p, x: Tensor) -> Tensor:
    """log f `[T, HQ]`."""
    if c.decay == "forget":
        logits = _linear(p, "decay.forget_proj", x)
        return -c.forget_scale * torch.log1p((-logits).exp())
    slopes = alibi_slopes(c.num_attention_heads) if c.decay == "alibi" else [0.0]
    return -torch.tensor(slopes, dtype=x.dtype).expand(len(x), c.num_attention_heads)


def alibi_slopes(heads: int) -> list[float]:
    """As the paper's appendix has them, by recursion."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (n + 1) / heads) for n in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(lower) + alibi_slopes(2 * lower)[0::2][: heads - lower]


def _turn(angles: Tensor) -> Tensor:
    """The matrix of a rotation of the pairs (n, n + D/2) by angles `[D/2]`."""
    cos, sin = torch.diag(angles.cos()), torch.diag(angles.sin())
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def _rms(y: Tensor, weight: Tensor) -> Tensor:
    return weight * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _heads(c: AttentionConfig):
    return (("q", c.head_dim), ("k", c.head_dim), ("v", c.value_head_dim))
