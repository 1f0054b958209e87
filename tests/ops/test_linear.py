"""linear_attention: recurrent = chunked = definition, in float64, with states and packings."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from operator_cases import Inputs, make_inputs

from path_attention import Packing, path_attention
from path_attention.ops.linear import linear_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")
KINDS = [(True, True), (True, False), (False, True), (False, False)]
FAST = ["recurrent", "chunked"]


def first_state(inputs: Inputs, N: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(2)
    shape = (N, inputs.q.shape[2], inputs.v.shape[3], inputs.q.shape[3])
    return torch.randn(shape, dtype=torch.float64, generator=rng).to(inputs.q.dtype)


def run(inputs: Inputs, implementation: str | None, *, state: bool = True, **options) -> dict:
    """Results and the gradients of a fixed random functional of both of them."""
    packing = options.get("cu_seqlens")
    N = inputs.q.shape[0] if packing is None else len(packing.lengths)
    leaves = {name: x for name, x in inputs._asdict().items() if x is not None}
    if state:
        leaves["state"] = first_state(inputs, N)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    out, last = linear_attention(**leaves, implementation=implementation, **options)
    rng = torch.Generator().manual_seed(1)
    above = [torch.randn(x.shape, dtype=torch.float64, generator=rng).to(x) for x in (out, last)]
    grads = torch.autograd.grad(
        (out, last), list(leaves.values()), above, allow_unused=True, materialize_grads=True
    )
    named = {"out": out, "last": last, **dict(zip(leaves, grads, strict=True))}
    return {name: x.detach() for name, x in named.items()}


def check(inputs: Inputs, implementation: str | None, tolerance: float = 1e-10, **options) -> None:
    got, exact = (run(inputs, name, **options) for name in (implementation, "definition"))
    for name, value in exact.items():
        assert got[name].shape == value.shape and got[name].dtype == value.dtype, name
        if value.numel():
            worst = (got[name] - value).abs().max().item()
            assert worst <= tolerance * max(1.0, value.abs().max().item()), f"{name}: {worst:.1e}"


# --- The definition ------------------------------------------------------------------------------


@pytest.mark.parametrize("factors", [None, 2])
def test_the_definition_is_the_recurrence_of_matrices(factors):
    inputs = make_inputs(6, B=2, heads=(4, 2), size=(3, 5), factors=factors)
    state = first_state(inputs, 2)
    out, last = linear_attention(*inputs, scale=0.7, state=state, implementation="definition")
    q, k, v, w, beta, log_forget = inputs
    for b in range(2):
        for h in range(4):
            S = state[b, h]
            for t in range(6):
                of_token = w[b, t, h // 2].view(-1, 3), beta[b, t, h // 2].view(-1)
                for w_t, beta_t in zip(*of_token, strict=True):
                    S = S @ (torch.eye(3).double() - beta_t * torch.outer(w_t, w_t))
                S = log_forget[b, t, h].exp() * S + torch.outer(v[b, t, h // 2], k[b, t, h // 2])
                expected = 0.7 * S @ q[b, t, h]
                torch.testing.assert_close(out[b, t, h], expected, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(last[b, h], S, rtol=1e-11, atol=1e-11)


def test_its_scores_are_those_of_path_attention():
    # A softmax of two scores tells their difference; without one they are the output itself.
    inputs = make_inputs(2, heads=(1, 1), size=(4, 2), gate=False)
    inputs.v[:] = torch.eye(2).double()[:, None]
    out, _ = linear_attention(*inputs, implementation="definition")
    weights = path_attention(*inputs, implementation="definition")[0, 1, 0]
    torch.testing.assert_close(out[0, 1, 0].softmax(-1), weights, rtol=1e-12, atol=1e-12)


def test_delta_rule():
    # S_t = S_{t−1} − β_t (S_{t−1} k_t − v_t) k_tᵀ
    T, D = 100, 4
    q, k, v, _, beta, _ = make_inputs(T, heads=(1, 1), size=(D, D), gate=False)
    k = F.normalize(k, dim=-1)
    out, last = linear_attention(q, k, beta[..., None] * v, k, beta, scale=1.0)
    S = torch.zeros(D, D).double()
    for t in range(T):
        error = S @ k[0, t, 0] - v[0, t, 0]
        S = S - beta[0, t, 0] * torch.outer(error, k[0, t, 0])
        torch.testing.assert_close(out[0, t, 0], S @ q[0, t, 0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(last[0, 0], S, rtol=1e-10, atol=1e-10)


# --- Implementations -----------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(("transport", "gate"), KINDS)
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130])
def test_lengths(T, transport, gate, implementation):
    inputs = make_inputs(T, size=(4, 4), transport=transport, gate=gate)
    check(inputs, implementation)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(("transport", "gate"), KINDS)
@pytest.mark.parametrize(("heads", "size"), [((6, 2), (3, 5)), ((2, 2), (8, 1)), ((3, 1), (1, 4))])
@pytest.mark.parametrize("state", [True, False])
def test_heads_sizes_and_states(heads, size, transport, gate, state, implementation):
    inputs = make_inputs(70, B=2, heads=heads, size=size, transport=transport, gate=gate)
    check(inputs, implementation, state=state)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("factors", [1, 2, 3])
def test_factors(factors, implementation):
    check(make_inputs(80, heads=(4, 2), size=(5, 3), factors=factors), implementation)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(("transport", "gate"), KINDS)
@pytest.mark.parametrize("lengths", [[70, 0, 1, 64, 5], [0, 0, 3], [130], [64, 64]])
def test_packed(lengths, transport, gate, implementation):
    inputs = make_inputs(sum(lengths), size=(4, 3), transport=transport, gate=gate)
    check(inputs, implementation, cu_seqlens=Packing.from_lengths(lengths))


@pytest.mark.parametrize("implementation", ["definition", *FAST])
@pytest.mark.parametrize("lengths", [None, [], [0, 0]])
def test_nothing_leaves_the_state(lengths, implementation):
    inputs = make_inputs(0, heads=(4, 2), size=(8, 3))
    packing = None if lengths is None else Packing.from_lengths(lengths)
    result = run(inputs, implementation, cu_seqlens=packing)
    assert result["out"].shape == (1, 0, 4, 3)
    assert torch.equal(result["last"], first_state(inputs, 1 if lengths is None else len(lengths)))


@pytest.mark.parametrize("implementation", FAST)
def test_parts_of_a_sequence_pass_the_state_on(implementation):
    inputs = make_inputs(150, heads=(4, 2))
    whole, last = linear_attention(*inputs)
    state, parts = None, []
    for part in zip(*(x.split([1, 70, 64, 15], 1) for x in inputs), strict=True):
        out, state = linear_attention(*part, state=state, implementation=implementation)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gate", [-torch.inf, -1e5, -50.0, 0.0])
@pytest.mark.parametrize("implementation", FAST)
def test_hard_gates(implementation, gate):
    inputs = make_inputs(150, heads=(1, 1), size=(4, 4))
    inputs.log_forget[:, 70] = gate
    check(inputs, implementation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("implementation", ["definition", *FAST])
def test_dtypes(implementation, dtype):
    inputs = make_inputs(100, heads=(4, 2), dtype=dtype)
    out, last = linear_attention(*inputs, implementation=implementation)
    wide = Inputs(*inputs.to(torch.float64))
    wide = wide._replace(w=F.normalize(wide.w, dim=-1)) if dtype != torch.float32 else wide
    exact, exact_last = linear_attention(*wide, implementation="definition")
    assert out.dtype == dtype and last.dtype == torch.float32
    # One rounding of the output; float32 sums of 100 terms before it.
    limit = torch.finfo(dtype).eps + 100 * 2**-24
    assert (out.double() - exact).norm() <= limit * exact.norm()
    assert (last.double() - exact_last).norm() <= 100 * 2**-24 * exact_last.norm()


def test_the_choice():
    inputs = make_inputs(1)
    expected = linear_attention(*inputs, implementation="recurrent")
    assert all(map(torch.equal, linear_attention(*inputs), expected))
    inputs = make_inputs(2)
    expected = linear_attention(*inputs, implementation="chunked")
    assert all(map(torch.equal, linear_attention(*inputs), expected))


def test_autocast_casts_q_k_v_alone():
    inputs = make_inputs(80, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = linear_attention(*inputs)
    cast = [x.bfloat16() for x in inputs[:3]]
    assert torch.equal(out, linear_attention(*cast, *inputs[3:])[0])


def test_second_derivatives_are_refused():
    inputs = [x.requires_grad_() for x in make_inputs(20)]
    (grad,) = torch.autograd.grad(linear_attention(*inputs)[0].sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="linear attention's chunked is differentiable once"):
        grad.sum().backward()


def test_forward_mode_is_refused():
    x = make_inputs(20)

    def tangent(name):
        return torch.func.jvp(
            lambda q: linear_attention(q, *x[1:], implementation=name)[0],
            x[:1],
            (torch.ones_like(x[0]),),
        )[1]

    assert tangent("definition").any()
    with pytest.raises(
        RuntimeError, match="linear attention's chunked has no derivatives of forward mode"
    ):
        tangent("chunked")


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_result_alone(which):
    x = [y.requires_grad_() for y in make_inputs(90)]
    results = []
    for implementation in ("chunked", "definition"):
        result = linear_attention(*x, implementation=implementation)[which]
        grads = torch.autograd.grad(result.sum(), x, allow_unused=True, materialize_grads=True)
        results.append(grads)
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("packing", [None, Packing.from_lengths([70, 0, 1, 64, 5])])
def test_registered_as_torch_asks(packing):
    inputs = make_inputs(140, heads=(4, 2), size=(4, 3))
    N = 1 if packing is None else 5
    state = first_state(inputs, N).unflatten(1, (2, 2))
    x = [y.requires_grad_() for y in (*inputs, state)]
    borders = None if packing is None else packing.cu_seqlens
    torch.library.opcheck(torch.ops.path_attention.linear.default, (*x, 0.5, borders))


def test_compiled_equals_eager_over_packings():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(packing, *x):
        out, last = linear_attention(*x, cu_seqlens=packing)
        return out.square().sum() + last.sum()

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for n in range(8):
        packing = Packing.from_lengths([3 + n, 2, n, 70])
        x = [y.requires_grad_() for y in make_inputs(packing.total, dtype=torch.float32)]
        got, eager = compiled(packing, *x), call(packing, *x)
        assert torch.equal(got, eager)
        grads = [torch.autograd.grad(y, x) for y in (got, eager)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": torch.zeros(1, 2, 8, 7).double()}, r"state: expected shape \[1, 2, 8, 8\]"),
        ({"state": torch.zeros(1, 2, 8, 8)}, "state: expected dtype torch.float64, got torch.fl"),
        (
            {"state": torch.zeros(1, 2, 8, 8).double(), "cu_seqlens": torch.tensor([0, 2, 6])},
            r"state: expected shape \[2, 2, 8, 8\], got \[1, 2, 8, 8\]",
        ),
        (
            {"implementation": "triton"},
            r"implementation: expected one of \['chunked', 'definition', 'recurrent'\] or None",
        ),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens: expected to end at T = 6"),
        ({"w": None}, "w: expected together with beta, got None"),
    ],
)
def test_refused(options, message):
    inputs = make_inputs(6)._asdict()
    with pytest.raises(ValueError, match=message):
        linear_attention(**{**inputs, **options})
