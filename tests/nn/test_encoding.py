"""Transports and decays against their formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from path_attention.nn import AttentionConfig, Chunk, Decay, Moved, Transport, register_transport
from path_attention.nn.encoding import (
    DECAYS,
    TRANSPORTS,
    AccumulatedRotation,
    DeltaRule,
    Forget,
    Householder,
    Rotary,
)
from path_attention.ops.directions import householder_directions

CONFIG = AttentionConfig(
    hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=8, direction_rank=5
)


def inputs(batch: int = 2, length: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor, Chunk]:
    torch.manual_seed(0)
    x = torch.randn(batch, length, 24)
    q, k = torch.randn(batch, length, 6, 8), torch.randn(batch, length, 2, 8)
    v = torch.randn(batch, length, 2, 8)
    return x, q, k, v, Chunk(positions=torch.arange(length).expand(batch, -1))


@pytest.mark.parametrize("rank", [5, None])
@pytest.mark.parametrize("width", [3, 0])
def test_householder_is_its_formula(rank: int | None, width: int) -> None:
    x, q, k, v, chunk = inputs()
    config = replace(CONFIG, direction_rank=rank, direction_conv_size=width, beta_max=1.5)
    layer = Householder(config)
    moved = layer(x, q, k, v, chunk)
    weights = dict(layer.named_parameters())
    if rank is None:
        y = x @ weights["w_proj.weight"].T
    else:
        y = x @ weights["w_proj.0.weight"].T @ weights["w_proj.1.weight"].T
    assert moved.q is q and moved.k is k and moved.v is v and moved.restore is None
    assert moved.w is not None and moved.beta is not None
    w = householder_directions(y, weights.get("w_conv"), 2)
    torch.testing.assert_close(moved.w, w)
    logits = x @ weights["beta_proj.weight"].T + weights["beta_proj.bias"]
    torch.testing.assert_close(moved.beta, 1.5 * logits.sigmoid())
    assert ("w_conv" in weights) == (width > 0)
    assert not any(name.startswith("w_proj") and "bias" in name for name in weights)


def test_bias_starts() -> None:
    x, q, k, v, chunk = inputs()
    config = replace(CONFIG, beta_bias_init=-3.0, forget_bias_init=4.0)
    beta = Householder(config)(0 * x, q, k, v, chunk).beta
    torch.testing.assert_close(beta, torch.full((2, 7, 2), 2 * torch.tensor(-3.0).sigmoid().item()))
    gate = Forget(config)(0 * x, chunk)
    torch.testing.assert_close(
        gate.exp(), torch.full((2, 7, 6), torch.tensor(4.0).sigmoid().item())
    )


def test_rotary_is_a_complex_rotation_of_pairs() -> None:
    x, q, k, v, _ = inputs()
    positions = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 0, 1, 0, 1]])
    layer = Rotary(replace(CONFIG, rope_theta=100.0))
    moved = layer(x, q.double(), k.double(), v.double(), Chunk(positions=positions))
    for before, after in ((q, moved.q), (k, moved.k)):
        angles = positions[..., None, None] * 100.0 ** (-torch.arange(4).double() / 4)
        turned = torch.complex(before.double()[..., :4], before.double()[..., 4:])
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        torch.testing.assert_close(after, torch.cat([turned.real, turned.imag], -1))


def test_rotary_scores_depend_on_distance_alone() -> None:
    x, q, k, v, _ = inputs(1)
    layer = Rotary(CONFIG)
    near, far = (
        layer(
            x, q.double(), k.double(), v.double(), Chunk(positions=torch.arange(7)[None] + offset)
        )
        for offset in (0, 1000)
    )
    scores = [torch.einsum("bihd,bjhd->bhij", m.q[:, :, :2], m.k) for m in (near, far)]
    torch.testing.assert_close(scores[0], scores[1])


def test_several_householders_have_directions_and_strengths_of_their_own() -> None:
    x, q, k, v, chunk = inputs()
    three = Householder(replace(CONFIG, householders_per_token=3))
    moved = three(x, q, k, v, chunk)
    assert moved.w is not None and moved.beta is not None
    assert moved.w.shape == (2, 7, 2, 3, 8) and moved.beta.shape == (2, 7, 2, 3)
    one = Householder(CONFIG)
    for m in range(3):  # one layer a factor, made of the rows that belong to it
        rows = torch.arange(48).view(2, 3, 8)[:, m].flatten()
        heads = torch.arange(6).view(2, 3)[:, m]
        with torch.no_grad():
            one.w_proj.load_state_dict(three.w_proj.state_dict() | {
                "1.weight": three.w_proj[1].weight[rows]
            })  # fmt: skip
            one.w_conv.copy_(three.w_conv[rows])
            one.beta_proj.weight.copy_(three.beta_proj.weight[heads])
            one.beta_proj.bias.copy_(three.beta_proj.bias[heads])
        alone = one(x, q, k, v, chunk)
        torch.testing.assert_close(alone.w, moved.w[:, :, :, m])
        torch.testing.assert_close(alone.beta, moved.beta[:, :, :, m])


ROTATIONS = ("random_position", "random_token", "learned_token", "learned_state")


@pytest.mark.parametrize("angles", ROTATIONS)
def test_rotations_are_the_same_bits_in_chunks_and_documents(angles: str) -> None:
    x, q, k, v, chunk = inputs(2, 100)
    ids = torch.randint(0, 2**31 if angles == "random_token" else 50, (2, 100))
    chunk = replace(chunk, token_ids=ids)
    config = replace(CONFIG, transport="accumulated_rotation", rotation_angles=angles)
    layer = AccumulatedRotation(replace(config, moves_values=True, vocab_size=50))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    whole = layer(x, q, k, v, chunk)
    assert whole.restore is not None
    torch.testing.assert_close(whole.restore(whole.v), v)
    before: dict[str, Tensor] = {}
    for start, stop in ((0, 70), (70, 71), (71, 100)):
        part = slice(start, stop)
        now = Chunk(chunk.positions[:, part], ids[:, part], before=before)
        moved = layer(x[:, part], q[:, part], k[:, part], v[:, part], now)
        if angles != "learned_state":  # a product of matrices need not round alike in both shapes
            assert torch.equal(moved.q, whole.q[:, part])
            assert torch.equal(moved.v, whole.v[:, part])
        torch.testing.assert_close(moved.k, whole.k[:, part], rtol=1e-4, atol=1e-5)
        values, count = now.records["rotation"]
        assert (
            count == 1
            and values.dtype == torch.int64
            and values.shape == (2, len(ids[0, part]), 2, 4)
        )
        before["rotation"] = values[:, -1:]


def test_what_decides_random_rotations() -> None:
    """Positions alone, or ids alone; the seed; not the layer, nor torch's own generator."""
    x, q, k, v, chunk = inputs(1, 6)
    ids = torch.tensor([[4, 9, 4, 4, 9, 1]])
    other = torch.tensor([[4, 9, 4, 4, 2, 1]])

    def keys(angles: str, ids: Tensor, seed: int = 0) -> Tensor:
        torch.randn(3)
        config = replace(
            CONFIG, transport="accumulated_rotation", rotation_angles=angles, rotation_seed=seed
        )
        return AccumulatedRotation(config)(x, q, k, v, replace(chunk, token_ids=ids)).k

    by_position, by_token = (keys(angles, ids) for angles in ROTATIONS[:2])
    assert torch.equal(keys("random_position", other), by_position)
    changed = (keys("random_token", other) != by_token).any(-1).any(-1)[0]
    assert changed.tolist() == [False] * 4 + [True] * 2  # from the other token on
    for angles, before in (("random_position", by_position), ("random_token", by_token)):
        assert not torch.allclose(keys(angles, ids, seed=1), before)
    for angles in ("random_token", "learned_token"):
        config = replace(CONFIG, transport="accumulated_rotation", rotation_angles=angles)
        with pytest.raises(
            ValueError, match=rf"^token_ids: expected int64 .* '{angles}', got None"
        ):
            AccumulatedRotation(config)(x, q, k, v, chunk)


