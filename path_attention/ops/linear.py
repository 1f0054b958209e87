"""PaTH without the softmax: a state recurrence, by its definition, token by token, and by blocks.

docs/algorithm.md §8. The products of factors are `path_attention`'s, so blocks are solved by the
same UT transform; what was a tree of units is a state that goes from block to block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops import ut_transform
from path_attention.ops.arguments import (
    cast_as_autocast_does,
    check_packing,
    check_tensors,
    unit_directions,
)
from path_attention.ops.definition import apply_factors
from path_attention.ops.packing import Packing
from path_attention.ops.sequences import Group, Heads, gather, make_groups, scatter

BLOCK = 64
_LOWEST_LOG_FORGET = -1e30  # as good as −∞, and its sums stay finite


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    beta: Tensor | None = None,
    log_forget: Tensor | None = None,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal linear attention whose queries travel to each key through Householder factors.

        S_t = f_t S_{t−1} H_t + v_t k_tᵀ,   o_t = scale · S_t q_t,   f_t = exp(log_forget_t)
            = scale · Σ_{j≤t} (Π_{s=j+1..t} f_s) (k_jᵀ H_{j+1} ⋯ H_t q_t) v_j      (S_0 = 0)

    `path_attention` with its softmax taken away; H_t as there, with n factors a token too. With
    w = k of unit norm and v scaled by β it is DeltaNet (arXiv 2406.06484), with gates Gated
    DeltaNet (arXiv 2412.06464); without w, gated linear attention with a gate a head.
    docs/algorithm.md §8.

    Args:
        q, k, v, w, beta, log_forget, scale: as in `path_attention`.
        state: S before the first token, `[B, HQ, DV, D]`, or `[N, HQ, DV, D]` for N packed
            documents; float32 (float64 for float64 inputs). None for zeros.
        cu_seqlens: borders of packed documents (B = 1), `[N + 1]` integers or a `Packing`; each has
            a state of its own.
        implementation: "definition" (literal, quadratic in T; the oracle), "recurrent" (token by
            token: the least memory and work for a few tokens) or "chunked" (blocks of 64 tokens;
            linear memory). None is "recurrent" for a single token, else "chunked". All run on any
            device; their gradients are autograd's, of every order.

    Returns:
        `[B, T, HQ, DV]` in q's dtype, and the state after the last token, shaped and typed as
        `state` is.

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    q, k, v = cast_as_autocast_does(q, k, v)
    check_tensors(q, k, v, w, beta, log_forget)
    packing = check_packing(q, cu_seqlens)
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    if implementation is None:
        implementation = "recurrent" if q.shape[1] == 1 else "chunked"
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {sorted(_IMPLEMENTATIONS)} or None, "
            f"got {implementation!r}"
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    state = _check_state(state, q, k, v, packing, dtype)
    if q.numel() == 0:
        out = q.sum(-1, keepdim=True).expand(-1, -1, -1, v.shape[3])
        return out, state.flatten(1, 2)
    with torch.autocast(q.device.type, enabled=False):
        w = unit_directions(w)
        if w is not None and beta is not None and w.dim() == 4:
            w, beta = w[:, :, :, None], beta[..., None]
        if log_forget is not None:
            log_forget = log_forget.to(dtype).clamp(min=_LOWEST_LOG_FORGET)
        tensors = [None if x is None else x.to(dtype) for x in (q, k, v, w, beta, log_forget)]
        out, state = _IMPLEMENTATIONS[implementation](*tensors, scale, state, packing)
    return out.to(q.dtype), state.flatten(1, 2)


def _check_state(
    state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dtype
) -> Tensor:
    """The state before the first token, [N, H, G, DV, D]."""
    H, HQ, N = k.shape[2], q.shape[2], q.shape[0] if packing is None else len(packing.lengths)
    shape = (N, HQ, v.shape[3], q.shape[3])
    if state is None:
        state = q.new_zeros(shape, dtype=dtype)
    if state.shape != shape:
        raise ValueError(f"state: expected shape {list(shape)}, got {list(state.shape)}")
    if state.dtype != dtype:
        raise ValueError(f"state: expected dtype {dtype}, got {state.dtype}")
    if state.device != q.device:
        raise ValueError(f"state: expected on q's device {q.device}, got {state.device}")
    return state.unflatten(1, (H, HQ // H))


# --- One document after the other ----------------------------------------------------------------

_Sequence = Callable[..., tuple[Tensor, Tensor]]


def _each_document(run: _Sequence) -> _Sequence:
    """An implementation for a batch of sequences as one for packed documents too."""

    def call(q, k, v, w, beta, log_forget, scale, state, packing):
        if packing is None:
            return run(q, k, v, w, beta, log_forget, scale, state)
        lengths = packing.lengths
        split = [
            [None] * len(lengths) if x is None else x.split(lengths, 1)
            for x in (q, k, v, w, beta, log_forget)
        ]
        documents = zip(*split, state.split(1), strict=True)
        parts = [run(*x, scale, before) for *x, before in documents]
        return torch.cat([out for out, _ in parts], 1), torch.cat([after for _, after in parts])

    return call


@_each_document
def _definition(q, k, v, w, beta, log_forget, scale, state) -> tuple[Tensor, Tensor]:
    """Every pair of tokens by itself, O(T²·D); w `[B, T, H, n, D]`, state `[B, H, G, DV, D]`."""
    (B, T, HQ, D), (H, G) = q.shape, state.shape[1:3]
    if T == 0:
        return q.new_zeros(B, 0, HQ, v.shape[3]), state
    q = q.unflatten(2, (H, G))  # [B, T, H, G, D]
    moved = q[:, T:]  # queries i > j, moved by H_{j+1} ⋯ H_i
    decay = q.new_zeros(B, 0, H, G)  # and their Σ log f
    rest = torch.eye(D, dtype=q.dtype, device=q.device)  # H_{j+1} ⋯ H_T, a column like a query
    rest = rest[:, None, None].expand(B, D, H, 1, D)
    out, after = torch.zeros((), dtype=q.dtype, device=q.device), torch.zeros_like(state)
    for j in range(T - 1, -1, -1):
        moved = torch.cat([q[:, j : j + 1], moved], 1)
        decay = torch.cat([q.new_zeros(B, 1, H, G), decay], 1)
        score = decay.exp() * (moved * k[:, j, None, :, None]).sum(-1)
        part = score[..., None] * v[:, j, None, :, None]
        out = out + F.pad(part, (0, 0, 0, 0, 0, 0, j, 0))
        key = (k[:, j, None, :, None] * rest).sum(-1)  # k_jᵀ H_{j+1} ⋯ H_T, [B, D, H, 1]
        kept = decay[:, -1, :, :, None, None].exp()
        after = after + kept * v[:, j, :, None, :, None] * key.permute(0, 2, 3, 1)[:, :, :, None]
        if w is not None and beta is not None:
            moved = apply_factors(moved, w[:, j], beta[:, j])
            rest = apply_factors(rest, w[:, j], beta[:, j])
        if log_forget is not None:
            decay = decay + log_forget[:, j, None].unflatten(2, (H, G))
    out = out + decay.exp()[..., None] * torch.einsum("bhged,bihgd->bihge", state, moved)
    kept = decay[:, -1, :, :, None, None].exp()
    after = after + kept * torch.einsum("bhged,bchxd->bhgec", state, rest)
    return scale * out.flatten(2, 3), after


@_each_document
def _recurrent(q, k, v, w, beta, log_forget, scale, state) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token; w `[B, T, H, n, D]`, state `[B, H, G, DV, D]`."""
    HQ, (H, G) = q.shape[2], state.shape[1:3]
    q = q.unflatten(2, (H, G))
    out = []
    for t in range(q.shape[1]):
        if log_forget is not None:
            state = state * log_forget[:, t].exp().unflatten(1, (H, G))[..., None, None]
        if w is not None and beta is not None:
            for n in range(w.shape[3]):  # S H_{t,1} ⋯ H_{t,n}
                w_n = w[:, t, :, None, n, :, None]  # [B, H, 1, D, 1]
                along = beta[:, t, :, None, n, None, None] * (state @ w_n)
                state = state - along * w_n.mT
        state = state + v[:, t, :, None, :, None] * k[:, t, :, None, None, :]
        out.append(scale * (state @ q[:, t, ..., None])[..., 0])
    return _stack(out, q, v, HQ), state


