"""stick_breaking_attention: blockwise = definition = the formula, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo.testing
from stick_cases import Inputs, assert_blockwise_is_the_definition, assert_same, make_inputs, run
from torch.utils.checkpoint import checkpoint

from path_attention import Packing
from path_attention.ops import stick_breaking
from path_attention.ops.stick_breaking import stick_breaking_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LENGTHS = [100, 0, 1, 64, 35]


def test_the_definition_is_the_formula():
    q, k, v = make_inputs(9, B=2, heads=(4, 2), size=(3, 5))
    out, rest = stick_breaking_attention(q, k, v, scale=0.7, implementation="definition")
    for b in range(2):
        for h in range(4):
            for i in range(9):
                total, left = torch.zeros(5).double(), 1.0
                for j in range(i - 1, -1, -1):
                    taken = 1 / (1 + math.exp(-0.7 * (q[b, i, h] @ k[b, j, h // 2]).item()))
                    total, left = total + taken * left * v[b, j, h // 2], left * (1 - taken)
                torch.testing.assert_close(out[b, i, h], total, rtol=1e-12, atol=1e-12)
                assert rest[b, i, h].item() == pytest.approx(math.log(left), abs=1e-12)


def test_gradients_of_the_definition_are_finite_differences():
    inputs = [x.requires_grad_() for x in make_inputs(5, heads=(2, 1), size=(3, 2))]
    assert torch.autograd.gradcheck(
        lambda *x: stick_breaking_attention(*x, implementation="definition"), inputs
    )


@pytest.mark.parametrize("implementation", ["definition", "blockwise"])
def test_a_token_that_sees_no_key_gets_nothing(implementation):
    inputs = make_inputs(20)
    packing = Packing.from_lengths([1, 19])
    out, rest = stick_breaking_attention(*inputs, cu_seqlens=packing, implementation=implementation)
    assert (out[:, :2] == 0).all() and (rest[:, :2] == 0).all() and (out[:, 2] != 0).all()


def test_what_is_left_is_the_past_s():
    # Keys before the given ones add exp(log_remaining) of their own output.
    q, k, v = make_inputs(90, heads=(4, 2))
    whole, _ = stick_breaking_attention(q, k, v)
    near, rest = stick_breaking_attention(q[:, 50:], k[:, 50:], v[:, 50:])
    far = torch.zeros(40, 4, 8).double()
    for i in range(40):  # the query alone behind the first 50 keys
        x = [torch.cat([y[:, :50], y[:, 50 + i : 51 + i]], 1) for y in (q, k, v)]
        far[i] = stick_breaking_attention(*x)[0][0, -1]
    joined = near[0] + rest[0].exp()[..., None] * far
    torch.testing.assert_close(joined, whole[0, 50:], rtol=1e-11, atol=1e-11)


# --- Shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256, 300])
def test_lengths(T):
    assert_blockwise_is_the_definition(make_inputs(T, B=2))


@pytest.mark.parametrize("size", [(8, 8), (3, 7), (7, 1), (1, 4)])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)])
def test_heads_and_sizes(heads, size):
    assert_blockwise_is_the_definition(make_inputs(140, B=2, heads=heads, size=size))


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.5, 3.0])
def test_scales(scale):
    assert_blockwise_is_the_definition(make_inputs(150), scale=scale)


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0, 7, 0], [130, 131, 1], [64, 64], [], [0, 0]])
def test_packed(lengths):
    inputs = make_inputs(sum(lengths), heads=(4, 2), size=(8, 5))
    assert_blockwise_is_the_definition(inputs, cu_seqlens=Packing.from_lengths(lengths))


@pytest.mark.parametrize("implementation", ["definition", "blockwise"])
@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 5)])
def test_nothing_gives_nothing(implementation, B, T):
    result = run(make_inputs(T, B=B, heads=(4, 2), size=(8, 3)), implementation)
    assert result.out.shape == (B, T, 4, 3) and result.rest.shape == (B, T, 4)


def test_documents_do_not_see_each_other():
    inputs, packing = make_inputs(300), Packing.from_lengths([100, 70, 130])
    before = stick_breaking_attention(*inputs, cu_seqlens=packing)[0]
    for x in inputs:
        x[:, 100:170] = torch.nan
    after = stick_breaking_attention(*inputs, cu_seqlens=packing)[0]
    assert torch.equal(before[:, :100], after[:, :100])
    assert torch.equal(before[:, 170:], after[:, 170:])


def test_strides_do_not_matter():
    inputs = make_inputs(150, heads=(4, 2))
    swapped = Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
    assert_same(run(swapped, "blockwise"), run(inputs, "blockwise"), 1e-12)


# --- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["definition", "blockwise"])
@pytest.mark.parametrize("logit", [1e3, -1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_are_finite(dtype, logit, implementation):
    inputs = make_inputs(300, dtype=dtype)
    sign = logit * (1 - 2 * (torch.arange(300) % 7 == 3).to(dtype))
    inputs = Inputs(torch.ones_like(inputs.q), inputs.k, inputs.v)
    inputs.k[:] = sign[:, None, None] / 8
    result = run(inputs, implementation, scale=1.0)
    assert all(x.isfinite().all() for x in result.named().values())
    if logit < 0:  # only every seventh key takes anything, and it takes all
        last = torch.arange(300)[torch.arange(300) % 7 == 3]
        nearest = last[torch.searchsorted(last, torch.arange(4, 300)) - 1]
        expected = inputs.v[0, nearest].expand(-1, 2, -1)
        torch.testing.assert_close(result.out[0, 4:], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spread", [1.0, 10.0, 300.0])
@pytest.mark.parametrize("shift", [-8.0, 0.0, 3.0])
def test_long_and_short_sticks(spread, shift):
    inputs = make_inputs(280, size=(9, 4))
    inputs.q[..., 0], inputs.k[..., 0] = 1, shift
    inputs.k[..., 1:] *= spread
    assert_blockwise_is_the_definition(inputs, scale=1.0)


@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize("shift", [-8.0, 0.0, 3.0])
def test_float32_is_near_float64(spread, shift):
    # Sums of up to 300 terms, and the gradient's sum over queries: √300 roundings on average.
    inputs = make_inputs(300, size=(9, 4), dtype=torch.float32)
    inputs.q[..., 0], inputs.k[..., 0] = 1, shift
    inputs.k[..., 1:] *= spread
    got = run(inputs, "blockwise", scale=1.0).named()
    for name, exact in run(inputs.to(torch.float64), "definition", scale=1.0).named().items():
        # Rounding of a score of size s shifts it by s·2⁻²⁴.
        limit = 64 * 2**-24 * max(1.0, spread)
        assert (got[name] - exact).norm() <= limit * exact.norm(), name


def test_a_used_up_stick_leaves_no_noise_in_gradients():
    # What is left of δ beyond the nearest keys is its rounding, for each of a thousand equal keys.
    inputs = make_inputs(1000, heads=(1, 1), dtype=torch.float32)
    inputs.q[:], inputs.k[:] = 1, 0.5
    got = run(inputs, "blockwise", scale=1.0, rest=False).grads["q"]
    exact = run(inputs.to(torch.float64), "definition", scale=1.0, rest=False).grads["q"]
    assert (got - exact).abs().max() <= 64 * 2**-24 * inputs.v.abs().max()


# --- Autograd, autocast, compile -----------------------------------------------------------------


def leaves(T: int, **options) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in make_inputs(T, **options)]


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_result_alone(which):
    x = leaves(150)
    results = []
    for implementation in ("blockwise", "definition"):
        result = stick_breaking_attention(*x, implementation=implementation)[which]
        grads = torch.autograd.grad(result.sum(), x, allow_unused=True, materialize_grads=True)
        results.append(grads)
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("wanted", range(3))
def test_gradient_of_one_input_alone(wanted):
    x = leaves(90)
    expected = torch.autograd.grad(stick_breaking_attention(*x)[0].sum(), x)[wanted]
    for n, tensor in enumerate(x):
        tensor.requires_grad_(n == wanted)
    (alone,) = torch.autograd.grad(stick_breaking_attention(*x)[0].sum(), x[wanted])
    assert torch.equal(alone, expected)


def test_second_derivatives_are_refused():
    x = leaves(20)
    (grad,) = torch.autograd.grad(stick_breaking_attention(*x)[0].sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="stick-breaking's blockwise is differentiable once"):
        grad.sum().backward()


def test_forward_mode_is_refused():
    x = make_inputs(20)

    def tangent(name):
        return torch.func.jvp(
            lambda q: stick_breaking_attention(q, *x[1:], implementation=name)[0],
            x[:1],
            (torch.ones_like(x[0]),),
        )[1]

    assert tangent("definition").any()
    with pytest.raises(
        RuntimeError, match="stick-breaking's blockwise has no derivatives of forward mode"
    ):
        tangent("blockwise")


@pytest.mark.parametrize("packing", [None, Packing.from_lengths(LENGTHS)])
def test_registered_as_torch_asks(packing):
    x = [*leaves(200), 0.5, None if packing is None else packing.cu_seqlens]
    torch.library.opcheck(torch.ops.path_attention.stick_breaking.default, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["definition", "blockwise"])
def test_autocast_and_dtypes(implementation, dtype):
    x = make_inputs(150, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        out, rest = stick_breaking_attention(*x, implementation=implementation)
    assert out.dtype == dtype and rest.dtype == torch.float32
    exact, _ = stick_breaking_attention(
        *(y.to(dtype).double() for y in x), implementation="definition"
    )
    assert (out.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()


def test_checkpointing_changes_nothing():
    x = leaves(200)

    def call(*tensors):
        packing = Packing.from_lengths(LENGTHS)
        return stick_breaking_attention(*tensors, cu_seqlens=packing)[0].square()

    plain = torch.autograd.grad(call(*x).sum(), x)
    checkpoint(call, *x, use_reentrant=False).sum().backward()
    assert all(torch.equal(a, y.grad) for a, y in zip(plain, x, strict=True))


def test_compiled_equals_eager_over_lengths_and_packings():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(packing, *x):
        out, rest = stick_breaking_attention(*x, cu_seqlens=packing)
        return out.square().sum() + rest.sum()

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for n in range(12):
        packing = Packing.from_lengths([3 + n, *range(n % 4), 70])
        x = leaves(packing.total, dtype=torch.float32)
        got, eager = compiled(packing, *x), call(packing, *x)
        assert torch.equal(got, eager)
        grads = [torch.autograd.grad(y, x) for y in (got, eager)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.zeros(1, 5, 1, 8).double()}, r"k: expected shape \[1, 6, 1, 8\], got \[1, 5"),
        ({"q": torch.zeros(1, 6, 8)}, r"q: expected \[B, T, heads, head size\], got \[1, 6, 8\]"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens: expected to end at T = 6"),
        (
            {"implementation": "fast"},
            r"expected one of \['blockwise', 'definition', 'triton'\] or None, got 'fast'",
        ),
        ({"implementation": "triton"}, "expected bfloat16, float16 or float32, got torch.float64"),
    ],
)
def test_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        stick_breaking_attention(**{**make_inputs(6)._asdict(), **changed})


@pytest.mark.parametrize(
    ("dtype", "size", "message"),
    [
        (torch.float32, (65, 8), "at most 64 in torch.float32, got D = 65 and DV = 8"),
        (torch.bfloat16, (8, 129), "at most 128 in torch.bfloat16, got D = 8 and DV = 129"),
    ],
)
def test_triton_is_refused_for_wide_heads(dtype, size, message):
    with pytest.raises(ValueError, match=f"implementation: expected head sizes of {message} with"):
        stick_breaking_attention(*make_inputs(6, size=size, dtype=dtype), implementation="triton")


def test_tiles_do_not_matter(monkeypatch):
    inputs = make_inputs(100, heads=(4, 2))
    expected = run(inputs, "blockwise").named()
    monkeypatch.setattr(stick_breaking, "_TILE", 16)
    for name, got in run(inputs, "blockwise").named().items():
        torch.testing.assert_close(got, expected[name], rtol=1e-11, atol=1e-12)
