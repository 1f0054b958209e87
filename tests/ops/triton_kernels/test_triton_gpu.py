"""The compiled kernels on an NVIDIA GPU, in the dtypes that models use, at real lengths.

Most tests share one shape (heads 4/2, size 64), so that they share its kernels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from gpu_cases import (
    BF16,
    DEVICE,
    F16,
    F32,
    HARD,
    RANDOM,
    assert_within,
    call,
    check,
    leaves,
    make,
    rounded,
)
from kernel_cases import ENCODINGS, encoded
from operator_cases import Inputs, Run, correlated_directions, run
from swap_cases import swapped_inputs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from path_attention import Packing, path_attention

pytestmark = pytest.mark.gpu


def assert_equal_gradients(first: Any, second: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- Shapes and dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [*((e, BF16) for e in ENCODINGS), ("path_fox", F16), ("path_fox", F32), ("nope", F32)],
)
def test_encodings(encoding, dtype):
    check(make(encoding, 330, dtype, B=2))


def test_the_default_implementation():
    x = make("path_fox", 100)
    assert torch.equal(path_attention(*x), call(*x))


@pytest.mark.parametrize("T", [*range(1, 66), 127, 128, 129])
def test_lengths(T):
    check(make("path_fox", T))


@pytest.mark.parametrize("encoding", ["path_fox", "nope"])
@pytest.mark.parametrize("T", [5 * 64, 1000, 4096, pytest.param(16384, marks=pytest.mark.slow)])
def test_long(T, encoding):
    check(make(encoding, T))


@pytest.mark.parametrize(
    "size",
    [
        (16, 16),
        (128, 128),
        *(
            pytest.param(size, marks=pytest.mark.slow)
            for size in [
                (32, 32),
                (80, 80),
                (96, 96),
                (64, 128),
                (128, 64),
                (1, 3),
                (256, 256),
                (192, 64),
                (64, 200),
            ]
        ),
    ],
)
def test_head_sizes(size):
    check(make("path_fox", 200, size=size))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(6, 2), (8, 2), (3, 1), (2, 2)])
def test_grouped_heads(heads):
    check(make("path_fox", 200, heads=heads))


@pytest.mark.slow
def test_a_crash_of_a_peer():
    check(make("path_fox", 62, B=10, heads=(8, 2), size=(128, 128)))


@pytest.mark.parametrize("scale", [1.0, 1.0001, 0.0, -0.1])
def test_scales(scale):
    check(make("path_fox", 100), scale=scale)


@pytest.mark.parametrize("encoding", ["path_fox", "nope"])
@pytest.mark.parametrize(
    "borders",
    [[0, 128, 128, 256], [0, 0, 0, 7, 7], [0, 1, 3, 10, 18, 33, 49, 66], [0, 131, 139, 330]],
)
def test_packed(borders, encoding):
    cu_seqlens = torch.tensor(borders, device=DEVICE)
    check(make(encoding, borders[-1]), cu_seqlens=cu_seqlens)


def test_packed_to_4096():
    packing = Packing.from_lengths([841, 48, 3207], device=DEVICE)
    check(make("path_fox", 4096), cu_seqlens=packing)


def test_strides_do_not_matter():
    inputs = make("path_fox", 150, B=2)
    expected = run(inputs, "triton")
    inputs = Inputs(*(x.transpose(1, -1).contiguous().transpose(1, -1) for x in inputs))
    assert_within(run(inputs, "triton"), Run(*expected[:2], expected.grads), BF16, RANDOM)


# --- Values --------------------------------------------------------------------------------------


def correlated(T: int) -> Inputs:
    x = encoded("path_fox", T, heads=(4, 2), size=(64, 64))
    assert x.w is not None and x.beta is not None
    w = correlated_directions(tuple(x.w.shape), cosine=0.7)
    return x._replace(w=w, beta=1.9 + 0.05 * x.beta)


def repeated(T: int) -> Inputs:
    x = encoded("path_fox", T, heads=(4, 2), size=(64, 64))
    assert x.w is not None and x.beta is not None
    return x._replace(w=x.w[:, :1].expand_as(x.w).contiguous(), beta=1.5 + 0.249 * x.beta)


def repeated_without_gates(T: int) -> Inputs:
    return repeated(T)._replace(log_forget=None)


def shut(T: int) -> Inputs:
    x = encoded("path_fox", T, heads=(4, 2), size=(64, 64))
    assert x.log_forget is not None
    some = torch.arange(T)[:, None] % 70 == 69
    return x._replace(log_forget=torch.where(some, -50.0, x.log_forget))


def loud(T: int) -> Inputs:
    """As trained models have them: some channels far from zero, scores of ±10."""
    x = encoded("path_fox", T, heads=(4, 2), size=(64, 64))
    x.q[..., 3] += 8
    x.k[..., 3] += 8 * torch.randn(1, T, 1).sign()
    x.v[..., 5] *= 100
    return x


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("hard", [correlated, repeated, repeated_without_gates, shut, loud])
def test_hard(hard, dtype):
    check(rounded(hard(500), dtype), HARD)


@pytest.mark.parametrize("hard", [correlated, repeated, shut])
def test_hard_at_4096(hard):
    check(rounded(hard(4096), BF16), HARD)


@pytest.mark.parametrize("value", [-1e5, -torch.inf, 0.0])
def test_gates(value):
    x = make("path_fox", 200)
    check(x._replace(log_forget=torch.full_like(x.log_forget, value)))


@pytest.mark.parametrize("encoding", ["path", "nope"])
@pytest.mark.parametrize(
    "magnitudes", [(1e6, 1e-6, 1.0), (1e-6, 1e6, 1e6), (1e-6, 1e-6, 1e-6), (1e3, 1e-3, 1e-6)]
)
def test_magnitudes(magnitudes, encoding):
    x = make(encoding, 200)
    x = x._replace(**{n: m * getattr(x, n) for n, m in zip("qkv", magnitudes, strict=True)})
    exact = run(x.to(torch.float64), "definition", grad_dtype=BF16)
    got = run(x, "triton", grad_dtype=BF16)
    for name, value in exact.named().items():
        error = (got.named()[name].double() - value).norm()
        rounding = (value.to(BF16).double() - value).norm()
        limit = RANDOM[BF16][name in ("w", "beta")]
        assert error <= limit * rounding, f"{name}: {(error / rounding).item():.2f} roundings"


@pytest.mark.parametrize(
    "T", [4096, *(pytest.param(T, marks=pytest.mark.slow) for T in (16384, 65536, 2**20))]
)
def test_swaps_find_their_key(T):
    inputs, target = swapped_inputs(T, heads=(4, 2) if T < 2**20 else (2, 1), D=64)
    out = call(*rounded(inputs, BF16), scale=100.0)
    expected = inputs.v.repeat_interleave(2, 2).gather(1, target[..., None].expand(-1, -1, -1, 64))
    assert torch.equal(out.cpu().sign(), expected.sign().to(BF16))


# --- Memory --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("encoding", ["path_fox", "nope"])
def test_fresh_memory_is_not_read(encoding):
    check(make(encoding, 330), cu_seqlens=torch.tensor([0, 131, 139, 330], device=DEVICE))


def test_peak_memory_is_linear():
    peaks = []
    for T in (8192, 16384):
        x = leaves(make("path_fox", T))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(call(*x).sum(), x)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.3 * peaks[0]


@pytest.mark.slow
def test_offsets_past_2_to_the_31():
    # Wrapped reads would be finite and wrong: the last samples are beyond 2³¹ elements of q.
    B, T, HQ, H, D = 36, 16384, 64, 4, 64
    if torch.cuda.get_device_properties(0).total_memory < 120e9:
        pytest.skip("needs 120 GB")

    def sample(n: int) -> list[Tensor]:
        torch.manual_seed(n)
        q, k, v = (torch.randn(1, T, h, D, device=DEVICE).to(BF16) for h in (HQ, H, H))
        w = torch.nn.functional.normalize(torch.randn(1, T, H, D, device=DEVICE), dim=-1)
        return [q, k, v, w, 2 * torch.rand(1, T, H, device=DEVICE)]

    x = [y.new_empty(B, *y.shape[1:]) for y in sample(0)]
    for n in range(B):
        for whole, part in zip(x, sample(n), strict=True):
            whole[n] = part[0]
    assert x[0].numel() > 2**31
    x = [y.requires_grad_() for y in x]
    out = call(*x)
    grads = torch.autograd.grad(out, x, torch.ones_like(out))
    for n in (0, B - 1):
        y = [part.requires_grad_() for part in sample(n)]
        alone = call(*y)
        assert (out[n] - alone[0]).norm() <= 2**-9 * alone.norm()
        for whole, part in zip(grads, torch.autograd.grad(alone.sum(), y), strict=True):
            assert (whole[n] - part[0]).norm() <= 2**-8 * part.norm()


# --- Autograd, compilers, devices ----------------------------------------------------------------


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
@pytest.mark.parametrize("encoding", ["path_fox", "nope"])
def test_a_hundred_gradients_are_one(encoding, heads):
    x = leaves(make(encoding, 1000, B=2, heads=heads))
    out = call(*x)
    first = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
    for _ in range(99):
        assert torch.equal(call(*x), out)
        again = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
        assert_equal_gradients(first, again)


@pytest.mark.parametrize("encoding", ["path_fox", "nope"])
def test_compiled_by_the_default_backend(encoding):
    torch._dynamo.reset()
    function = torch.compile(lambda *x: call(*x).float().square(), fullgraph=True)
    for T in (100, 150, 330):
        x = leaves(make(encoding, T))
        got, eager = function(*x), call(*x).float().square()
        torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-6)
        grads = [torch.autograd.grad(y.sum(), x) for y in (got, eager)]
        assert_equal_gradients(*grads)


def test_compiled_with_cuda_graphs():
    torch._dynamo.reset()
    function = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = leaves(make("path_fox", 150))
        torch.compiler.cudagraph_mark_step_begin()
        out = function(*x)
        grads = torch.autograd.grad(out.float().sum(), x)
        eager = torch.autograd.grad(call(*x).float().sum(), x)
        assert_equal_gradients(grads, eager)


def test_cuda_graph_replay():
    sample = tuple(leaves(make("path_fox", 200)))
    graphed = torch.cuda.make_graphed_callables(call, sample)
    for seed in (1, 2):
        x = leaves(make("path_fox", 200, seed=seed))
        out = graphed(*x)
        grads = [g.clone() for g in torch.autograd.grad(out.float().sum(), x)]
        expected = call(*x)
        assert torch.equal(out, expected)
        assert_equal_gradients(grads, torch.autograd.grad(expected.float().sum(), x))


@pytest.mark.parametrize("lengths", [None, [100, 0, 1, 64, 35]])
def test_checkpointing_changes_nothing(lengths):
    packing = None if lengths is None else Packing.from_lengths(lengths, device=DEVICE)
    x = leaves(make("path_fox", 200))

    def layer(*tensors: Tensor) -> Tensor:
        return call(*tensors, cu_seqlens=packing).float().square()

    plain = torch.autograd.grad(layer(*x).sum(), x)
    out = checkpoint(layer, *x, use_reentrant=False)
    assert isinstance(out, Tensor)
    assert_equal_gradients(plain, torch.autograd.grad(out.sum(), x))


def test_autocast():
    x = [y.float() for y in make("path_fox", 100) if y is not None]
    with torch.autocast("cuda", dtype=BF16):
        out = path_attention(*x)
    assert torch.equal(out, call(*(y.to(BF16) for y in x[:3]), *x[3:]))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    x = make("path_fox", 200)
    first, second = run(x, "triton"), run(x.to("cuda:1"), "triton")
    assert second.out.device == torch.device("cuda:1")
    assert torch.equal(first.out.cpu(), second.out.cpu())
    assert torch.equal(first.grads["q"].cpu(), second.grads["q"].cpu())


TILES = [
    {"forward_keys": 64},
    {"forward_keys": 64, "forward_warps": 8},
    {"forward_stages": 1},
    {"backward_keys": 32},
    {"queries_stages": 1},
    {"backward_queries": 32},
    {"keys_stages": 1},
    {"walk_warps": 8, "block_warps": 8, "local_warps": 8, "block_bwd_warps": 8},
]


@pytest.mark.slow
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_every_choice_of_tiles(tiles, monkeypatch):
    from path_attention.ops.triton import call

    choose = call.choose_tiles
    monkeypatch.setattr(
        call, "choose_tiles", lambda *x, **y: dataclasses.replace(choose(*x, **y), **tiles)
    )
    check(make("path_fox", 330))


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 128])
def test_tiles_for_little_shared_memory(D, monkeypatch):
    from path_attention.ops.triton import call

    monkeypatch.setattr(call, "shared_memory_of", lambda device: 99 * 1024)
    check(make("path_fox", 330, size=(D, D)))