def _stack(out: list[Tensor], q: Tensor, v: Tensor, HQ: int) -> Tensor:
    """[B, H, G, DV] of each token → [B, T, HQ, DV]."""
    if out:
        return torch.stack(out, 1).flatten(2, 3)
    return q.new_zeros(q.shape[0], 0, HQ, v.shape[3])


# --- Blocks --------------------------------------------------------------------------------------


def _chunked(q, k, v, w, beta, log_forget, scale, state, packing) -> tuple[Tensor, Tensor]:
    """Blocks of 64 tokens; w `[B, T, H, n, D]`, state `[N, H, G, DV, D]`."""
    B, T, HQ, _ = q.shape
    out, after = q.new_empty(B, T, HQ, v.shape[3]), state
    if w is not None and beta is not None:
        w, beta = w.flatten(2, 3), beta.flatten(2, 3)
    cu_seqlens = None if packing is None else packing.cu_seqlens
    for group in make_groups(cu_seqlens, B, T, BLOCK):
        x = gather(group, q, k, v, w, beta, log_forget)
        before = state if group.documents is None else state[group.documents]
        part, last = _chunked_group(group, x, scale, before.flatten(0, 1))
        scatter(group, out, part)
        last = last.unflatten(0, before.shape[:2])
        places = group.documents
        after = last if places is None else after.index_copy(0, places, last)
    return out, after


