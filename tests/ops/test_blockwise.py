"""blockwise = definition in float64: outputs and all gradients, over shapes, packings, values."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cases import (
    Inputs,
    assert_blockwise_is_the_definition,
    assert_same,
    correlated_directions,
    make_inputs,
    run,
    swaps,
)

from path_attention import Packing, path_attention
from path_attention.ops.transport import chunk_transport

pytestmark = pytest.mark.usefixtures("poisoned_memory")
KINDS = [(True, True), (True, False), (False, True), (False, False)]


# --- Shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "gate"), KINDS)
@pytest.mark.parametrize("T", [1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_lengths(T, transport, gate):
    assert_blockwise_is_the_definition(make_inputs(T, B=2, transport=transport, gate=gate))


@pytest.mark.parametrize("T", [5 * 64, 6 * 64 + 1, 7 * 64 - 1])
def test_ragged_trees(T):
    assert_blockwise_is_the_definition(make_inputs(T, heads=(1, 1), size=(4, 4)))


@pytest.mark.parametrize(("transport", "gate"), KINDS)
@pytest.mark.parametrize("heads", [(6, 2), (8, 2), (3, 1)])
def test_grouped_heads(heads, transport, gate):
    inputs = make_inputs(130, heads=heads, size=(4, 4), transport=transport, gate=gate)
    assert_blockwise_is_the_definition(inputs)


@pytest.mark.parametrize(("transport", "gate"), KINDS)
@pytest.mark.parametrize("size", [(64, 128), (128, 64), (1, 3), (3, 1)])
def test_sizes_of_keys_and_values(size, transport, gate):
    assert_blockwise_is_the_definition(make_inputs(70, size=size, transport=transport, gate=gate))


@pytest.mark.parametrize("D", [80, 96, 256])
def test_head_sizes(D):
    assert_blockwise_is_the_definition(make_inputs(67, size=(D, D)))


@pytest.mark.parametrize("implementation", ["definition", "blockwise"])
@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 5)])
def test_nothing_gives_nothing(implementation, B, T):
    result = run(make_inputs(T, B=B, heads=(4, 2), size=(8, 3)), implementation)
    assert result.out.shape == (B, T, 4, 3) and result.lse.shape == (B, T, 4)
    assert result.grads["w"].shape == (B, T, 2, 8)


def test_a_crash_of_a_peer():
    inputs = make_inputs(62, B=10, heads=(8, 2), size=(128, 128), dtype=torch.bfloat16)
    result = run(inputs, "blockwise")
    assert all(x.isfinite().all() for x in result.named().values())


@pytest.mark.parametrize("scale", [1.0, 1.0001, 0.0, -0.5])
def test_scales(scale):
    assert_blockwise_is_the_definition(make_inputs(90), scale=scale)


# --- Several factors a token ---------------------------------------------------------------------


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("factors", [1, 2, 3])
@pytest.mark.parametrize("T", [1, 2, 63, 65, 150])
def test_factors(T, factors, gate):
    assert_blockwise_is_the_definition(make_inputs(T, B=2, gate=gate, factors=factors))


@pytest.mark.parametrize("size", [(5, 3), (3, 8)])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_factors_of_grouped_heads(heads, size):
    inputs = make_inputs(100, heads=heads, size=size, factors=2)
    packing = Packing.from_lengths([30, 0, 66, 4])
    assert_blockwise_is_the_definition(inputs)
    assert_blockwise_is_the_definition(inputs, cu_seqlens=packing)


def test_factors_are_tokens_that_hold_no_key():
    # One factor a token, over T·n tokens of which every n-th has a key and a query that counts.
    inputs = make_inputs(70, heads=(2, 1), gate=False, factors=3)
    q, k, v, w, beta, _ = inputs

    def spread(x):
        return torch.nn.functional.pad(x[:, :, None], (0, 0, 0, 0, 2, 0)).flatten(1, 2)

    # Their scores are 0, as is their share of the output: taken off the sum of exponentials.
    out, lse = path_attention(
        *(spread(x) for x in (q, k, v)),
        w.transpose(2, 3).flatten(1, 2),
        beta.transpose(2, 3).flatten(1, 2),
        return_lse=True,
    )
    out, lse = out[:, 2::3], lse[:, 2::3]
    extra = 2 * torch.arange(1, 71, dtype=torch.float64)[:, None]
    total = torch.log(lse.exp() - extra)
    expected = path_attention(*inputs, return_lse=True)
    torch.testing.assert_close(total, expected[1], rtol=1e-10, atol=1e-10)
    out = out * (lse - total).exp()[..., None]
    torch.testing.assert_close(out, expected[0], rtol=1e-10, atol=1e-10)


# --- Packed sequences ----------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "gate"), KINDS)
@pytest.mark.parametrize(
    "borders",
    [
        [0, 128, 128, 256],
        [0, 0, 0, 7, 7],
        [0, 1, 3, 10, 18, 33, 49, 66],
        [0, 63, 127, 192],
        [0, 131, 139, 330],  # no length a multiple of anything
        [0, 5],
    ],
)
def test_packed(borders, transport, gate):
    inputs = make_inputs(borders[-1], transport=transport, gate=gate)
    for dtype in (torch.int32, torch.int64):
        cu_seqlens = torch.tensor(borders, dtype=dtype)
        assert_blockwise_is_the_definition(inputs, cu_seqlens=cu_seqlens)


@pytest.mark.slow
def test_packed_to_4096():
    inputs = make_inputs(4096, heads=(1, 1), size=(4, 4))
    packing = Packing.from_lengths([841, 48, 3207])
    assert_blockwise_is_the_definition(inputs, cu_seqlens=packing)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_packed_nothing(lengths):
    packing = Packing.from_lengths(lengths)
    assert_blockwise_is_the_definition(make_inputs(0), cu_seqlens=packing)


def test_documents_do_not_see_each_other():
    inputs, packing = make_inputs(300), Packing.from_lengths([100, 70, 130])
    before = path_attention(*inputs, cu_seqlens=packing)
    for x in inputs:
        x[:, 100:170] = torch.nan
    after = path_attention(*inputs, cu_seqlens=packing)
    assert torch.equal(before[:, :100], after[:, :100])
    assert torch.equal(before[:, 170:], after[:, 170:])


def test_padding_of_a_document_cannot_overflow():
    # The last query's scores are all −70; one more factor of its kind would turn them to +70.
    T, D = 65, 8
    q, k, v, w, beta, _ = make_inputs(T, heads=(1, 1), gate=False, dtype=torch.float32)
    q[0, -1, 0], k[:] = 0, 0
    q[0, -1, 0, 0], k[..., 0], k[0, -1, 0, 0] = -20, -10, 10
    w[:], w[..., 1], w[0, -1, 0], beta[:], beta[0, -1] = 0, 1, torch.eye(D)[0], 0, 2
    inputs = Inputs(q, k, v, w, beta, None)
    packing = Packing.from_lengths([T])
    assert_same(run(inputs, "blockwise", cu_seqlens=packing), run(inputs, "blockwise"), 1e-6)


# --- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 1.0, 1.5, 1.99, 2.0])
def test_one_direction_repeated(beta):
    inputs = make_inputs(200)
    w = inputs.w[:, :1].expand_as(inputs.w).contiguous()
    inputs = inputs._replace(w=w, beta=torch.full_like(inputs.beta, beta))
    assert_blockwise_is_the_definition(inputs)


def test_swaps():
    inputs = make_inputs(200, heads=(2, 2))
    inputs = inputs._replace(w=swaps(inputs.w.shape), beta=torch.full_like(inputs.beta, 2))
    assert_blockwise_is_the_definition(inputs)


@pytest.mark.parametrize("cosine", [0.7, 0.99])
def test_correlated_directions(cosine):
    inputs = make_inputs(200, size=(16, 16))
    w = correlated_directions(inputs.w.shape, cosine)
    inputs = inputs._replace(w=w, beta=1.9 + 0.1 * torch.rand_like(inputs.beta))
    assert_blockwise_is_the_definition(inputs)


def test_directions_of_any_norm_within_the_contract():
    inputs = make_inputs(150)
    norm = 0.1 + 4 * torch.rand_like(inputs.beta)
    inputs = inputs._replace(w=inputs.w * norm[..., None], beta=inputs.beta / norm.square())
    assert_blockwise_is_the_definition(inputs)


def test_zero_directions():
    inputs = make_inputs(100)
    assert_blockwise_is_the_definition(inputs._replace(w=torch.zeros_like(inputs.w)))


GATES = {
    "open": lambda x: torch.zeros_like(x),
    "one at -50": lambda x: torch.where(torch.arange(x.shape[1])[:, None] == 70, -50.0, x),
    "one shut": lambda x: torch.where(torch.arange(x.shape[1])[:, None] == 70, -torch.inf, x),
    "all shut": lambda x: torch.full_like(x, -torch.inf),
    "logsigmoid(-100)": lambda x: F.logsigmoid(torch.full_like(x, -100)),
    "sum of 1e5": lambda x: torch.full_like(x, -1e5 / x.shape[1]),
    "1e5 behind": lambda x: torch.where(torch.arange(x.shape[1])[:, None] == 3, -1e5, 0.01 * x),
}


@pytest.mark.parametrize("transport", [True, False])
@pytest.mark.parametrize("name", GATES)
def test_gates(name, transport):
    inputs = make_inputs(200, transport=transport)
    inputs = inputs._replace(log_forget=GATES[name](inputs.log_forget))
    assert_blockwise_is_the_definition(inputs)


@pytest.mark.parametrize("name", ["sum of 1e5", "1e5 behind", "one at -50"])
def test_gates_do_not_cancel_in_float32(name):
    # Differences of running sums would be off by 1e5 · 2⁻²⁴ = 6e-3.
    inputs = make_inputs(400, transport=False)
    inputs = inputs._replace(log_forget=GATES[name](inputs.log_forget)).to(torch.float32)
    exact = run(inputs.to(torch.float64), "definition")
    got = run(inputs, "blockwise")
    for key, value in exact.named().items():
        error = (got.named()[key] - value).abs().max() / value.abs().max().clamp(min=1)
        assert error < 1e-5, f"{key}: {error}"


def test_loud_channels():
    # As trained models have them: some channels far from zero, scores of ±hundreds.
    inputs = make_inputs(150, size=(16, 16))
    inputs.q[..., 3] += 30
    inputs.k[..., 3] += 20 * torch.randn(1, 150, 1).double().sign()
    inputs.v[..., 5] *= 100
    assert_blockwise_is_the_definition(inputs)


documents = st.lists(st.integers(0, 90), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=documents,
    packed=st.booleans(),
    group=st.integers(1, 3),
    heads=st.integers(1, 2),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kind=st.sampled_from(KINDS),
    strongest=st.sampled_from([0.0, 1.0, 2.0]),
    gate=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_packing_and_gate(
    lengths, packed, group, heads, size, kind, strongest, gate, seed
):
    inputs = make_inputs(
        sum(lengths),
        heads=(heads * group, heads),
        size=size,
        transport=kind[0],
        gate=kind[1],
        seed=seed,
    )
    if inputs.beta is not None:
        inputs = inputs._replace(beta=inputs.beta.clamp(min=strongest))
    if inputs.log_forget is not None:
        inputs = inputs._replace(log_forget=inputs.log_forget * gate)
    packing = Packing.from_lengths(lengths) if packed else None
    assert_blockwise_is_the_definition(inputs, cu_seqlens=packing)


# --- A chunk's transport -------------------------------------------------------------------------


@pytest.mark.parametrize("factors", [None, 1, 2])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 130, 200])
def test_chunk_transport_is_the_product_of_factors(T, factors):
    q, k, _, w, beta, _ = make_inputs(T, B=2, heads=(4, 2), size=(5, 5), factors=factors)
    q_start, k_end, transition = chunk_transport(q, k, w, beta)
    eye = torch.eye(5).double()
    single = eye - beta[..., None, None] * w[..., :, None] * w[..., None, :]
    if factors is not None:
        single = reduce(torch.matmul, single.unbind(3))
    product = eye.expand(2, 2, 5, 5)
    for i in range(T):
        product = product @ single[:, i]  # [B, H, D, D]
        moved = torch.einsum("bhxy,bhgy->bhgx", product, q[:, i].unflatten(1, (2, 2)))
        torch.testing.assert_close(q_start[:, i], moved.flatten(1, 2), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(transition, product, rtol=1e-11, atol=1e-11)
    rest = eye.expand(2, 2, 5, 5)
    for j in range(T - 1, -1, -1):
        moved = torch.einsum("bhx,bhxy->bhy", k[:, j], rest)
        torch.testing.assert_close(k_end[:, j], moved, rtol=1e-11, atol=1e-11)
        rest = single[:, j] @ rest
