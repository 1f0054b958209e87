"""triton = definition, in float32 through Triton's interpreter: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import ENCODINGS, FLOAT32, assert_close, assert_triton_is_the_definition, encoded
from operator_cases import Inputs, correlated_directions, run
from swap_cases import swapped_inputs

from path_attention import Packing, path_attention

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned_memory")


# --- Shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_lengths(T):
    assert_triton_is_the_definition(encoded("path_fox", T))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_grouped_heads(heads, encoding):
    assert_triton_is_the_definition(encoded(encoding, 130, heads=heads))


@pytest.mark.parametrize("encoding", ["path_fox", "nope"])
@pytest.mark.parametrize("size", [(24, 24), (80, 16), (16, 80), (1, 3), (32, 64)])
def test_head_sizes(size, encoding):
    assert_triton_is_the_definition(encoded(encoding, 70, heads=(1, 1), size=size))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_batches(encoding):
    assert_triton_is_the_definition(encoded(encoding, 100, B=3, heads=(1, 1)))


@pytest.mark.parametrize("T", [5 * 64, 6 * 64 + 1, 7 * 64 - 1])
def test_ragged_trees(T):
    assert_triton_is_the_definition(encoded("path_fox", T, heads=(1, 1)))


@pytest.mark.parametrize("encoding", ["path_fox", "nope"])
def test_heads_in_parts_are_heads_together(encoding, monkeypatch):
    from path_attention.ops.triton import operator

    inputs = encoded(encoding, 100, B=2, heads=(6, 3))
    together = run(inputs, "triton").named()
    monkeypatch.setattr(operator, "_ROWS_AT_ONCE", 2 * 100 * 2 * 2)  # two key heads, then one
    for name, value in run(inputs, "triton").named().items():
        assert torch.equal(value, together[name]), name


def test_heads_that_32_bits_do_not_reach_are_copied():
    """Kernels add a head's number times its stride: of 2²⁰ tokens that lie head by head, 2²⁶."""
    from path_attention.ops.triton.call import token_rows

    x = torch.empty(1, 40, 2**20, 64, device="meta").transpose(1, 2)
    assert token_rows(x).stride() == (40 * 64, 64, 1)
    assert token_rows(x[:, :, :32]).stride() == (64, 2**26, 1)


@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 5)])
def test_nothing_gives_nothing(B, T):
    result = run(encoded("path_fox", T, B=B, heads=(4, 2), size=(8, 3)), "triton")
    assert result.out.shape == (B, T, 4, 3) and result.lse.shape == (B, T, 4)
    assert result.grads["w"].shape == (B, T, 2, 8)


@pytest.mark.parametrize("encoding", ["path", "nope"])
@pytest.mark.parametrize("scale", [1.0, 1.0001, 0.0, -0.5])
def test_scales(scale, encoding):
    assert_triton_is_the_definition(encoded(encoding, 90), scale=scale)


# --- Packed sequences ----------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("lengths", [[0, 1, 130, 0, 3, 64], [0, 0, 7, 0], [1, 2, 7, 8, 15, 16]])
def test_packed(lengths, encoding):
    packing = Packing.from_lengths(lengths)
    assert_triton_is_the_definition(encoded(encoding, packing.total), cu_seqlens=packing)


def test_a_packed_document_is_a_sequence_of_its_own():
    lengths = [70, 3, 129]
    inputs = encoded("path_fox", sum(lengths))
    packed = run(inputs, "triton", cu_seqlens=Packing.from_lengths(lengths)).out
    documents = zip(*(y.split(lengths, 1) for y in inputs), strict=True)
    for x, part in zip(packed.split(lengths, 1), documents, strict=True):
        alone = path_attention(*part, implementation="triton")
        assert (x - alone).norm() <= FLOAT32 * alone.norm()


