"""Householder directions in one pass over their projection, forward and backward.

A program walks along consecutive tokens with a tile of heads, the convolution's last K − 1 inputs
in registers, so every input is read once (and K − 1 more at each program's border). The backward
walks the same way, and K − 1 tokens further, which see its last inputs too. It computes again what
it needs; nothing is saved but the inputs. Both are bound by memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from path_attention.ops.gradients import run
from path_attention.ops.packing import Packing
from path_attention.ops.triton.call import within_reach

_COUNTS = ["T", "steps", "walks"]
_TILE = 512  # channels of a program, 4 a thread: float32 then moves by 16 bytes without a shuffle
_PROGRAMS = 2048  # or more, where the walks do not get too short
_SHORTEST_WALK, _LONGEST_WALK = 8, 64
_AHEAD = 2  # tokens being loaded while one is computed


def triton_directions(
    x: Tensor,
    weight: Tensor | None,
    heads: int,
    state: Tensor | None,
    packing: Packing | None,
    eps: float,
) -> Tensor:
    """w `[B, T, H, D]` float32 of x `[B, T, C]`; arguments as in `householder_directions`.

    bfloat16, float16 or float32 with D = C / H ≤ 256. The weight's gradient is a sum of
    partial sums in a fixed order: bitwise the same in every run.
    """
    positions = None
    if packing is not None and weight is not None:
        positions = packing.position_ids().to(x.device)
    return run(_forward, x, weight, state, positions, heads, eps)


@triton.jit
def walk(T, steps, walks, groups):
    """This program's group of heads, walk, sequence, first token and number of tokens."""
    i_g = tl.program_id(0) % groups
    i_walk = tl.program_id(0) // groups
    i_b = (i_walk // walks).to(tl.int64)
    start = (i_walk % walks) * steps
    return i_g, i_walk, i_b, start.to(tl.int64), tl.minimum(steps, T - start)


@triton.jit
def load_taps(weight_ptr, o_c, m_c, stride_wc, stride_wk, K: tl.constexpr):
    """K tiles [HB, DP], the last one for the current token."""
    taps = ()
    for n in tl.static_range(K):
        b_tap = tl.load(weight_ptr + o_c * stride_wc + n * stride_wk, m_c, other=0.0)
        taps += (b_tap.to(tl.float32),)
    return taps


@triton.jit
def load_token(x_ptr, o_c, m_c, token, stride_t, T):
    return tl.load(x_ptr + token * stride_t + o_c, m_c & (token < T), other=0.0)


@triton.jit
def load_past(
    x_ptr, state_ptr, o_c, m_c, start, stride_xt, stride_st, K: tl.constexpr, STATE: tl.constexpr
):
    """The K − 1 inputs [HB, DP] before token `start`, oldest first."""
    past = ()
    for n in tl.static_range(K - 1):
        token = start + n - (K - 1)
        b_x = tl.load(x_ptr + token * stride_xt + o_c, m_c & (token >= 0), other=0.0)
        b_x = b_x.to(tl.float32)
        if STATE:
            p_state = state_ptr + (token + K - 1) * stride_st + o_c
            b_x += tl.load(p_state, m_c & (token < 0), other=0.0).to(tl.float32)
        past += (b_x,)
    return past


@triton.jit
def convolve(inputs, taps, position, K: tl.constexpr, PACKED: tl.constexpr):
    """Σ_n taps[n] · inputs[n] over the inputs that lie in the current token's document."""
    b_u = inputs[K - 1] * taps[K - 1]
    for n in tl.static_range(K - 1):
        b_term = inputs[n] * taps[n]
        if PACKED:
            b_term = tl.where(position >= K - 1 - n, b_term, 0.0)
        b_u += b_term
    return b_u


@triton.jit
def length(b_y):
    """‖y‖ of each head [HB, 1]; NaN stays NaN."""
    return tl.sqrt_rn(tl.sum(b_y * b_y, 1))[:, None]


@triton.jit(do_not_specialize=_COUNTS)
def directions_fwd_kernel(
    x_ptr, weight_ptr, state_ptr, positions_ptr, out_ptr, T, steps, walks, H, stride_xb, stride_xt,
    stride_wc, stride_wk, stride_sb, stride_st, eps, K: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, HB: tl.constexpr, CONVOLVE: tl.constexpr, STATE: tl.constexpr,
    PACKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    i_g, _, i_b, start, count = walk(T, steps, walks, tl.cdiv(H, HB))
    o_h, o_d = i_g * HB + tl.arange(0, HB), tl.arange(0, DP)
    o_c = o_h[:, None] * D + o_d[None, :]
    m_c = (o_h[:, None] < H) & (o_d[None, :] < D)
    x_ptr += i_b * stride_xb
    out_ptr += i_b * T * H * D
    state_ptr += i_b * stride_sb
    past = load_past(x_ptr, state_ptr, o_c, m_c, start, stride_xt, stride_st, K, STATE)
    taps = load_taps(weight_ptr, o_c, m_c, stride_wc, stride_wk, K) if CONVOLVE else ()
    ahead = ()
    for n in tl.static_range(AHEAD):
        ahead += (load_token(x_ptr, o_c, m_c, start + n, stride_xt, T),)
    for step in tl.range(0, count, loop_unroll_factor=AHEAD):
        token = start + step
        ahead += (load_token(x_ptr, o_c, m_c, token + AHEAD, stride_xt, T),)
        b_u = ahead[0].to(tl.float32)
        ahead = ahead[1:]
        if CONVOLVE:
            position = tl.load(positions_ptr + token) if PACKED else 0
            inputs = past
            inputs += (b_u,)
            b_u = convolve(inputs, taps, position, K, PACKED)
            past = inputs[1:]
        b_y = b_u * tl.sigmoid(b_u)
        b_norm = tl.maximum(length(b_y), eps, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out_ptr + token * H * D + o_c, b_y * (1.0 / b_norm), m_c)


@triton.jit(do_not_specialize=_COUNTS)
def directions_bwd_kernel(
    x_ptr, weight_ptr, state_ptr, positions_ptr, dout_ptr, dx_ptr, dweight_ptr, dstate_ptr, T,
    steps, walks, H, stride_xb, stride_xt, stride_wc, stride_wk, stride_sb, stride_st, stride_ob,
    stride_ot, stride_oh, eps, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HB: tl.constexpr, CONVOLVE: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """dx of the walk's tokens, dstate where it is the first, and its partial sum of dweight."""
    i_g, i_walk, i_b, start, count = walk(T, steps, walks, tl.cdiv(H, HB))
    o_h, o_d = i_g * HB + tl.arange(0, HB), tl.arange(0, DP)
    o_c = o_h[:, None] * D + o_d[None, :]
    m_c = (o_h[:, None] < H) & (o_d[None, :] < D)
    x_ptr += i_b * stride_xb
    o_out = o_h[:, None] * stride_oh + o_d[None, :]
    dout_ptr += i_b * stride_ob
    dx_ptr += i_b * T * H * D
    state_ptr += i_b * stride_sb
    dstate_ptr += i_b * (K - 1) * H * D
    past = load_past(x_ptr, state_ptr, o_c, m_c, start, stride_xt, stride_st, K, STATE)
    taps = load_taps(weight_ptr, o_c, m_c, stride_wc, stride_wk, K) if CONVOLVE else ()
    dtaps, dpast = (), ()  # dpast: so far, of the K − 1 inputs before the current token
    for _ in tl.static_range(K):
        dtaps += (tl.zeros([HB, DP], tl.float32),)
    for _ in tl.static_range(K - 1):
        dpast += (tl.zeros([HB, DP], tl.float32),)
    ahead, ahead_dw = (), ()
    for n in tl.static_range(AHEAD):
        ahead += (load_token(x_ptr, o_c, m_c, start + n, stride_xt, T),)
        ahead_dw += (load_token(dout_ptr, o_out, m_c, start + n, stride_ot, T),)
    for step in tl.range(0, count + K - 1, loop_unroll_factor=AHEAD):
        token = start + step
        ahead += (load_token(x_ptr, o_c, m_c, token + AHEAD, stride_xt, T),)
        ahead_dw += (load_token(dout_ptr, o_out, m_c, token + AHEAD, stride_ot, T),)
        b_u, b_dw = ahead[0].to(tl.float32), ahead_dw[0].to(tl.float32)
        ahead, ahead_dw = ahead[1:], ahead_dw[1:]
        inputs = past
        inputs += (b_u,)
        position = tl.load(positions_ptr + token, token < T, other=0) if PACKED else 0
        if CONVOLVE:
            b_u = convolve(inputs, taps, position, K, PACKED)
        b_sigmoid = tl.sigmoid(b_u)
        b_y = b_u * b_sigmoid
        b_norm = length(b_y)
        b_scale = 1.0 / tl.maximum(b_norm, eps, propagate_nan=tl.PropagateNan.ALL)
        b_y *= b_scale  # w
        b_along = tl.where(b_norm < eps, 0.0, tl.sum(b_y * b_dw, 1)[:, None])
        b_du = (b_dw - b_along * b_y) * b_scale * (b_sigmoid + b_u * b_sigmoid * (1 - b_sigmoid))
        if CONVOLVE:
            b_own = tl.where(step < count, b_du, 0.0)
            dinputs, dtaps_new = (), ()
            for n in tl.static_range(K):
                b_input, b_dinput = inputs[n], taps[n] * b_du
                if PACKED:
                    b_input = tl.where(position >= K - 1 - n, b_input, 0.0)
                    b_dinput = tl.where(position >= K - 1 - n, b_dinput, 0.0)
                dtaps_new += (dtaps[n] + b_own * b_input,)
                dinputs += (dpast[n] + b_dinput if n < K - 1 else b_dinput,)
            past, dpast, dtaps, b_dx = inputs[1:], dinputs[1:], dtaps_new, dinputs[0]
        else:
            b_dx = b_du
        p_dx = dx_ptr + (token - (K - 1)) * H * D + o_c
        tl.store(p_dx, b_dx.to(dx_ptr.dtype.element_ty), m_c & (step >= K - 1))
        if STATE:
            p_dstate = dstate_ptr + token * H * D + o_c
            tl.store(p_dstate, b_dx.to(dstate_ptr.dtype.element_ty), m_c & (token < K - 1))
    if CONVOLVE:
        for n in tl.static_range(K):
            tl.store(dweight_ptr + (i_walk.to(tl.int64) * K + n) * H * D + o_c, dtaps[n], m_c)


class _Launch(NamedTuple):
    """A call's tile and walks."""

    walks: int  # of all sequences
    programs: int
    shape: tuple[int, int, int, int]  # T, steps, walks of one sequence, H
    constants: dict[str, int | bool]


def _launch(
    x: Tensor, weight: Tensor | None, state: Tensor | None, positions: Tensor | None, heads: int
) -> _Launch:
    B, T, C = x.shape
    D = C // heads
    DP = triton.next_power_of_2(D)
    HB = min(triton.next_power_of_2(heads), max(1, _TILE // DP))
    groups = triton.cdiv(heads, HB)
    # Long walks read fewer inputs twice, short ones leave no multiprocessor idle.
    steps = triton.next_power_of_2(B * T * groups // _PROGRAMS)
    steps = min(_LONGEST_WALK, max(_SHORTEST_WALK, steps))
    walks = triton.cdiv(T, steps)
    constants = dict(
        K=1 if weight is None else weight.shape[1],
        D=D,
        DP=DP,
        HB=HB,
        CONVOLVE=weight is not None,
        STATE=state is not None and state.shape[1] > 0,
        PACKED=positions is not None,
        AHEAD=_AHEAD,
        num_warps=min(4, max(1, HB * DP // 128)),
    )
    return _Launch(B * walks, B * walks * groups, (T, steps, walks, heads), constants)


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor, weight: Tensor | None, state: Tensor | None) -> tuple[int, ...]:
    """Those that the kernels name stride_xb, _xt, _wc, _wk, _sb, _st."""
    of_weight = (0, 0) if weight is None else weight.stride()
    of_state = (0, 0) if state is None else state.stride()[:2]
    return (*x.stride()[:2], *of_weight, *of_state)


@torch.library.custom_op("path_attention::triton_directions", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor | None,
    state: Tensor | None,
    positions: Tensor | None,
    heads: int,
    eps: float,
) -> Tensor:
    B, T, C = x.shape
    out = x.new_empty(B, T, heads, C // heads, dtype=torch.float32)
    if out.numel() == 0:
        return out
    x = _with_unit_stride(x)
    state = None if state is None else _with_unit_stride(state)
    launch = _launch(x, weight, state, positions, heads)
    with torch.cuda.device_of(x):
        directions_fwd_kernel[(launch.programs,)](
            x, _or(weight, x), _or(state, x), _or(positions, x), out, *launch.shape,
            *_strides(x, weight, state), eps, **launch.constants,
        )  # fmt: skip
    return out


@_forward.register_fake
def _(x, weight, state, positions, heads, eps):
    B, T, C = x.shape
    return x.new_empty(B, T, heads, C // heads, dtype=torch.float32)


@torch.library.custom_op("path_attention::triton_directions_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    state: Tensor | None,
    positions: Tensor | None,
    heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and state; empty where one is None."""
    grads = tuple(_empty_gradient(x, y) for y in (x, weight, state))
    dx, dweight, dstate = grads
    if x.numel() == 0:
        return dx, dweight.zero_(), dstate.zero_()
    x, grad_out = _with_unit_stride(x), within_reach(grad_out)
    state = None if state is None else _with_unit_stride(state)
    launch = _launch(x, weight, state, positions, heads)
    partial = dx
    if weight is not None:
        partial = x.new_empty(launch.walks, *weight.T.shape, dtype=torch.float32)
    with torch.cuda.device_of(x):
        directions_bwd_kernel[(launch.programs,)](
            x, _or(weight, x), _or(state, x), _or(positions, x), grad_out, dx, partial, dstate,
            *launch.shape, *_strides(x, weight, state), *grad_out.stride()[:3], eps,
            **launch.constants,
        )  # fmt: skip
    if weight is not None:
        dweight.copy_(partial.sum(0).T)
    return dx, dweight, dstate


@_backward.register_fake
def _(grad_out, x, weight, state, positions, heads, eps):
    return tuple(_empty_gradient(x, y) for y in (x, weight, state))


def _or(x: Tensor | None, default: Tensor) -> Tensor:
    return default if x is None else x


def _empty_gradient(x: Tensor, of: Tensor | None) -> Tensor:
    return x.new_empty(0) if of is None else x.new_empty(of.shape, dtype=of.dtype)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.heads, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, grad_out):
    x, weight, state, positions = ctx.saved_tensors
    dx, dweight, dstate = _backward(grad_out, x, weight, state, positions, ctx.heads, ctx.eps)
    dweight = None if weight is None else dweight
    return dx, dweight, None if state is None else dstate, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
