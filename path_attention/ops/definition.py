"""The literal definition of PaTH attention: the oracle that every implementation is held to.

It shares no algebra with the fast implementations: one Householder factor is applied at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from path_attention.ops.packing import Packing


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    scale: float,
    packing: Packing | None,
) -> tuple[Tensor, Tensor]:
    """Literal PaTH attention (arXiv 2505.16381 §3; docs/algorithm.md §1), O(T²·D) a head.

        A_ij = scale · k_jᵀ H_{j+1} ⋯ H_i q_i + Σ_{t=j+1..i} log_forget_t,  H_t = I − β_t w_t w_tᵀ
        o_i  = Σ_{j≤i} softmax_j(A_ij) v_j,      lse_i = log Σ_{j≤i} exp A_ij

    (H_t = H_{t,1} ⋯ H_{t,n} with n factors a token.)

    Arguments as in `path_attention`, validated there; gradients by autograd. Computes in float32,
    or float64 for float64 inputs; `out` comes in q's dtype, `lse` in the computing dtype.
    """
    if packing is not None:
        lengths = packing.lengths or (0,)
        split = [
            [None] * len(lengths) if x is None else x.split(lengths, 1)
            for x in (q, k, v, w, beta, log_forget)
        ]
        parts = [
            definition(q, k, v, w, beta, log_forget, scale, None)
            for q, k, v, w, beta, log_forget in zip(*split, strict=True)
        ]
        return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)

    out_dtype = q.dtype
    dtype = torch.promote_types(out_dtype, torch.float32)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    B, T, HQ, _ = q.shape
    H = k.shape[2]
    if T == 0:
        return v.repeat_interleave(HQ // H, 2).to(out_dtype), q.sum(-1)
    q = q.unflatten(2, (H, HQ // H))  # [B, T, H, G, D]

    moved = q[:, T:]  # queries i > j, moved by H_{j+1} ⋯ H_i
    decay = q.new_zeros(B, 0, H, HQ // H)
    columns: list[Tensor] = []
    for j in range(T - 1, -1, -1):
        moved = torch.cat([q[:, j : j + 1], moved], 1)  # [B, T - j, H, G, D]
        decay = torch.cat([q.new_zeros(B, 1, H, HQ // H), decay], 1)
        score = scale * (moved * k[:, j, None, :, None]).sum(-1) + decay
        columns.append(torch.nn.functional.pad(score, (0, 0, 0, 0, j, 0), value=-torch.inf))
        if w is not None and beta is not None:
            moved = apply_factors(moved, w[:, j].to(dtype), beta[:, j].to(dtype))
        if log_forget is not None:
            decay = decay + log_forget[:, j, None].to(dtype).unflatten(2, (H, HQ // H))
    scores = torch.stack(columns[::-1], -1)  # [B, T, H, G, T]
    out = torch.einsum("bihgj,bjhe->bihge", scores.softmax(-1), v)
    return out.flatten(2, 3).to(out_dtype), scores.logsumexp(-1).flatten(2, 3)


def apply_factors(x: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """H_t x of one token: x `[B, ·, H, G, D]`; w `[B, H, D]` or, of n factors, `[B, H, n, D]`."""
    if w.dim() == 3:
        w, beta = w[:, :, None], beta[:, :, None]
    for n in range(w.shape[2] - 1, -1, -1):
        w_n, beta_n = w[:, None, :, n, None], beta[:, None, :, n, None, None]
        x = x - beta_n * (x * w_n).sum(-1, keepdim=True) * w_n
    return x