def test_documents_do_not_see_each_other():
    inputs, packing = encoded("path_fox", 200), Packing.from_lengths([70, 60, 70])
    before = run(inputs, "triton", cu_seqlens=packing).named()
    for x in inputs:
        x[:, 70:130] = torch.nan
    after = run(inputs, "triton", cu_seqlens=packing).named()
    assert after["out"][:, 70:130].isnan().all()
    for name, x in before.items():
        assert torch.equal(x[:, :70], after[name][:, :70]), name
        assert torch.equal(x[:, 130:], after[name][:, 130:]), name


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_packed_nothing(lengths):
    packing = Packing.from_lengths(lengths)
    assert run(encoded("path_fox", 0), "triton", cu_seqlens=packing).out.shape == (1, 0, 2, 16)


# --- Values --------------------------------------------------------------------------------------


def with_transport(inputs: Inputs, w: torch.Tensor, beta: torch.Tensor) -> Inputs:
    return inputs._replace(w=w.float(), beta=beta.float())


@pytest.mark.parametrize("beta", [0.0, 1.0, 1.99, 2.0])
def test_one_direction_repeated(beta):
    # (blockwise in float32 is off by 4e-5 here)
    x = encoded("path", 150)
    assert x.w is not None and x.beta is not None
    w = x.w[:, :1].expand_as(x.w)
    assert_triton_is_the_definition(with_transport(x, w, torch.full_like(x.beta, beta)), limit=2e-4)


def test_one_direction_repeated_in_float16():
    """Where terms of both signs all but cancel in dβ: 14 roundings with float16 operands."""
    x = encoded("path", 300, heads=(1, 1), size=(64, 64))
    assert x.w is not None and x.beta is not None
    x = Inputs(*x.to(torch.float16)[:3], *x[3:])
    x = with_transport(x, x.w[:, :1].expand_as(x.w), 1.5 + 0.249 * x.beta)
    exact = run(x.to(torch.float64), "definition", grad_dtype=torch.float16)
    got = run(x, "triton", grad_dtype=torch.float16)
    for name, value in exact.named().items():
        rounding = (value.to(torch.bfloat16).double() - value).norm()
        error = (got.named()[name].double() - value).norm()
        assert error <= (6 if name in ("w", "beta") else 3) * rounding, name


@pytest.mark.parametrize("gate", [-10.0, -13.0, -16.0, -95.0])
def test_gradients_that_all_but_vanish_across_blocks(gate):
    """A block that hardly a later query sees: what comes through its own scores is far larger."""
    x = encoded("path_fox", 200, heads=(1, 1), size=(64, 64))
    border = torch.arange(200) % 64 == 0
    x = x._replace(log_forget=torch.where(border[:, None], gate, 0.0).expand(1, 200, 1))
    x = Inputs(*x.to(torch.float16)[:3], *x.to(torch.float32)[3:])
    exact = run(x.to(torch.float64), "definition", grad_dtype=torch.float16)
    got = run(x, "triton", grad_dtype=torch.float16)
    for name, value in exact.named().items():
        rounding = (value.to(torch.bfloat16).double() - value).norm() + 1e-30
        error = (got.named()[name].double() - value).norm()
        assert error <= (6 if name in ("w", "beta", "log_forget") else 3) * rounding, name


def test_correlated_directions():
    x = encoded("path", 200)
    assert x.w is not None and x.beta is not None
    w = correlated_directions(tuple(x.w.shape), 0.7)
    hard = with_transport(x, w, 1.9 + 0.05 * x.beta)
    assert_triton_is_the_definition(hard, limit=1e-5)


@pytest.mark.parametrize("implementation", ["definition", "blockwise", "triton"])
def test_swaps_find_their_key(implementation):
    inputs, target = swapped_inputs(200, heads=(2, 1), D=32)
    out = path_attention(*inputs, scale=10.0, implementation=implementation)
    expected = inputs.v.expand(-1, -1, 2, -1).gather(1, target[..., None].expand(out.shape))
    assert torch.equal(out.sign(), expected)


