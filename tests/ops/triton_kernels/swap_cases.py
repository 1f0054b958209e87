"""Queries that find one key each, if every swap on the way is exact."""

from __future__ import annotations

import torch
from operator_cases import Inputs
from torch import Tensor

from path_attention.benchmarks import inputs


def swapped_inputs(T: int, *, heads: tuple[int, int], D: int) -> tuple[Inputs, Tensor]:
    """The accuracy benchmark's, in float32 on the CPU; `heads` are the queries' and the keys'."""
    swapped, target = inputs.swapped_inputs(T, *heads, D, torch.float32, torch.device("cpu"))
    return Inputs(*swapped[:6]), target
