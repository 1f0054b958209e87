"""The oracle against explicit matrix products, and its special cases."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from operator_cases import make_inputs, swaps

from path_attention import Packing, path_attention


def by_matrices(q, k, v, w, beta, log_forget, scale):
    """Each pair of tokens and each D×D factor by itself."""
    B, T, HQ, D = q.shape
    group = HQ // k.shape[2]
    out, lse = torch.zeros(B, T, HQ, v.shape[3], dtype=q.dtype), torch.zeros(B, T, HQ).to(q.dtype)
    for b in range(B):
        for h in range(HQ):
            for i in range(T):
                scores = []
                for j in range(i + 1):
                    product, decay = torch.eye(D, dtype=q.dtype), 0.0
                    for t in range(j + 1, i + 1):
                        of_token = w[b, t, h // group].view(-1, D), beta[b, t, h // group].view(-1)
                        for w_t, beta_t in zip(*of_token, strict=True):
                            factor = torch.eye(D, dtype=q.dtype) - beta_t * torch.outer(w_t, w_t)
                            product = product @ factor
                        decay = decay + log_forget[b, t, h]
                    scores.append(scale * (k[b, j, h // group] @ product @ q[b, i, h]) + decay)
                scores = torch.stack(scores)
                lse[b, i, h] = scores.exp().sum().log()
                weights = scores.exp() / scores.exp().sum()
                out[b, i, h] = weights @ v[b, : i + 1, h // group]
    return out, lse


@pytest.mark.parametrize("factors", [None, 1, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_definition_is_the_formula(scale, factors):
    inputs = make_inputs(7, B=2, heads=(4, 2), size=(3, 5), factors=factors)
    out, lse = path_attention(*inputs, scale=scale, return_lse=True, implementation="definition")
    expected = by_matrices(*inputs, 3**-0.5 if scale is None else scale)
    torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=1e-12, atol=1e-12)


def test_gradients_of_the_definition_are_finite_differences():
    inputs = [x.requires_grad_() for x in make_inputs(5, heads=(2, 1), size=(3, 2))]

    def call(*x):
        return path_attention(*x, return_lse=True, implementation="definition")

    assert torch.autograd.gradcheck(call, inputs)


def test_beta_zero_is_plain_attention():
    q, k, v, w, _, _ = make_inputs(30, B=2, heads=(6, 2))
    out = path_attention(q, k, v, w, torch.zeros(2, 30, 2).double(), implementation="definition")
    plain = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, plain.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_gates_alone_are_the_forgetting_transformer():
    # softmax(scale · QKᵀ + F_i − F_j), F the running sum of log f
    q, k, v, _, _, log_forget = make_inputs(30, heads=(2, 2), transport=False)
    running = log_forget.cumsum(1)[0].T
    scores = torch.einsum("bihd,bjhd->hij", q, k) / math.sqrt(8)
    scores = scores + running[:, :, None] - running[:, None, :]
    scores = scores.masked_fill(torch.ones(30, 30).triu(1).bool(), -torch.inf)
    expected = torch.einsum("hij,bjhd->bihd", scores.softmax(-1), v)
    out = path_attention(q, k, v, log_forget=log_forget, implementation="definition")
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_a_constant_gate_is_alibi():
    q, k, v, *_ = make_inputs(20, heads=(1, 1), transport=False)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    bias = (-0.25 * distance).masked_fill(distance < 0, -torch.inf).double()
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias
    )
    gate = torch.full((1, 20, 1), -0.25).double()
    out = path_attention(q, k, v, log_forget=gate, implementation="definition")
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_reflections_of_the_plane_turn_it():
    # With w at angle θ and β = 2, H_t H_{t+1} turns by 2(θ_t − θ_{t+1}).
    T = 9
    angle = torch.rand(T, dtype=torch.float64) * 7
    w = torch.stack([angle.cos(), angle.sin()], -1)[None, :, None]
    beta = torch.full((1, T, 1), 2.0).double()
    q, k = torch.randn(2, 1, T, 1, 2, dtype=torch.float64)
    k[:, 1:] = 0  # their scores are 0
    _, lse = path_attention(
        q, k, k, w, beta, scale=1.0, return_lse=True, implementation="definition"
    )
    turn = 2 * (angle[1::2] - angle[2::2]).sum()
    cos, sin = turn.cos(), turn.sin()
    turned = torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])]) @ q[0, -1, 0]
    expected = torch.log((k[0, 0, 0] @ turned).exp() + T - 1)
    torch.testing.assert_close(lse[0, -1, 0], expected, rtol=1e-12, atol=1e-12)


def test_two_reflections_of_one_token_turn_the_plane():
    # H_{t,1} H_{t,2} turns by 2(θ_{t,1} − θ_{t,2}): what one token's single factor cannot do.
    T = 6
    angle = torch.rand(T, 2, dtype=torch.float64) * 7
    w = torch.stack([angle.cos(), angle.sin()], -1)[None, :, None]
    beta = torch.full((1, T, 1, 2), 2.0).double()
    q, k = torch.randn(2, 1, T, 1, 2, dtype=torch.float64)
    k[:, 1:] = 0  # their scores are 0
    _, lse = path_attention(
        q, k, k, w, beta, scale=1.0, return_lse=True, implementation="definition"
    )
    turn = 2 * (angle[1:, 0] - angle[1:, 1]).sum()
    cos, sin = turn.cos(), turn.sin()
    turned = torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])]) @ q[0, -1, 0]
    expected = torch.log((k[0, 0, 0] @ turned).exp() + T - 1)
    torch.testing.assert_close(lse[0, -1, 0], expected, rtol=1e-12, atol=1e-12)


def test_swaps_track_a_permutation():
    # H_1 ⋯ H_i moves coordinate c of a query to where the swaps i, i−1, …, 1 carry c.
    T, D = 40, 5
    w = swaps((1, T, 1, D))
    place = list(range(D))
    query = torch.zeros(1, T, 1, D, dtype=torch.float64)
    query[..., 2] = 1
    key = torch.zeros(1, T, 1, D, dtype=torch.float64)
    key[0, 0, 0] = 50 * torch.arange(1, D + 1)  # token 0 reads the coordinate that q arrives at
    beta = torch.full((1, T, 1), 2.0).double()
    value = torch.zeros(1, T, 1, 1).double()
    _, lse = path_attention(
        query, key, value, w, beta, scale=1.0, return_lse=True, implementation="definition"
    )
    for i in range(1, T):
        place = list(range(D))
        for t in range(i, 0, -1):
            a, b = w[0, t, 0].nonzero().flatten().tolist()
            place = [b if x == a else a if x == b else x for x in place]
        # the other i keys are zero and add exp 0 each
        expected = math.log(math.exp(50 * (place[2] + 1)) + i)
        assert lse[0, i, 0].item() == pytest.approx(expected, rel=1e-12)


def test_packed_documents_are_separate_calls():
    inputs = make_inputs(20)
    packing = Packing.from_lengths([7, 0, 1, 12])
    out = path_attention(*inputs, cu_seqlens=packing, implementation="definition")
    parts = [
        path_attention(*(x[:, a:b] for x in inputs), implementation="definition")
        for a, b in ((0, 7), (7, 8), (8, 20))
    ]
    assert torch.equal(out, torch.cat(parts, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lse_is_float32(dtype):
    inputs = make_inputs(9, dtype=dtype, transport=False, gate=False)
    out, lse = path_attention(*inputs, return_lse=True, implementation="definition")
    assert out.dtype == dtype and lse.dtype == torch.float32
