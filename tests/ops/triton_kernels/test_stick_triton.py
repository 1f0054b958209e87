"""triton stick-breaking = definition, through the interpreter: float32 and float16."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch._dynamo.testing
from kernel_cases import FLOAT32, relative_error
from stick_cases import Inputs, make_inputs, run
from torch.utils.checkpoint import checkpoint

from path_attention import Packing
from path_attention.ops.stick_breaking import stick_breaking_attention

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned_memory")
LENGTHS = [70, 0, 1, 64, 65]
T = sum(LENGTHS)


@pytest.fixture
def panels(monkeypatch) -> None:
    """Panels of two blocks, so that short sequences have several."""
    from path_attention.ops.triton import stick_breaking

    monkeypatch.setattr(stick_breaking, "_SHORTEST_PANEL", 128)
    monkeypatch.setattr(stick_breaking, "_ROWS_AT_ONCE", 1)


def check(inputs: Inputs, limit: float = FLOAT32, **options) -> None:
    """Float32 inputs, against the definition in float64."""
    exact = run(inputs.to(torch.float64), "definition", **options)
    got = run(inputs, "triton", **options).named()
    for name, value in exact.named().items():
        error = relative_error(got[name], value, 0.1)
        assert error <= limit, f"{name}: error of {error:.2e}, allowed {limit:.2e}"


def make(tokens: int, **options) -> Inputs:
    return make_inputs(tokens, dtype=torch.float32, **options)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 129, 200])
def test_lengths(tokens):
    check(make(tokens))


@pytest.mark.parametrize("tokens", [128, 129, 257, 400])
@pytest.mark.parametrize("shift", [0.0, -6.0])
def test_panels(panels, tokens, shift):
    check(make(tokens, heads=(2, 1), shift=shift))


@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize(("chunk", "dtype"), [(1, torch.float32), (2, torch.float16)])
def test_what_lies_behind_the_stick_s_end_is_skipped(panels, monkeypatch, chunk, rest, dtype):
    from path_attention.ops.triton import stick_breaking

    tiles = stick_breaking.choose_tiles(64, dtype)
    tiles = dataclasses.replace(tiles, chunk=chunk)
    monkeypatch.setattr(stick_breaking, "choose_tiles", lambda *_: tiles)
    # Some two bits a key: gone after a block or two.
    inputs = make_inputs(400, shift=2.0, dtype=dtype)
    inputs.q[:, 190:200] *= 0.01  # these queries' sticks last for all of their block
    inputs.k[:, :60, :, 0] = -10.0  # and here nothing is taken
    exact = run(inputs.to(torch.float64), "definition", rest=rest, grad_dtype=dtype).named()
    got = run(inputs, "triton", rest=rest, grad_dtype=dtype).named()
    for name, value in exact.items():
        limit = FLOAT32 if dtype == torch.float32 or name == "rest" else 2**-9
        assert relative_error(got[name], value, 0.1) <= limit, name
    if not rest and dtype == torch.float32:  # nobody looks at far values: they may be NaN
        inputs.v[:, :64] = torch.nan
        far = run(inputs, "triton", rest=False, grad_dtype=dtype).named()
        assert torch.equal(far["out"][:, 336:], got["out"][:, 336:])
        assert torch.equal(far["q"][:, 336:], got["q"][:, 336:])
        assert torch.equal(far["v"][:, 192:], got["v"][:, 192:])


def test_a_gradient_of_log_remaining_keeps_only_the_blocks_that_have_one(panels, monkeypatch):
    """Zeros ask nothing: what is far behind the stick's end is skipped as it is without them."""
    from path_attention.ops.triton import stick_breaking

    tiles = dataclasses.replace(stick_breaking.choose_tiles(64, torch.float32), chunk=1)
    monkeypatch.setattr(stick_breaking, "choose_tiles", lambda *_: tiles)
    inputs = make(400, shift=2.0)
    above = torch.randn(1, 400, 2)
    above[:, 64:] = 0  # the first block's queries alone

    def grads(dtype, implementation, *numbers):
        leaves = [x.detach().to(dtype).requires_grad_() for x in numbers]
        results = stick_breaking_attention(*leaves, implementation=implementation)
        return torch.autograd.grad(results, leaves, [torch.ones_like(results[0]), above.to(dtype)])

    got = grads(torch.float32, "triton", *inputs)
    for x, exact in zip(got, grads(torch.float64, "definition", *inputs), strict=True):
        assert relative_error(x, exact, 0.1) <= FLOAT32
    inputs.v[:, :64] = torch.nan
    far = grads(torch.float32, "triton", *inputs)
    assert torch.equal(far[0][:, 336:], got[0][:, 336:])
    assert torch.equal(far[2][:, 192:], got[2][:, 192:])


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("size", [(8, 8), (16, 3), (5, 64), (64, 3)])
def test_heads_and_sizes(heads, size):
    check(make(100, B=2, heads=heads, size=size))


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.5])
def test_scales(scale):
    check(make(100), scale=scale)


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0, 7, 0], [130, 131, 1], [64, 64, 256], []])
def test_packed(panels, lengths):
    check(make(sum(lengths), heads=(4, 2)), cu_seqlens=Packing.from_lengths(lengths))


