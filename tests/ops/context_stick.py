"""What `context_processes.py` checks of stick-breaking attention over several processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from stick_cases import Inputs, make_inputs
from torch import Tensor

from path_attention.ops.context_split import ContextSplit
from path_attention.ops.context_stick_breaking import context_parallel_stick_breaking
from path_attention.ops.packing import Packing
from path_attention.ops.stick_breaking import stick_breaking_attention


def run(
    inputs: Inputs,
    packing: Packing | None,
    split: ContextSplit | None,
    wanted: tuple[str, ...] = ("out", "rest"),
    **options,
) -> dict[str, Tensor]:
    """Both results and the gradients of a fixed functional of the wanted ones, of all tokens."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    if split is None:
        results = stick_breaking_attention(*leaves, cu_seqlens=packing, **options)
    else:
        local = (split.take(x) for x in leaves)
        results = context_parallel_stick_breaking(*local, split=split, **options)
    named = dict(zip(("out", "rest"), results, strict=True))
    rng = torch.Generator().manual_seed(1)
    above = {}
    for key, x in named.items():
        whole = torch.randn(x.shape[0], inputs.q.shape[1], *x.shape[2:], generator=rng)
        whole = whole.bfloat16().to(x.dtype)  # the same numbers in every dtype
        above[key] = whole if split is None else split.take(whole)
    grads = torch.autograd.grad(
        [named[key] for key in wanted],
        leaves,
        [above[key] for key in wanted],
        allow_unused=True,
        materialize_grads=True,
    )
    found = {key: x.detach() for key, x in named.items()}
    if split is not None:
        found = {key: split.join(x) for key, x in found.items()}
        grads = [split.sum(g.double()).to(g) for g in grads]  # zero but for a process's own tokens
    return {**found, **dict(zip(inputs._fields, grads, strict=True))}


def check(
    name: str, inputs: Inputs, lengths: list[int] | None = None, wanted=("out", "rest"), **options
) -> None:
    """Within 1e-12 of the largest element, or of 1: some roundings of sums of 1000 terms."""
    T = inputs.q.shape[1]
    packing = None if lengths is None else Packing.from_lengths(lengths)
    split = ContextSplit.of(T, dist.group.WORLD, packing)
    found = run(inputs, packing, split, wanted, **options)
    for key, expected in run(inputs, packing, None, wanted, **options).items():
        worst = (found[key] - expected).abs().max().item()
        allowed = 1e-12 * max(1.0, expected.abs().max().item())
        assert worst <= allowed, f"{name}, {key}: off by {worst:.2e}, allowed {allowed:.2e}"


def check_operator(lengths: dict[str, list[int] | None]) -> None:
    for name, documents in lengths.items():
        B = 2 if documents is None else 1
        inputs = make_inputs(200, B=B, heads=(4, 2), size=(8, 6), shift=-5.0)
        check(f"stick, {name}", inputs, documents, implementation="definition")
    many = lengths["many"]
    for wanted in ("out", "rest"):
        check(f"{wanted} alone", make_inputs(200), many, (wanted,))
    for shift in (-8.0, 0.0, 4.0):  # sticks that last over all runs, and that are soon used up
        for T in (2 * dist.get_world_size(), 1043):
            inputs = make_inputs(T, heads=(3, 1), size=(4, 8), shift=shift)
            check(f"{T} tokens, shift {shift}", inputs, scale=0.7, implementation="blockwise")
    steep = make_inputs(300, heads=(2, 2))
    steep.q.mul_(300.0)
    check("large scores", steep)


def check_documents_never_leak(lengths: list[int]) -> None:
    """NaN in the second document is nowhere else, forward and backward."""
    inputs, packing = make_inputs(200), Packing.from_lengths(lengths)
    split = ContextSplit.of(200, dist.group.WORLD, packing)
    start, stop = lengths[0], lengths[0] + lengths[1]
    changed = Inputs(*(x.clone() for x in inputs))
    changed.k[:, start:stop], changed.v[:, start:stop] = 3.0, torch.nan
    one, other = (run(x, packing, split) for x in (inputs, changed))
    same = [*range(start), *range(stop, 200)]
    for key, x in one.items():
        assert torch.equal(x[:, same], other[key][:, same]), key
    assert other["out"][:, start:stop].isnan().any()


def check_sixteen_bits() -> None:
    """A result is rounded twice, by 2⁻⁹ each: by its own run's attention, and merged. So are the
    gradients of both parts, and their sum: 2⁻⁷ is allowed. The log of what remains is float32's."""
    for shift in (-8.0, 0.0):
        exact = make_inputs(400, heads=(4, 2), size=(16, 8), shift=shift, dtype=torch.bfloat16)
        split = ContextSplit.of(400, dist.group.WORLD)
        found = run(exact, None, split)
        for key, expected in run(exact.to(torch.float64), None, None).items():
            worst = (found[key].double() - expected).abs().max() / expected.abs().max()
            allowed = 400 * 2**-24 if key == "rest" else 2**-7
            assert worst <= allowed, f"{key}: off by {worst:.2e} of the largest, > {allowed:.2e}"
