"""Kernels read what they wrote themselves only behind a barrier (`program_order.py`)."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import encoded
from operator_cases import run

pytest.importorskip("triton")
import triton
import triton.language as tl

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture
def unordered():
    from program_order import unordered_reads

    with unordered_reads() as found:
        yield found


@triton.jit
def _turn_kernel(x_ptr, BARRIER: tl.constexpr):
    o = tl.arange(0, 16)
    tl.store(x_ptr + tl.program_id(0) * 16 + o, o)
    if BARRIER:
        tl.debug_barrier()
    turned = tl.load(x_ptr + tl.program_id(0) * 16 + 15 - o)
    tl.store(x_ptr + (1 - tl.program_id(0)) * 16 + o, turned)


@pytest.mark.parametrize("barrier", [False, True])
def test_a_missing_barrier_is_found(barrier, unordered):
    _turn_kernel[(2,)](torch.zeros(32, dtype=torch.int32), BARRIER=barrier)
    assert len(unordered) == 1 - barrier


# No level but the first (a pair, a lone block, an empty document), then several.
@pytest.mark.parametrize(
    ("encoding", "heads", "lengths"),
    [
        ("path", (2, 1), [65]),
        ("path_fox", (1, 1), [128, 64, 0]),
        ("path_fox", (1, 1), [330]),
        ("path_fox", (2, 1), [200]),
    ],
    ids=str,
)
def test_the_operator(encoding, heads, lengths, unordered):
    borders = torch.tensor([0, *lengths]).cumsum(0)
    run(encoded(encoding, sum(lengths), heads=heads), "triton", cu_seqlens=borders)
    assert not unordered
