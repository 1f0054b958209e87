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
DTYPES = [torch.float32, torch.bfloat16]
FLOAT32 = 1e-4  # of the norm; 16 bits: twice what the same layer in 16 bits errs by on the CPU


def make(case: str, dtype: torch.dtype) -> tuple[Attention, Tensor, Tensor]:
    """The layer, an input, token ids."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    options = dict(CASES[case])
    if "rope_frequencies" in options:  # one a pair of this head size
        options["rope_frequencies"] = [0.6**n for n in range(16)]
    layer = Attention(AttentionConfig(**sizes, **options)).to(dtype)
    x = torch.randn(1, 200, 128).to(dtype)
    ids = torch.randint(0, 40, (1, 200))
    return layer, x, ids


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double().cpu() - exact).norm() / exact.norm()).item()


def allowed(layer: Attention, x: Tensor, ids: Tensor, wanted: list[Tensor], **options) -> list:
    if x.dtype == torch.float32:
        return [FLOAT32] * len(wanted)
    rounded = results(layer, x, ids, **options)
    return [2 * error(got, exact) for got, exact in zip(rounded, wanted, strict=True)]


def results(layer: Attention, x: Tensor, ids: Tensor, lengths: list[int] | None = None) -> list:
    """Output and the input's gradient, in the layer's dtype and on its device."""
    weight = layer.q_proj.weight
    packing = None if lengths is None else Packing.from_lengths(lengths, weight.device)
    leaf = x.to(weight).requires_grad_()
    out = layer(leaf, token_ids=ids.to(weight.device), packing=packing)
    above = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    return [out.detach(), torch.autograd.grad(out, leaf, above.to(out))[0]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_output_and_input_gradient(case: str, dtype: torch.dtype, lengths: list | None) -> None:
    layer, x, ids = make(case, dtype)
    wanted = results(copy.deepcopy(layer).double(), x, ids, lengths)
    bounds = allowed(layer, x, ids, wanted, lengths=lengths)
    found = results(layer.cuda(), x, ids, lengths)
    for got, exact, bound in zip(found, wanted, bounds, strict=True):
        assert error(got, exact) < bound


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padded", [False, True])
def test_prefill_and_decoding(case: str, dtype: torch.dtype, padded: bool) -> None:
    layer, x, ids = make(case, dtype)
    wanted = results(copy.deepcopy(layer).double(), x, ids)
    bound = allowed(layer, x, ids, wanted)[0]
    cache, parts, layer = LayerCache(), [], layer.cuda()
    with torch.no_grad():
        for start, stop in ((0, 150), (150, 151), (151, 180), (180, 181), (181, 200)):
            valid = torch.ones(1, stop - start, dtype=torch.bool).cuda() if padded else None
            part = x[:, start:stop].cuda()
            names = ids[:, start:stop].cuda()
            parts.append(layer(part, token_ids=names, valid=valid, cache=cache))
    assert error(torch.cat(parts, 1), wanted[0]) < bound
