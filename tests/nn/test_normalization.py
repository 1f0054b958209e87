"""Layers that compute in float32."""

from __future__ import annotations

import pytest
import torch

from path_attention.nn import Float32Linear, RMSNorm


def test_rms_norm_is_its_formula_and_keeps_the_dtype() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    norm = RMSNorm(8, eps=1e-3).double()
    torch.nn.init.normal_(norm.weight)
    expected = norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), expected)
    assert RMSNorm(8)(x.bfloat16()).dtype == torch.bfloat16


def test_computed_in_float32_after_a_cast_and_under_autocast() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 4, 64).bfloat16()
    for layer in (RMSNorm(64).bfloat16(), Float32Linear(64, 3).bfloat16()):
        exact = layer.double()(x.double())
        layer = layer.bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            got = layer(x)
        expected = exact.to(got.dtype)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert Float32Linear(64, 3).bfloat16()(x).dtype == torch.float32


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_of_16_bits_rounds_once(device: str, dtype: torch.dtype) -> None:
    """With weights of 16 bits or of 32: what float64 gives, rounded; gradients too."""
    torch.manual_seed(0)
    x = (torch.randn(64, 1536) * torch.logspace(-2, 2, 64)[:, None]).to(device, dtype)
    grad, weight = torch.randn(64, 1536).to(device, dtype), 1 + torch.randn(1536).to(device, dtype)

    def results(x: torch.Tensor, kind: torch.dtype) -> list[torch.Tensor]:
        norm, x = RMSNorm(1536).to(device, kind), x.clone().requires_grad_()
        norm.weight.data.copy_(weight)
        y = norm(x)
        return [y, *torch.autograd.grad(y, (x, norm.weight), grad.to(y.dtype))]

    exact = results(x.double(), torch.float64)
    rounding = [(z - z.to(dtype).double()).norm() for z in exact]
    for kind in (dtype, torch.float32):
        for got, right, least in zip(results(x, kind), exact, rounding, strict=True):
            assert (got.double() - right).norm() <= 1.01 * least
