"""What `test_context_parallel.py` runs under torchrun: every case in one start of the processes."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import context_stick
import torch
import torch.distributed as dist
from operator_cases import Inputs, make_inputs
from torch import Tensor

from path_attention.ops.context_parallel import context_parallel_attention
from path_attention.ops.context_split import ContextSplit
from path_attention.ops.directions import householder_directions
from path_attention.ops.packing import Packing
from path_attention.ops.path import path_attention

ENCODINGS = {
    "path": {"transport": True, "gate": False},
    "path_fox": {"transport": True, "gate": True},
    "fox": {"transport": False, "gate": True},
    "nope": {"transport": False, "gate": False},
}
# one document over everything; runs cut in documents of every kind; documents that end at cuts
LENGTHS = {
    "plain": None,
    "packed": [5, 150, 0, 1, 44],
    "at_cuts": [50, 50, 100],
    "many": [7, 13, 1, 22, 31, 26, 29, 71],
    "all": [200],
}
TOLERANCE = 1e-10


def run(
    inputs: Inputs, split: ContextSplit | None, lse_too: bool, **options: Any
) -> dict[str, Tensor]:
    """Results and gradients of a fixed functional; of this process's tokens under a split."""
    leaves = {
        name: x.clone().requires_grad_() for name, x in inputs._asdict().items() if x is not None
    }
    whole = [leaves.get(name) for name in Inputs._fields]
    local = whole if split is None else [None if x is None else split.take(x) for x in whole]
    if split is None:
        out, lse = path_attention(*local, return_lse=True, **options)
    else:
        out, lse = context_parallel_attention(*local, split=split, return_lse=True, **options)
    rng = torch.Generator().manual_seed(1)
    above = []
    for x in (out, lse):
        shape = [x.shape[0], inputs.q.shape[1], *x.shape[2:]]
        y = torch.randn(shape, dtype=torch.float64, generator=rng).to(x.dtype)
        above.append(y if split is None else split.take(y))
    results, above = ((out, lse), above) if lse_too else ((out,), above[:1])
    grads = torch.autograd.grad(results, list(leaves.values()), above)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, grads, strict=True))}


def check(name: str, inputs: Inputs, lengths: list[int] | None, lse_too: bool, **options) -> None:
    T = inputs.q.shape[1]
    packing = None if lengths is None else Packing.from_lengths(lengths)
    split = ContextSplit.of(T, dist.group.WORLD, packing)
    mine = run(inputs, split, lse_too, **options)
    exact = run(inputs, None, lse_too, cu_seqlens=packing, **options)
    for key, expected in exact.items():
        got = split.join(mine[key]) if key in ("out", "lse") else mine[key].clone()
        if key not in ("out", "lse"):  # of each process's own tokens: zero elsewhere
            dist.all_reduce(got)
        worst = (got - expected).abs().max().item()
        allowed = TOLERANCE * max(1.0, expected.abs().max().item())
        assert worst <= allowed, f"{name}, {key}: off by {worst:.2e}, allowed {allowed:.2e}"


def check_operator() -> None:
    for encoding, kind in ENCODINGS.items():
        for name, lengths in LENGTHS.items():
            B = 2 if lengths is None else 1
            inputs = make_inputs(200, B=B, heads=(4, 2), size=(8, 6), seed=3, **kind)
            check(f"{encoding}, {name}", inputs, lengths, lse_too=name != "packed")
    for T in (2 * dist.get_world_size(), 203, 1043):
        inputs = make_inputs(T, heads=(3, 1), size=(4, 8))
        check(f"{T} tokens", inputs, None, lse_too=False, implementation="blockwise", scale=0.7)
    check("two factors a token", make_inputs(203, factors=2), None, lse_too=True)
    strong = make_inputs(200, heads=(2, 2))
    strong.log_forget[:, ::37] = -torch.inf
    check("gates that shut", strong._replace(beta=2 * torch.ones_like(strong.beta)), None, True)