def _chunked_group(group: Group, x: Heads, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """Output `[N, L·G, DV]` and last state `[N, G, DV, D]` of one group, from its first states."""
    n, G = group.block, state.shape[1]
    blocks = group.length // n
    q, k, v = (y.unflatten(1, (blocks, -1)) for y in (x.q, x.k, x.v))
    w, beta, log_forget = (
        None if y is None else y.unflatten(1, (blocks, -1)) for y in (x.w, x.beta, x.log_forget)
    )
    block = ut_transform.solve(q, k, w, beta)
    inside = ut_transform.weigh(block, log_forget) @ v
    q, k, transition = ut_transform.move(block)
    q = q.unflatten(2, (n, G)).transpose(2, 3)  # [N, U, G, n, D]
    values = v[:, :, None].mT  # [N, U, 1 or G, DV, n]
    kept = None
    if log_forget is not None:
        log_forget = log_forget.mT  # [N, U, G, n]
        from_start = log_forget.cumsum(-1)
        after = F.pad(log_forget[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
        q = q * from_start.exp()[..., None]
        values = values * after.exp()[..., None, :]
        kept = from_start[..., -1, None, None].exp()  # [N, U, G, 1, 1]
    added = values @ k[:, :, None]  # [N, U, 1 or G, DV, D]
    before = []
    for u in range(q.shape[1]):
        before.append(state)
        if transition is not None:
            state = state @ transition[:, u, None]
        if kept is not None:
            state = state * kept[:, u]
        state = state + added[:, u]
    across = q @ torch.stack(before, 1).mT  # [N, U, G, n, DV]
    out = scale * (inside + across.transpose(2, 3).flatten(2, 3))
    return out.flatten(1, 2), state


_IMPLEMENTATIONS: dict[str, _Sequence] = {
    "definition": _definition,
    "recurrent": _recurrent,
    "chunked": _chunked,
}
