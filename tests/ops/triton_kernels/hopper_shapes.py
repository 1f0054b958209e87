"""Random shapes by Hopper's kernels beside the portable ones: hopper_shapes.py FIRST LAST."""

from __future__ import annotations

import os
import random
import sys

import torch
from gpu_cases import BF16, make
from kernel_cases import ENCODINGS
from operator_cases import run


def main() -> None:
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        draw = random.Random(seed)
        H = draw.randint(1, 3)
        lengths = [
            draw.choice([1, 63, 64, 65, 128, draw.randint(1, 3000)])
            for _ in range(draw.randint(1, 4))
        ]
        shape = {
            "heads": (H * draw.randint(1, 3), H),
            "size": draw.choice([(128, 128), (64, 64), (64, 128)]),
        }
        encoding = draw.choice(list(ENCODINGS))
        x = make(encoding, sum(lengths), BF16, seed=seed, **shape)
        borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        results = []
        for asked in ("0", "1"):
            os.environ["PATH_ATTENTION_HOPPER"] = asked
            results.append(run(x, "triton", grad_dtype=BF16, cu_seqlens=borders).named())
        print(seed, encoding, lengths, shape, flush=True)
        for name, portable in results[0].items():
            error = (results[1][name].double() - portable.double()).norm()
            # Each errs by at most 2 roundings of bfloat16 (2⁻⁹ of a number on average), or 4.
            assert error <= 8 * 2**-9 * portable.double().norm() + 1e-6, (name, error.item())


if __name__ == "__main__":
    main()
