"""Triton's stick-breaking over keys of other tokens = a literal sum, through the interpreter."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import FLOAT32, relative_error
from stick_cases import Inputs, make_inputs
from torch import Tensor

from path_attention.ops.context_split import ContextSplit
from path_attention.ops.context_stick_breaking import context_parallel_stick_breaking
from path_attention.ops.packing import Packing
from path_attention.ops.stick_breaking import stick_breaking_attention
from path_attention.ops.stick_rectangle import StickRectangle

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned_memory")
SCALE = 0.4
NAMES = ("out", "rest", "q", "k", "v")


@pytest.fixture
def panels(monkeypatch) -> None:
    """Panels of two blocks, so that short sequences have several."""
    from path_attention.ops.triton import stick_breaking

    monkeypatch.setattr(stick_breaking, "_SHORTEST_PANEL", 128)
    monkeypatch.setattr(stick_breaking, "_ROWS_AT_ONCE", 1)


def literal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """All keys before all queries, nearest last in memory; quadratic, in the inputs' dtype."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = SCALE * torch.einsum("bihd,bjhd->bihj", q, k)
    kept = F.logsigmoid(-scores)
    nearer = kept.flip(-1).cumsum(-1).flip(-1) - kept
    shares = (F.logsigmoid(scores) + nearer).exp()
    return torch.einsum("bihj,bjhd->bihd", shares, v), kept.sum(-1)


class Above(NamedTuple):
    """What the rest of a walk is to a rectangle."""

    grad_out: Tensor
    taken: Tensor
    farther: Tensor  # through of all farther keys: what is left of the stick, times some number
    grad_rest: Tensor | None


def make(R: int, C: int, *, rest: bool = True, dtype=torch.float32, **options):
    """A rectangle's inputs, and what is above; each number one of `dtype`."""
    q, k, v = make_inputs(max(R, C), dtype=dtype, **options)
    inputs = Inputs(q[:, :R], k[:, :C], v[:, :C])
    rng = torch.Generator().manual_seed(2)
    shape = *inputs.q.shape[:3], v.shape[3]
    grad_out, *rows = (torch.randn(s, generator=rng).to(dtype) for s in (shape, *[shape[:3]] * 3))
    taken, farther, grad_rest = (x.float() for x in rows)
    taken = 3 * taken.abs()
    farther *= (literal(*(x.double() for x in inputs))[1] - taken).exp().float()
    return inputs, Above(grad_out, taken, farther, grad_rest if rest else None)


def expected(inputs: Inputs, above: Above) -> list[Tensor]:
    """By autograd through the literal sum, in float64."""
    leaves = [x.double().requires_grad_() for x in inputs]
    out, rest = literal(*leaves)
    given = above.farther.double()
    given = given if above.grad_rest is None else given + above.grad_rest
    share = (-above.taken.double()).exp()[..., None]
    grads = torch.autograd.grad((out, rest), leaves, (share * above.grad_out, given))
    return [out.detach(), rest.detach(), *grads]


def found(inputs: Inputs, above: Above, triton: bool) -> list[Tensor]:
    rectangle = StickRectangle(*inputs, SCALE, triton)
    out, rest = rectangle.attend()
    own = (above.grad_out.to(out.dtype) * out).sum(-1) * (-above.taken).exp()
    grads = rectangle.backward(above.grad_out, above.taken, own + above.farther, above.grad_rest)
    return [out, rest, *grads]


def check(inputs: Inputs, above: Above, limit: float = FLOAT32) -> None:
    for triton in (True, False):
        pairs = zip(NAMES, found(inputs, above, triton), expected(inputs, above), strict=True)
        for name, got, exact in pairs:
            assert got.dtype == torch.float32
            # float32 feels little of what 16-bit kernels round; the rest is float32's there too
            allowed = limit if triton and name != "rest" else FLOAT32
            error = relative_error(got, exact, 0.1)
            assert error <= allowed, f"{name}, {triton}: error of {error:.2e} > {allowed:.2e}"


@pytest.mark.parametrize(
    ("R", "C", "shift"),
    [(1, 1, 0.0), (64, 64, 0.0), (65, 63, -6.0), (5, 200, -6.0), (150, 130, 0.0), (257, 1, 0.0)],
)
def test_sizes(panels, R, C, shift) -> None:
    check(*make(R, C, B=2, shift=shift))


@pytest.mark.parametrize(
    ("heads", "size"), [((2, 2), (8, 8)), ((6, 2), (5, 64)), ((3, 1), (64, 3))]
)
def test_heads_and_sizes(heads, size) -> None:
    check(*make(70, 100, B=2, heads=heads, size=size))


@pytest.mark.parametrize("rest", [True, False])
def test_sixteen_bits(panels, rest) -> None:
    """(The interpreter multiplies bfloat16 as integers: test_context_stick_breaking.py has it.)"""
    check(*make(150, 200, rest=rest, dtype=torch.float16, shift=-3.0), limit=2**-10)


@pytest.mark.parametrize("chunk", [1, 2])
def test_where_nothing_is_left_nobody_looks(panels, monkeypatch, chunk) -> None:
    """Behind the stick's end, whether these keys used it up or nearer ones had: far v is not read.

    At some two bits a key it is gone after a block or two."""
    from path_attention.ops.triton import stick_breaking, stick_rectangle

    tiles = stick_breaking.choose_tiles(64, torch.float32)
    tiles = dataclasses.replace(tiles, chunk=chunk)
    monkeypatch.setattr(stick_rectangle, "choose_tiles", lambda *_: tiles)
    inputs, above = make(130, 400, shift=2.0, rest=False)
    above = above._replace(farther=0 * above.farther)
    whole = found(inputs, above, True)
    check(inputs, above)
    inputs.v[:, :64] = torch.nan
    for got, exact in zip(found(inputs, above, True)[:3], whole[:3], strict=True):
        assert torch.equal(got, exact)
    inputs.v[:] = torch.nan
    gone = above._replace(taken=torch.full_like(above.taken, 120.0))
    rectangle = StickRectangle(*inputs, SCALE, True)
    grads = rectangle.backward(above.grad_out, gone.taken, 0 * above.farther, None)
    assert all((x == 0).all() for x in grads)


@pytest.mark.parametrize(("rest", "lengths"), [(True, None), (False, [70, 100, 7, 30])])
def test_two_runs_of_one_process(panels, rest, lengths) -> None:
    """Errors are those of one walk by the kernels."""
    packing = None if lengths is None else Packing.from_lengths(lengths)
    split = ContextSplit.of(207, None, packing)
    inputs = make_inputs(207, heads=(4, 2), size=(8, 6), dtype=torch.float32)
    rows = []
    for dtype, options in ((torch.float32, {"split": split}), (torch.float64, {})):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        if options:
            results = context_parallel_stick_breaking(*leaves, implementation="triton", **options)
        else:
            results = stick_breaking_attention(
                *leaves, cu_seqlens=packing, implementation="definition"
            )
        rng = torch.Generator().manual_seed(3)
        above = [torch.randn(x.shape, generator=rng).to(x) for x in results]
        count = 2 if rest else 1
        grads = torch.autograd.grad(results[:count], leaves, above[:count])
        rows.append([*(x.detach() for x in results), *grads])
    for name, got, exact in zip(NAMES, *rows, strict=True):
        assert relative_error(got, exact, 0.1) <= FLOAT32, name
