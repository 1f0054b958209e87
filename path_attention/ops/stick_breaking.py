"""Stick-breaking attention: each key breaks its share off what the keys after it left.

docs/algorithm.md §9. The stick is broken from the query backwards, so one walk over the keys from
the diagonal to the left does it, with one running sum a query: the log of what remains.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops.arguments import (
    cast_as_autocast_does,
    check_packing,
    check_tensors,
    has_kernels,
)
from path_attention.ops.gradients import refuse_tangents, register_gradients
from path_attention.ops.packing import Packing
from path_attention.ops.sequences import make_groups, scatter, to_heads

_TILE = 128  # tokens of queries and of keys whose scores are held at once
_TRITON_HEAD_SIZE = 128  # half that in float32: tiles must fit the smallest shared memory


def stick_breaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Stick-breaking attention: no softmax, no position encoding, and recency by itself.

        s_ij = scale · q_i·k_j,    A_ij = σ(s_ij) Π_{j<m<i} (1 − σ(s_im)),    j < i
        o_i  = Σ_{j<i} A_ij v_j,   log_remaining_i = Σ_{j<i} log(1 − σ(s_ij))

    A token does not attend itself (the paper's form), so a document's first output is zero. What no
    key took, exp(log_remaining_i) = 1 − Σ_j A_ij, is the past's: keys before those given would add
    exp(log_remaining_i) times their own output. Source: arXiv 2410.17980 §3; docs/algorithm.md §9.

    Args:
        q: queries `[B, T, HQ, D]`, bfloat16, float16, float32 or float64.
        k: keys `[B, T, H, D]`, q's dtype; HQ is a multiple of H (grouped heads).
        v: values `[B, T, H, DV]`, q's dtype; DV need not be D.
        scale: of the scores; None is D^-½.
        cu_seqlens: borders of packed documents (B = 1), `[N + 1]` integers or a `Packing`.
        implementation: "definition" (literal, quadratic memory; the oracle), "blockwise" (linear
            memory, any device) or "triton" (fast; NVIDIA GPUs of compute capability 8.0 or more,
            head sizes up to 128, or 64 in float32; not float64). None is "triton" where it can
            run, else "blockwise". All of them repeat bit for bit.

    Returns:
        `[B, T, HQ, DV]` in q's dtype, and log_remaining `[B, T, HQ]` in float32 (float64 for
        float64 inputs), at most 0. Both are differentiable (once, but for "definition").

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    q, k, v = cast_as_autocast_does(q, k, v)
    check_tensors(q, k, v)
    packing = check_packing(q, cu_seqlens)
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    name = choose(implementation, q, v)
    if name != "definition":
        refuse_tangents(f"stick-breaking's {name}", q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        return _IMPLEMENTATIONS[name](q, k, v, scale, packing)


def choose(implementation: str | None, q: Tensor, v: Tensor) -> str:
    """The implementation's name; ValueError if it does not exist or can not run."""
    if implementation is None:
        usable = has_kernels("stick_breaking_attention", q, lambda: _triton_lacks(q, v))
        return "triton" if usable else "blockwise"
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {sorted(_IMPLEMENTATIONS)} or None, "
            f"got {implementation!r}"
        )
    lacks = _triton_lacks(q, v) if implementation == "triton" else None
    if lacks is not None:
        raise ValueError(f"implementation: expected {lacks} with 'triton'")
    return implementation


def _triton_lacks(q: Tensor, v: Tensor) -> str | None:
    """What the Triton kernels would need and what came instead; None if they can run."""
    if q.dtype == torch.float64:
        return f"bfloat16, float16 or float32, got {q.dtype}"
    D, DV = q.shape[3], v.shape[3]
    most = _TRITON_HEAD_SIZE // 2 if q.dtype == torch.float32 else _TRITON_HEAD_SIZE
    if max(D, DV) > most:
        return f"head sizes of at most {most} in {q.dtype}, got D = {D} and DV = {DV}"
    from path_attention.ops.triton.device import device_lacks

    return device_lacks(q.device.type, q.device.index)


# --- The definition ------------------------------------------------------------------------------