def check_documents_never_leak() -> None:
    inputs = make_inputs(200, heads=(2, 1))
    split = ContextSplit.of(200, dist.group.WORLD, Packing.from_lengths(LENGTHS["packed"]))
    changed = Inputs(*(None if x is None else x.clone() for x in inputs))
    changed.k[:, 5:155], changed.v[:, 5:155] = 3.0, torch.nan
    outs = [
        split.join(context_parallel_attention(*map(split.take, x), split=split))
        for x in (inputs, changed)
    ]
    same = [*range(5), *range(155, 200)]
    assert torch.equal(outs[0][:, same], outs[1][:, same]) and outs[1][:, 5:155].isnan().any()


def check_halo() -> None:
    """A convolution over cut runs is the one over the whole, forward and backward."""
    count = dist.get_world_size()
    for T, width in ((200, 3), (2 * count, 4)):
        for lengths in (None, [T - 3, 0, 1, 2], [1] * T):
            packing = None if lengths is None else Packing.from_lengths(lengths)
            split = ContextSplit.of(T, dist.group.WORLD, packing)
            B = 2 if lengths is None else 1
            rng = torch.Generator().manual_seed(0)
            x, taps, above = (
                torch.randn(*shape, dtype=torch.float64, generator=rng).requires_grad_(grad)
                for shape, grad in (((B, T, 8), True), ((8, width), True), ((B, T, 2, 4), False))
            )
            whole = householder_directions(x, taps, 2, packing=packing)
            extended = split.extend(split.take(x), width - 1)
            cut = householder_directions(
                extended, taps, 2, packing=split.extended_packing(width - 1)
            )
            cut = split.drop(cut, width - 1)
            torch.testing.assert_close(cut, split.take(whole), rtol=1e-12, atol=1e-12)
            expected = torch.autograd.grad(whole, (x, taps), above)
            found = torch.autograd.grad(cut, (x, taps), split.take(above))
            for one, other in zip(found, expected, strict=True):
                dist.all_reduce(one)
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def check_sixteen_bits() -> None:
    """bfloat16 errs by a few of its own roundings: gates keep their digits."""
    for kind in ENCODINGS.values():
        inputs = make_inputs(400, heads=(4, 2), size=(16, 16), **kind)
        inputs = inputs._replace(**{n: getattr(inputs, n).bfloat16() for n in "qkv"})
        inputs = inputs._replace(
            **{
                n: getattr(inputs, n).float()
                for n in ("w", "beta", "log_forget")
                if getattr(inputs, n) is not None
            }
        )
        split = ContextSplit.of(400, dist.group.WORLD)
        mine, exact = run(inputs, split, True), run(inputs.to(torch.float64), None, True)
        for key, expected in exact.items():
            got = mine[key].double()
            if key in ("out", "lse"):
                got = split.join(got)
            else:
                dist.all_reduce(got)
            worst = (got - expected).abs().max() / expected.abs().max()
            # a few roundings of 2⁻⁸ each: of q̃, k̃, p and o
            assert worst <= 4 * 2**-8, f"{key}: off by {worst / 2**-8:.1f} roundings"


def check_splits() -> None:
    count, rank = dist.get_world_size(), dist.get_rank()
    split = ContextSplit.of(101, dist.group.WORLD, Packing.from_lengths([60, 0, 41]))
    token = torch.arange(101)[None]
    mine = split.take(token)[0].tolist()
    assert mine == [
        t for n in (rank, 2 * count - 1 - rank) for t in range(*list(pairwise(split.borders))[n])
    ]
    assert torch.equal(split.join(split.take(token)), token)
    assert split.positions()[0].tolist() == [t if t < 60 else t - 60 for t in mine]
    ends = {59: -100, 100: -100}
    assert split.targets(token)[0].tolist() == [ends.get(t, t + 1) for t in mine]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    check_splits()
    check_halo()
    check_operator()
    check_documents_never_leak()
    check_sixteen_bits()
    context_stick.check_operator(LENGTHS)
    context_stick.check_documents_never_leak(LENGTHS["packed"])
    context_stick.check_sixteen_bits()
    dist.barrier()
    print("complete", file=sys.stderr)
    dist.destroy_process_group()
