"""The attention layer: one path for training, prefill and decoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from path_attention import Packing, path_attention
from path_attention.nn import Attention, AttentionConfig, Chunk, LayerCache

CHOICES = [
    (transport, decay)
    for transport in ("householder", "rotary", "none")
    for decay in ("forget", "none")
]


def make(transport: str, decay: str, **changes) -> Attention:
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "value_head_dim": 6, "qk_norm": True}
    config = AttentionConfig(
        **{
            "hidden_size": 24,
            "num_attention_heads": 4,
            "direction_rank": 5,
            "transport": transport,
            "decay": decay,
            **sizes,
            **changes,
        }
    )
    layer = Attention(config).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def literal(layer: Attention, x: Tensor, **chunk) -> Tensor:
    """The layer's formula on a whole sequence, with the literal operator."""

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return weight * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    q = (x @ layer.q_proj.weight.T).unflatten(2, (4, 8))
    k = (x @ layer.k_proj.weight.T).unflatten(2, (2, 8))
    v = (x @ layer.v_proj.weight.T).unflatten(2, (2, 6))
    q, k = norm(q, layer.q_norm.weight), norm(k, layer.k_norm.weight)
    context = Chunk(positions=torch.arange(x.shape[1]).expand(len(x), -1))
    moved = layer.transport(x, q, k, v, context)
    out = path_attention(
        moved.q, moved.k, moved.v, moved.w, moved.beta, layer.decay(x, context),
        implementation="definition",
    )  # fmt: skip
    return out.flatten(2) @ layer.o_proj.weight.T


@pytest.mark.parametrize(("transport", "decay"), CHOICES)
def test_equals_its_formula(transport: str, decay: str) -> None:
    layer, x = make(transport, decay), torch.randn(2, 9, 24, dtype=torch.float64)
    torch.testing.assert_close(layer(x), literal(layer, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("transport", "decay"), CHOICES)
def test_chunks_of_padded_rows_equal_the_whole(transport: str, decay: str) -> None:
    """Norms, gates, positions and convolution are those of training, whatever the chunks."""
    layer = make(transport, decay)
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    cache, got = LayerCache(), [[], []]
    starts = [0, 0]
    with torch.no_grad():
        for lengths in ([4, 2], [1, 1], [0, 3], [1, 1], [5, 4]):
            chunk = torch.randn(2, max(lengths), 24, dtype=torch.float64)
            for row, n in enumerate(lengths):
                chunk[row, :n] = x[row, starts[row] : starts[row] + n]
            valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
            out = layer(chunk, valid=valid, cache=cache)
            for row, n in enumerate(lengths):
                got[row].append(out[row, :n])
                starts[row] += n
        for row in range(2):
            torch.testing.assert_close(torch.cat(got[row]), layer(x)[row], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("transport", "decay"), CHOICES)
def test_packed_equals_separate_with_gradients(transport: str, decay: str) -> None:
    layer = make(transport, decay)
    lengths = [3, 0, 1, 6]
    x = torch.randn(1, 10, 24, dtype=torch.float64, requires_grad=True)
    packed = layer(x, packing=Packing.from_lengths(lengths))
    apart = torch.cat([layer(part) for part in x.split(lengths, 1) if part.shape[1]], 1)
    torch.testing.assert_close(packed, apart, rtol=1e-9, atol=1e-9)
    grad = torch.randn_like(packed)
    parameters = [x, *layer.parameters()]
    for a, b in zip(
        torch.autograd.grad(packed, parameters, grad),
        torch.autograd.grad(apart, parameters, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_qk_norm_is_a_choice() -> None:
    names = {name for name, _ in make("none", "none", qk_norm=False).named_parameters()}
    assert names == {f"{p}_proj.weight" for p in "qkvo"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.zeros(4, 24)}, "x: expected"),
        ({"positions": torch.zeros(2, 5)}, "positions: expected"),
        ({"valid": torch.ones(1, 4)}, "valid: expected"),
        ({"packing": Packing.from_lengths([4]), "cache": LayerCache()}, "cache: expected None"),
        ({"packing": Packing.from_lengths([4]), "valid": torch.ones(2, 4)}, "valid: expected None"),
    ],
)
def test_bad_input_is_refused(change: dict, named: str) -> None:
    arguments = {"x": torch.zeros(2, 4, 24, dtype=torch.float64), **change}
    with pytest.raises(ValueError, match=named):
        make("householder", "none")(**arguments)


def test_a_cache_of_another_batch_is_refused() -> None:
    layer, cache = make("householder", "none"), LayerCache()
    layer(torch.zeros(2, 3, 24, dtype=torch.float64), cache=cache)
    with pytest.raises(ValueError, match="cache: expected 1 rows"):
        layer(torch.zeros(1, 3, 24, dtype=torch.float64), cache=cache)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 7, "transport": "rotary"}, "head_dim"),
        ({"value_head_dim": 2.5}, "value_head_dim"),
        ({"direction_rank": 0}, "direction_rank"),
        ({"direction_conv_size": -1}, "direction_conv_size"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"beta_max": 0.0}, "beta_max"),
        ({"beta_max": 2.001}, "beta_max"),
        ({"beta_max": float("nan")}, "beta_max"),
        ({"beta_max": "2"}, "beta_max"),
        ({"beta_bias_init": None}, "beta_bias_init"),
        ({"beta_bias_init": float("inf")}, "beta_bias_init"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_frequencies": 1.0}, "rope_frequencies"),
        ({"rope_frequencies": [1.0, "0.1", 0.01, 0.001]}, "rope_frequencies"),
        ({"attention_scale": True}, "attention_scale"),
        ({"transport": ["householder"]}, "transport"),
        ({"transport": "householders"}, "transport"),
        ({"decay": "alibis"}, "decay"),
    ],
)
def test_bad_configurations_are_refused(change: dict, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        AttentionConfig(**{"hidden_size": 32, "num_attention_heads": 4, **change})