def _definition(
    q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing | None
) -> tuple[Tensor, Tensor]:
    """One key at a time breaks its share off; float32, or float64 for float64 inputs."""
    if packing is not None:
        documents = zip(*(x.split(packing.lengths or (0,), 1) for x in (q, k, v)), strict=True)
        parts = [_definition(q, k, v, scale, None) for q, k, v in documents]
        return torch.cat([o for o, _ in parts], 1), torch.cat([r for _, r in parts], 1)
    out_dtype = q.dtype
    dtype = torch.promote_types(out_dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    (T, HQ), H = q.shape[1:3], k.shape[2]
    q = q.unflatten(2, (H, HQ // H))  # [B, T, H, G, D]
    out, log_remaining = q[..., :1] * v[:, :, :, None] * 0, q.sum(-1) * 0
    remaining = torch.ones_like(log_remaining)
    for j in range(T - 2, -1, -1):
        score = scale * (q[:, j + 1 :] * k[:, j, None, :, None]).sum(-1)  # of queries i > j
        share = score.sigmoid() * remaining[:, j + 1 :]
        rows = (0, 0, 0, 0, j + 1, 0)
        out = out + F.pad(share[..., None] * v[:, j, None, :, None], (0, 0, *rows))
        log_remaining = log_remaining + F.pad(F.logsigmoid(-score), rows)
        remaining = remaining * F.pad((-score).sigmoid(), rows, value=1.0)  # 1 − σ(s) = σ(−s)
    return out.flatten(2, 3).to(out_dtype), log_remaining.flatten(2, 3)


# --- Tiles of keys, from the diagonal to the left -------------------------------------------------


def _blockwise(
    q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing | None
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    borders = None if packing is None else packing.cu_seqlens
    out, log_remaining = _forward(*(x.to(dtype) for x in (q, k, v)), scale, borders)
    return out.to(q.dtype), log_remaining


def _triton(
    q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing | None
) -> tuple[Tensor, Tensor]:
    from path_attention.ops.triton.stick_breaking import triton_stick_breaking

    return triton_stick_breaking(q, k, v, scale, packing)


_IMPLEMENTATIONS = {"definition": _definition, "blockwise": _blockwise, "triton": _triton}


@torch.library.custom_op("path_attention::stick_breaking", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, T, H, DV = v.shape
    G = q.shape[2] // H
    out, log_remaining = q.new_empty(B, T, q.shape[2], DV), q.new_empty(q.shape[:3])
    for group in make_groups(cu_seqlens, B, T, None):
        heads = [to_heads(group, x, H) for x in (q * scale, k, v)]
        part, rest = walk(*heads, G=G)
        scatter(group, out, part)
        scatter(group, log_remaining[..., None], rest)
    return out, log_remaining


@_forward.register_fake
def _(q, k, v, scale, cu_seqlens):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])


@torch.library.custom_op("path_attention::stick_breaking_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_rest: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_remaining: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, _ = v.shape
    G = q.shape[2] // H
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    if grad_rest is None:
        grad_rest = torch.zeros_like(log_remaining)
    with torch.autocast(q.device.type, enabled=False):
        delta = (grad_out * out).sum(-1, keepdim=True)
        inputs = (q * scale, k, v, grad_out, delta, grad_rest[..., None])
        for group in make_groups(cu_seqlens, B, T, None):
            parts = walk_backward(*(to_heads(group, x, H) for x in inputs), G=G)
            for grad, part in zip(grads, parts, strict=True):
                scatter(group, grad, part)
        grads[0] *= scale
    return grads[0], grads[1], grads[2]


@_backward.register_fake
def _(grad_out, grad_rest, q, k, v, out, log_remaining, scale, cu_seqlens):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


register_gradients(_forward, _backward, "stick-breaking's blockwise")


class _Shares(NamedTuple):
    """A tile of scores [N, rows, columns]; zero where the key is not before the query."""

    beta: Tensor  # σ(s): what a key takes of what is left to it
    left: Tensor  # what is left to it
    total: Tensor  # [N, rows, 1] −log of what the whole tile leaves


def _tile(q: Tensor, k: Tensor, taken: Tensor, distance: int, G: int) -> _Shares:
    """taken `[N, rows, 1]` is −log of what the keys after the tile left.

    distance: the tile's first query token less its first key token.
    """
    scores = q @ k.mT
    taking = F.softplus(scores, threshold=60.0)  # −log(1 − σ); float64 feels exp(−s) up to s = 37
    logits = F.logsigmoid(scores)
    if distance < k.shape[1]:
        queries, keys = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
        unseen = keys >= queries[:, None] // G + distance
        taking = taking.masked_fill_(unseen, 0)
        logits = logits.masked_fill_(unseen, -torch.inf)
    after = F.pad(taking[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)  # by the keys behind each
    return _Shares(logits.exp_(), (after + taken).neg_().exp_(), taking.sum(-1, keepdim=True))


def _tiles(queries: int, keys: int, before: int):
    """Tokens of queries, then tokens of the keys that they see, the nearest tile first."""
    for start in range(0, queries, _TILE):
        rows = slice(start, min(start + _TILE, queries))
        stop = min(before + rows.stop, keys)
        seen = [slice(n, min(n + _TILE, stop)) for n in range(0, stop, _TILE)]
        yield rows, seen[::-1]


def walk(q: Tensor, k: Tensor, v: Tensor, *, G: int, before: int = 0) -> tuple[Tensor, Tensor]:
    """Queries break their sticks over keys, head by head.

    Args:
        q: `[N, L·G, D]`, scaled.
        k, v: `[N, K, D]`, `[N, K, DV]`.
        G: rows of queries a token.
        before: how many keys lie before the first query's token; the next one is that token's own.

    Returns:
        Output `[N, L·G, DV]` and log of what remains `[N, L·G, 1]`.
    """
    out, rest = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_empty(*q.shape[:2], 1)
    for tokens, columns in _tiles(q.shape[1] // G, k.shape[1], before):
        rows = slice(tokens.start * G, tokens.stop * G)
        taken = q.new_zeros(q.shape[0], rows.stop - rows.start, 1)
        for keys in columns:
            distance = before + tokens.start - keys.start
            tile = _tile(q[:, rows], k[:, keys], taken, distance, G)
            out[:, rows] += (tile.beta * tile.left) @ v[:, keys]
            taken = taken + tile.total
        rest[:, rows] = -taken
    return out, rest


def walk_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    grad_rest: Tensor,
    *,
    G: int,
    before: int = 0,
    taken: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the scaled q, of k and of v.

        ds_im = A_im dA_im − σ(s_im) (Σ_{j≤m} A_ij dA_ij + drest_i),   dA_ij = do_i · v_j

    The sum is δ_i = Σ_j A_ij dA_ij less its part to the right of m, and all rounding once the stick
    is used up: there it is zero.

    Args:
        q, k, v, G, before: as in `walk`.
        grad_out, delta, grad_rest: `[N, L·G, DV]`, and `[N, L·G, 1]` twice: do, δ, drest.
        taken: −log of what is left of the sticks where the walk begins, `[N, L·G, 1]`; δ is then
            the sum over these keys and those before them. None is whole sticks.
    """
    used_up = torch.finfo(q.dtype).eps / 4
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    taken = torch.zeros_like(delta) if taken is None else taken
    for tokens, columns in _tiles(q.shape[1] // G, k.shape[1], before):
        rows = slice(tokens.start * G, tokens.stop * G)
        gone, left_of_delta = taken[:, rows], delta[:, rows]
        for keys in columns:
            distance = before + tokens.start - keys.start
            beta, left, total = _tile(q[:, rows], k[:, keys], gone, distance, G)
            share = beta * left
            dv[:, keys] += share.mT @ grad_out[:, rows]
            gain = share.mul_(grad_out[:, rows] @ v[:, keys].mT)
            behind = F.pad(gain[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
            through = (left_of_delta - behind).masked_fill_(left < used_up, 0)
            ds = gain - beta * (through + grad_rest[:, rows])
            dq[:, rows] += ds @ k[:, keys]
            dk[:, keys] += ds.mT @ q[:, rows]
            gone = gone + total
            left_of_delta = left_of_delta - gain.sum(-1, keepdim=True)
    return dq, dk, dv
