"""Layers that compute in float32."""

from __future__ import annotations

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