@pytest.mark.parametrize(("B", "tokens"), [(2, 0), (0, 5)])
def test_nothing_gives_nothing(B, tokens):
    check(make(tokens, B=B, heads=(4, 2), size=(8, 3)))


def test_documents_do_not_see_each_other():
    inputs, packing = make(T), Packing.from_lengths(LENGTHS)
    before = run(inputs, "triton", cu_seqlens=packing).named()
    for x in inputs:
        x[:, 71:135] = torch.nan
    after = run(inputs, "triton", cu_seqlens=packing).named()
    for name, x in before.items():
        for rows in (slice(0, 71), slice(135, T)):
            assert torch.equal(x[:, rows], after[name][:, rows]), name


@pytest.mark.parametrize("shift", [1e3, -1e3, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_huge_logits_are_finite_and_right(dtype, shift):
    inputs = make_inputs(150, shift=shift / 8**0.5, dtype=dtype)
    # (Sums of 150 score gradients of log_remaining times keys of 1e3 exceed float16's range.)
    options = {"scale": 1.0, "grad_dtype": dtype, "rest": dtype == torch.float32}
    got = run(inputs, "triton", **options).named()
    exact = run(inputs.to(torch.float64), "definition", **options).named()
    for name, value in exact.items():
        # A logit of 1e3 is rounded by up to 2⁻¹⁵; gradients of 0 are allowed that much noise.
        limit = 2**-13 if dtype == torch.float32 else 2**-9
        assert got[name].isfinite().all(), name
        assert relative_error(got[name], value, 0.1) <= limit, name


def test_a_used_up_stick_leaves_no_noise_in_gradients():
    inputs = make(500, heads=(1, 1))
    inputs.q[:], inputs.k[:] = 1, 0.5
    got = run(inputs, "triton", scale=1.0, rest=False).grads["q"]
    exact = run(inputs.to(torch.float64), "definition", scale=1.0, rest=False).grads["q"]
    assert (got - exact).abs().max() <= 64 * 2**-24 * inputs.v.abs().max()


@pytest.mark.parametrize("shift", [0.0, -4.0])
@pytest.mark.parametrize("grad_scale", [1.0, 2.0**-20])
def test_float16(shift, grad_scale):
    # (The interpreter multiplies bfloat16 as integers: test_stick_gpu.py has it.)
    x = [y.requires_grad_() for y in make_inputs(150, shift=shift, dtype=torch.float16)]
    y = [z.detach().double().requires_grad_() for z in x]
    grads = []
    for inputs, implementation in ((x, "triton"), (y, "definition")):
        out, _ = stick_breaking_attention(*inputs, implementation=implementation)
        above = torch.ones_like(out) * grad_scale
        grads.append([out, *torch.autograd.grad(out, inputs, above)])
    for got, exact in zip(*grads, strict=True):
        # Rounded below float16's normal numbers to multiples of 2⁻²⁴.
        rounding = (exact.half().double() - exact).norm()
        assert (got.double() - exact).norm() <= 4 * rounding


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_result_alone(which):
    results = []
    for implementation, dtype in (("triton", torch.float32), ("definition", torch.float64)):
        x = [y.requires_grad_() for y in make_inputs(90, dtype=dtype)]
        result = stick_breaking_attention(*x, implementation=implementation)[which]
        grads = torch.autograd.grad(result.sum(), x, allow_unused=True, materialize_grads=True)
        results.append(grads)
    for got, exact in zip(*results, strict=True):
        assert (got - exact).norm() <= FLOAT32 * max(exact.norm().item(), 1.0)


def spaced(x: torch.Tensor) -> torch.Tensor:
    """The same values, tokens and heads swapped in memory, rows further apart than needed."""
    wide = x.new_full((x.shape[0] + 1, x.shape[2], x.shape[1] + 3, *x.shape[3:]), torch.nan)
    return wide[: x.shape[0], :, 1 : x.shape[1] + 1].transpose(1, 2).copy_(x)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind an aligned address."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("layout", [spaced, unaligned])
@pytest.mark.parametrize("tokens", [128, 100])
def test_strides_do_not_matter(layout, tokens):
    inputs = make(tokens, B=2, heads=(4, 2))
    expected = run(inputs, "triton").named()
    x = [layout(y).requires_grad_() for y in inputs]
    out, rest = stick_breaking_attention(*x, implementation="triton")
    rng = torch.Generator().manual_seed(1)  # as in `run`
    above = [torch.randn(y.shape, dtype=torch.float64, generator=rng).float() for y in (out, rest)]
    grads = torch.autograd.grad((out, rest), x, [layout(y) for y in above])
    for got, exact in zip((out, rest, *grads), expected.values(), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [128, 100])
def test_an_expanded_output_gradient(tokens):
    x = [y.requires_grad_() for y in make(tokens)]
    out, _ = stick_breaking_attention(*x, implementation="triton")
    summed = torch.autograd.grad(out.sum(), x, retain_graph=True)
    given = torch.autograd.grad(out, x, torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(summed, given, strict=True))


def test_gradients_repeat():
    x = [y.requires_grad_() for y in make(150, heads=(4, 2))]
    results = []
    for _ in range(2):
        out, rest = stick_breaking_attention(*x, implementation="triton")
        results.append(torch.autograd.grad(out.square().sum() + rest.sum(), x))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_second_derivatives_are_refused():
    x = [y.requires_grad_() for y in make(20)]
    out, _ = stick_breaking_attention(*x, implementation="triton")
    (grad,) = torch.autograd.grad(out.sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="stick-breaking's triton is differentiable once"):
        grad.sum().backward()


@pytest.mark.parametrize("packing", [None, Packing.from_lengths(LENGTHS)])
def test_registered_as_torch_asks(packing):
    from path_attention.ops.triton import stick_breaking  # noqa: F401, registers

    x = [y.requires_grad_() for y in make(T)]
    lengths = None if packing is None else packing.host_lengths
    torch.library.opcheck(
        torch.ops.path_attention.triton_stick_breaking.default, (*x, 0.5, lengths)
    )


def test_checkpointing_changes_nothing():
    x = [y.requires_grad_() for y in make(T)]

    def call(*tensors):
        packing = Packing.from_lengths(LENGTHS)
        out, _ = stick_breaking_attention(*tensors, cu_seqlens=packing, implementation="triton")
        return out.square()

    plain = torch.autograd.grad(call(*x).sum(), x)
    checkpoint(call, *x, use_reentrant=False).sum().backward()
    assert all(torch.equal(a, y.grad) for a, y in zip(plain, x, strict=True))


def test_compiled_equals_eager_over_packings():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(packing, *x):
        out, rest = stick_breaking_attention(*x, cu_seqlens=packing, implementation="triton")
        return out.square().sum() + rest.sum()

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for n in range(6):
        packing = Packing.from_lengths([3 + n, *range(n % 3), 70])
        x = [y.requires_grad_() for y in make(packing.total, heads=(1, 1))]
        got, eager = compiled(packing, *x), call(packing, *x)
        assert torch.equal(got, eager)
        grads = [torch.autograd.grad(y, x) for y in (got, eager)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert counter.frame_count <= 3


def test_every_query_meets_every_earlier_key_once():
    from path_attention.ops.triton.stick_breaking import make_plan

    lengths, size = (640, 1, 130, 0, 64), 3
    plan = make_plan(lengths, size, torch.device("cpu"))
    sizes = [10, 1, 3, 1]
    assert sorted(plan.order.tolist()) == list(range(sum(sizes)))
    met, base = set(), {}
    for n, blocks in enumerate(sizes):
        base.update({sum(sizes[:n]) + i: (n, i) for i in range(blocks)})
    for panel in plan.panels:
        first_note = dict(panel.queries.tolist())
        places = [note + j for block, note in first_note.items() for j in range(base[block][1] + 1)]
        assert len(set(places)) == len(places) and max(places) < panel.notes
        for block, own, first, at, count, stride in panel.keys.tolist():
            sequence, j = base[block]
            if own >= 0:
                assert own == first_note[block] + j
                met.add((block, block))
            for r in range(count):
                assert base[first + r][0] == sequence
                assert at + r * stride == first_note[first + r] + j
                met.add((first + r, block))
    assert met == {
        (a, b) for a in base for b in base if base[a][0] == base[b][0] and base[a][1] >= base[b][1]
    }
