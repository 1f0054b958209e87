"""Transports and decays against their formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from path_attention.nn import AttentionConfig, Chunk, Decay, Moved, Transport, register_transport
from path_attention.nn.encoding import DECAYS, TRANSPORTS, Forget, Householder, Rotary
from path_attention.ops.directions import householder_directions

CONFIG = AttentionConfig(
    hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=8, direction_rank=5
)


def inputs(batch: int = 2, length: int = 7) -> tuple[Tensor, Tensor, Tensor, Chunk]:
    torch.manual_seed(0)
    x = torch.randn(batch, length, 24)
    q, k = torch.randn(batch, length, 6, 8), torch.randn(batch, length, 2, 8)
    return x, q, k, Chunk(positions=torch.arange(length).expand(batch, -1))


@pytest.mark.parametrize("rank", [5, None])
@pytest.mark.parametrize("width", [3, 0])
def test_householder_is_its_formula(rank: int | None, width: int) -> None:
    x, q, k, chunk = inputs()
    config = replace(CONFIG, direction_rank=rank, direction_conv_size=width, beta_max=1.5)
    layer = Householder(config)
    moved = layer(x, q, k, chunk)
    weights = dict(layer.named_parameters())
    if rank is None:
        y = x @ weights["w_proj.weight"].T
    else:
        y = x @ weights["w_proj.0.weight"].T @ weights["w_proj.1.weight"].T
    assert moved.q is q and moved.k is k
    assert moved.w is not None and moved.beta is not None
    w = householder_directions(y, weights.get("w_conv"), 2)
    torch.testing.assert_close(moved.w, w)
    logits = x @ weights["beta_proj.weight"].T + weights["beta_proj.bias"]
    torch.testing.assert_close(moved.beta, 1.5 * logits.sigmoid())
    assert ("w_conv" in weights) == (width > 0)
    assert not any(name.startswith("w_proj") and "bias" in name for name in weights)


def test_bias_starts() -> None:
    x, q, k, chunk = inputs()
    config = replace(CONFIG, beta_bias_init=-3.0, forget_bias_init=4.0)
    beta = Householder(config)(0 * x, q, k, chunk).beta
    torch.testing.assert_close(beta, torch.full((2, 7, 2), 2 * torch.tensor(-3.0).sigmoid().item()))
    gate = Forget(config)(0 * x, chunk)
    torch.testing.assert_close(
        gate.exp(), torch.full((2, 7, 6), torch.tensor(4.0).sigmoid().item())
    )


def test_rotary_is_a_complex_rotation_of_pairs() -> None:
    x, q, k, _ = inputs()
    positions = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 0, 1, 0, 1]])
    layer = Rotary(replace(CONFIG, rope_theta=100.0))
    moved = layer(x, q.double(), k.double(), Chunk(positions=positions))
    for before, after in ((q, moved.q), (k, moved.k)):
        angles = positions[..., None, None] * 100.0 ** (-torch.arange(4).double() / 4)
        turned = torch.complex(before.double()[..., :4], before.double()[..., 4:])
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        torch.testing.assert_close(after, torch.cat([turned.real, turned.imag], -1))


def test_rotary_scores_depend_on_distance_alone() -> None:
    x, q, k, _ = inputs(1)
    layer = Rotary(CONFIG)
    near, far = (
        layer(x, q.double(), k.double(), Chunk(positions=torch.arange(7)[None] + offset))
        for offset in (0, 1000)
    )
    scores = [torch.einsum("bihd,bjhd->bhij", m.q[:, :, :2], m.k) for m in (near, far)]
    torch.testing.assert_close(scores[0], scores[1])


def test_strengths_gates_and_directions_are_float32_in_a_bf16_module() -> None:
    x, q, k, chunk = inputs()
    for layer in (Householder(CONFIG), Forget(CONFIG)):
        layer.bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            if isinstance(layer, Householder):
                moved = layer(x.bfloat16(), q.bfloat16(), k.bfloat16(), chunk)
                assert moved.w is not None and moved.w.dtype == torch.float32
                got, proj = moved.beta, layer.beta_proj
                exact = 2 * proj.double()(x.bfloat16().double()).sigmoid()
            else:
                got, proj = layer(x.bfloat16(), chunk), layer.forget_proj
                exact = torch.nn.functional.logsigmoid(proj.double()(x.bfloat16().double()))
        assert got is not None and got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["none", "rotary"])
def test_transports_without_operator_arguments(name: str) -> None:
    x, q, k, chunk = inputs()
    moved = TRANSPORTS[name](CONFIG)(x, q, k, chunk)
    assert moved.w is None and moved.beta is None
    assert DECAYS["none"](CONFIG)(x, chunk) is None


def test_householder_state_needs_a_cache() -> None:
    x, q, k, chunk = inputs()
    layer = Householder(CONFIG)
    state: dict[str, Tensor] = {}
    whole = layer(x, q, k, chunk).w
    first = layer(x[:, :3], q[:, :3], k[:, :3], replace(chunk, state=state)).w
    assert state["directions"].shape == (2, 2, 16) and not state["directions"].requires_grad
    second = layer(x[:, 3:], q[:, 3:], k[:, 3:], replace(chunk, state=state)).w
    assert whole is not None and first is not None and second is not None
    torch.testing.assert_close(torch.cat([first, second], 1), whole)


def test_an_encoding_from_outside_the_package() -> None:
    from path_attention.nn import Attention

    @register_transport("doubled")
    class Doubled(Transport):
        def forward(self, x: Tensor, q: Tensor, k: Tensor, chunk: Chunk) -> Moved:
            return Moved(2 * q, k)

    try:
        layer = Attention(replace(CONFIG, transport="doubled"))
        plain = Attention(replace(CONFIG, transport="none"))
        plain.load_state_dict(layer.state_dict())
        with torch.no_grad():
            plain.q_proj.weight.mul_(2)
        x = torch.randn(1, 5, 24)
        torch.testing.assert_close(layer(x), plain(x))
    finally:
        del TRANSPORTS["doubled"]


def test_base_classes_do_nothing_silently() -> None:
    x, q, k, chunk = inputs()
    with pytest.raises(NotImplementedError):
        Transport(CONFIG)(x, q, k, chunk)
    with pytest.raises(NotImplementedError):
        Decay(CONFIG)(x, chunk)
