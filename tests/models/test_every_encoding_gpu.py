"""The layer on a GPU, under every preset and combination, against itself in float64 on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from encoding_cases import CASES
from torch import Tensor

from path_attention import Packing
from path_attention.nn import Attention, AttentionConfig, LayerCache

pytestmark = pytest.mark.gpu
LENGTHS = [3, 0, 65, 1, 131]
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the norm: ten roundings of 16 bits


def make(case: str, dtype: torch.dtype) -> tuple[Attention, Attention, Tensor, Tensor]:
    """The layer on the GPU and in float64, an input that both can hold, token ids."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    layer = Attention(AttentionConfig(**sizes, **CASES[case])).to(dtype)
    x = torch.randn(1, 200, 128).to(dtype)
    ids = torch.randint(0, 40, (1, 200))
    return copy.deepcopy(layer).cuda(), layer.double(), x, ids


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double().cpu() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("packed", [False, True])
def test_output_and_input_gradient(case: str, dtype: torch.dtype, packed: bool) -> None:
    layer, exact, x, ids = make(case, dtype)
    grad = torch.randn(1, 200, 128).to(dtype)
    results = []
    for one, device in ((layer, "cuda"), (exact, "cpu")):
        packing = Packing.from_lengths(LENGTHS, device) if packed else None
        leaf = x.to(device, one.q_proj.weight.dtype).requires_grad_()
        out = one(leaf, token_ids=ids.to(device), packing=packing)
        results.append((out, torch.autograd.grad(out, leaf, grad.to(out))[0]))
    for got, wanted in zip(*results, strict=True):
        assert error(got, wanted.detach()) < ALLOWED[dtype]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("padded", [False, True])
def test_prefill_and_decoding(case: str, dtype: torch.dtype, padded: bool) -> None:
    layer, exact, x, ids = make(case, dtype)
    cache, parts = LayerCache(), []
    with torch.no_grad():
        for start, stop in ((0, 150), (150, 151), (151, 180), (180, 181), (181, 200)):
            valid = torch.ones(1, stop - start, dtype=torch.bool).cuda() if padded else None
            part = x[:, start:stop].cuda()
            names = ids[:, start:stop].cuda()
            parts.append(layer(part, token_ids=names, valid=valid, cache=cache))
        whole = exact(x.double(), token_ids=ids)
    assert error(torch.cat(parts, 1), whole) < ALLOWED[dtype]