@pytest.mark.parametrize("angles", ["learned_token", "learned_state"])
def test_learned_rotations_are_float32_in_a_bf16_module(angles: str) -> None:
    x, q, k, v, chunk = inputs()
    ids = torch.randint(0, 50, (2, 7))
    config = replace(CONFIG, transport="accumulated_rotation", rotation_angles=angles)
    layer = AccumulatedRotation(replace(config, vocab_size=50)).bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    with torch.autocast("cpu", torch.bfloat16):
        told = replace(chunk, token_ids=ids)
        moved = layer(x.bfloat16(), q.bfloat16(), k.bfloat16(), v.bfloat16(), told)
    weights = {name: p.double() for name, p in layer.named_parameters()}
    if angles == "learned_token":
        u = weights["learned.table.weight"][ids]
    else:
        u = x.bfloat16().double() @ weights["learned.proj.weight"].T
        u = (u + weights["learned.proj.bias"]) / 24
    rope = 10000.0 ** -(torch.arange(4).double() / 4)
    turned = (math.pi * u.unflatten(2, (2, 4)).tanh() - rope).cumsum(1)
    exact = torch.complex(k.bfloat16().double()[..., :4], k.bfloat16().double()[..., 4:])
    exact = exact * torch.polar(torch.ones(()).double(), -turned)
    assert moved.k.dtype == torch.bfloat16
    # One rounding of the result to bfloat16; the angles add nothing that shows.
    torch.testing.assert_close(
        moved.k.double(), torch.cat([exact.real, exact.imag], -1), rtol=2.0**-8, atol=1e-5
    )


