"""Random shapes by Hopper's kernels and by the portable ones: hopper_shapes.py FIRST LAST [RUNS].

Each within its roundings of `blockwise` in float64, and of the same bits in every run, while fresh
memory is NaN until it is written. What fails is told at the end, with the rows. A shape that takes
a minute ends the process, with what it was doing. Head sizes and groups are few, since each
compiles its own kernels.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
from collections.abc import Iterator

import torch
from gpu_cases import BF16, DEVICE, RANDOM, beyond, make
from operator_cases import Inputs, run
from torch import Tensor

KINDS = [  # encoding, query heads a key head, head sizes
    ("path_fox", 1, (128, 128)),
    ("path_fox", 2, (64, 128)),
    ("path", 3, (128, 128)),
    ("path", 1, (64, 64)),
    ("fox", 2, (64, 64)),
    ("fox", 1, (128, 128)),
    ("nope", 2, (128, 128)),
]
KERNELS = {"0": "portable", "1": "hopper"}
RUNS = 3
TOLD = 5  # rows of a tensor


def faults(x: Inputs, borders: Tensor, runs: int) -> Iterator[str]:
    """What is wrong with these inputs' results, by either kernels."""
    options = {"grad_dtype": BF16, "cu_seqlens": borders}
    exact = run(x.to(torch.float64), "blockwise", **options)
    for asked, kernels in KERNELS.items():
        os.environ["PATH_ATTENTION_HOPPER"] = asked
        first = run(x, "triton", **options)
        found = beyond(first, exact, BF16, RANDOM)
        for name, message in found.items():
            yield f"{kernels}, {message}; {_rows(first.named()[name], exact.named()[name])}"
        for n in range(1, runs):
            again = run(x, "triton", **options).named()
            for name, value in first.named().items():
                if not torch.equal(value, again[name]):
                    yield f"{kernels}, {name} differs in run {n}; {_rows(again[name], value)}"


def _rows(got: Tensor, expected: Tensor) -> str:
    """Where they differ most: `[1, tokens, heads]`, or vectors of that."""
    error = (got.double() - expected.double()).abs().nan_to_num(nan=torch.inf)[0]
    error = error.flatten(2).amax(2) if error.dim() > 2 else error
    worst, places = error.flatten().topk(min(TOLD, error.numel()))
    told = [
        f"{size:.1e} at token {place // error.shape[1]}, head {place % error.shape[1]}"
        for size, place in zip(worst.tolist(), places.tolist(), strict=True)
    ]
    return f"of {error.numel()} rows {int((error > 0).sum())} differ: {', '.join(told)}"


def main() -> None:
    first, last, runs = (*map(int, sys.argv[1:]), RUNS)[:3]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    failed = []
    for seed in range(first, last):
        faulthandler.dump_traceback_later(60, exit=True)
        draw = random.Random(seed)
        encoding, group, size = draw.choice(KINDS)
        H = draw.randint(1, 3)
        lengths = [
            draw.choice([0, 1, 63, 64, 65, 128, draw.randint(1, 3000)])
            for _ in range(draw.randint(1, 4))
        ]
        T = max(1, sum(lengths))
        lengths[-1] += T - sum(lengths)
        shape = f"{seed} {encoding} {lengths} {H} {group} {size}"
        print(shape, flush=True)
        x = make(encoding, T, BF16, seed=seed, heads=(H * group, H), size=size)
        borders = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        failed += [f"{shape}: {fault}" for fault in faults(x, borders, runs)]
    faulthandler.cancel_dump_traceback_later()
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
