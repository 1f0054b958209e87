"""Random shapes by Hopper's kernels beside the portable ones: hopper_shapes.py FIRST LAST.

A shape that takes a minute ends the process, with what it was doing. Head sizes and groups are few,
since each compiles its own kernels.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys

import torch
from gpu_cases import BF16, DEVICE, make
from operator_cases import run

KINDS = [  # encoding, query heads a key head, head sizes
    ("path_fox", 1, (128, 128)),
    ("path_fox", 2, (64, 128)),
    ("path", 3, (128, 128)),
    ("path", 1, (64, 64)),
    ("fox", 2, (64, 64)),
    ("fox", 1, (128, 128)),
    ("nope", 2, (128, 128)),
]


def main() -> None:
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
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
        print(seed, encoding, lengths, H, group, size, flush=True)
        x = make(encoding, T, BF16, seed=seed, heads=(H * group, H), size=size)
        borders = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        results = []
        for asked in ("0", "1"):
            os.environ["PATH_ATTENTION_HOPPER"] = asked
            results.append(run(x, "triton", grad_dtype=BF16, cu_seqlens=borders).named())
        for name, portable in results[0].items():
            error = (results[1][name].double() - portable.double()).norm()
            # Each errs by at most 2 roundings of bfloat16 (2⁻⁹ of a number on average), or 4.
            assert error <= 8 * 2**-9 * portable.double().norm() + 1e-6, (name, error.item())


if __name__ == "__main__":
    main()