def test_no_strength_is_no_transport():
    x = encoded("path", 130)
    assert x.beta is not None
    still = run(x._replace(beta=torch.zeros_like(x.beta)), "triton")
    plain = run(x._replace(w=None, beta=None), "triton")
    assert_close(plain, still._replace(grads={n: still.grads[n].double() for n in "qkv"}))


def test_directions_of_any_norm_within_the_contract():
    x = encoded("path_fox", 100)
    assert x.w is not None and x.beta is not None
    norm = 0.25 + 3 * torch.rand_like(x.beta)
    x = with_transport(x, x.w * norm[..., None], x.beta / norm.square())
    assert_triton_is_the_definition(x)


GATES = {
    "open": lambda x: torch.zeros_like(x),
    "one at -50": lambda x: torch.where(torch.arange(x.shape[1])[:, None] == 70, -50.0, x),
    "one shut": lambda x: torch.where(torch.arange(x.shape[1])[:, None] == 70, -torch.inf, x),
    "all shut": lambda x: torch.full_like(x, -torch.inf),
    "sum of 1e5": lambda x: torch.full_like(x, -1e5 / x.shape[1]),
    "1e5 behind": lambda x: torch.where(torch.arange(x.shape[1])[:, None] == 3, -1e5, 0.01 * x),
    "huge": lambda x: torch.where(torch.arange(x.shape[1])[:, None] == 70, -3e38, x),
}


@pytest.mark.parametrize("encoding", ["path_fox", "fox"])
@pytest.mark.parametrize("name", list(GATES))
def test_gates(name, encoding):
    x = encoded(encoding, 150, heads=(1, 1))
    assert x.log_forget is not None
    assert_triton_is_the_definition(x._replace(log_forget=GATES[name](x.log_forget)))


@pytest.mark.parametrize("encoding", ["path", "fox"])
@pytest.mark.parametrize(
    "magnitudes", [(1e6, 1e-6, 1.0), (1e-6, 1e6, 1e6), (1e-6, 1e-6, 1e-6), (1e3, 1e-3, 1e-6)]
)
def test_magnitudes(magnitudes, encoding):
    x = encoded(encoding, 100)
    x = x._replace(**{n: m * getattr(x, n) for n, m in zip("qkv", magnitudes, strict=True)})
    assert_triton_is_the_definition(x, floor=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_float16(encoding):
    # (The interpreter multiplies bfloat16 as integers: test_triton_gpu.py has it.) Operands are
    # float16 whatever the inputs: results may err half as much as bfloat16 ones, which round 8
    # times as coarsely and may err twice that, four times for w, β and the gates.
    x = encoded(encoding, 130, heads=(2, 1))
    x = Inputs(*x.to(torch.float16)[:3], *x[3:])
    exact = run(x.to(torch.float64), "definition", grad_dtype=torch.float16)
    got = run(x, "triton", grad_dtype=torch.float16)
    assert got.out.dtype == got.grads["k"].dtype == torch.float16
    for name, value in exact.named().items():
        roundings = 16 if name in ("w", "beta", "log_forget") else 8
        allowed = roundings * (value.half().double() - value).norm()
        assert (got.named()[name].double() - value).norm() <= allowed, name


def test_gradients_do_not_feel_the_rounding_of_the_output():
    """δ = rowsum(dO · O) of a peaked softmax nearly cancels dO · v: O needs its low part."""
    inputs = encoded("nope", 60, size=(64, 64), dtype=torch.float16)
    exact = run(inputs.to(torch.float64), "definition", grad_dtype=torch.float16, scale=1.0)
    actual = run(inputs, "triton", grad_dtype=torch.float16, scale=1.0)
    for name in ("q", "k"):
        value, got = exact.grads[name], actual.grads[name].double()
        rounding = (value.half().double() - value).norm()
        assert (got - value).norm() <= 2 * rounding, name