def test_learned_rotations_start_as_rope() -> None:
    x, q, k, v, chunk = inputs()
    chunk = replace(chunk, token_ids=torch.randint(0, 50, (2, 7)))
    config = replace(CONFIG, transport="accumulated_rotation", vocab_size=50, rope_theta=300.0)
    for frequencies in (None, [1.0, 0.5, 0.2, 0.0]):
        config = replace(config, rope_frequencies=frequencies)
        rope = Rotary(config)(x, q, k, v, chunk)
        moved = AccumulatedRotation(config)(x, q, k, v, chunk)
        scores = [torch.einsum("bigd,bjhd->bghij", z.q, z.k) for z in (moved, rope)]
        torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)


def test_the_delta_rule_is_its_formula() -> None:
    x, q, k, v, chunk = inputs()
    layer = DeltaRule(replace(CONFIG, transport="delta_rule", normalizer="linear", beta_max=1.0))
    moved = layer(x, q, k, v, chunk)
    beta = (x @ layer.beta_proj.weight.T + layer.beta_proj.bias).sigmoid()
    unit = k / k.norm(dim=-1, keepdim=True)
    for got, expected in ((moved.k, unit), (moved.w, unit), (moved.beta, beta)):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(moved.v, beta[..., None] * v)
    assert moved.q is q


def test_strengths_gates_and_directions_are_float32_in_a_bf16_module() -> None:
    x, q, k, v, chunk = inputs()
    for layer in (Householder(CONFIG), Forget(CONFIG)):
        layer.bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            if isinstance(layer, Householder):
                moved = layer(x.bfloat16(), q.bfloat16(), k.bfloat16(), v.bfloat16(), chunk)
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
    x, q, k, v, chunk = inputs()
    moved = TRANSPORTS[name](CONFIG)(x, q, k, v, chunk)
    assert moved.w is None and moved.beta is None
    assert DECAYS["none"](CONFIG)(x, chunk) is None


def test_householder_records_its_inputs_for_the_next_chunk() -> None:
    x, q, k, v, chunk = inputs()
    layer = Householder(CONFIG)
    whole = layer(x, q, k, v, chunk).w
    assert not chunk.records  # nothing is kept without a cache
    now = replace(chunk, before={}, records={})
    first = layer(x[:, :3], q[:, :3], k[:, :3], v[:, :3], now).w
    values, count = now.records["directions"]
    assert values.shape == (2, 3, 16) and count == 2 and not values.requires_grad
    then = replace(chunk, before={"directions": values[:, -2:]}, records={})
    second = layer(x[:, 3:], q[:, 3:], k[:, 3:], v[:, 3:], then).w
    assert whole is not None and first is not None and second is not None
    torch.testing.assert_close(torch.cat([first, second], 1), whole)


def test_an_encoding_from_outside_the_package() -> None:
    from path_attention.nn import Attention

    @register_transport("doubled")
    class Doubled(Transport):
        def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Moved:
            return Moved(2 * q, k, v)

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
    x, q, k, v, chunk = inputs()
    with pytest.raises(NotImplementedError):
        Transport(CONFIG)(x, q, k, v, chunk)
    with pytest.raises(NotImplementedError):
        Decay(CONFIG)(x, chunk)
