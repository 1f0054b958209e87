"""What is shown of a prediction is what the layer computes, for every encoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from path_attention.models import PRESETS, PathAttentionConfig, PathAttentionForCausalLM
from path_attention.nn import Attention, register_transport
from path_attention.nn.encoding import TRANSPORTS, Chunk, Moved, Transport
from path_attention.nn.normalizer import Normalizer
from path_attention.ops.linear import linear_attention
from path_attention.ops.path import path_attention
from path_attention.ops.stick_breaking import stick_breaking_attention
from path_attention.serving.inspection import Inspection, inspect_token

# Float64 sums of some hundred terms of size 1 to 100: a few hundred roundings of 1e-16 times that.
EXACT = {"rtol": 1e-9, "atol": 1e-10}
OTHERS: dict[str, dict[str, Any]] = {
    "rope + forget": {"transport": "rotary", "decay": "forget"},
    "rope of values too": {"transport": "rotary", "moves_values": True},
    "rope and path + forget": {"transport": "rotary_householder", "decay": "forget"},
    "three householders + forget": {"decay": "forget", "householders_per_token": 3},
    "rope + stick-breaking": {"transport": "rotary", "normalizer": "stick_breaking"},
    "linear rope + alibi": {"transport": "rotary", "decay": "alibi", "normalizer": "linear"},
    "gated delta rule": {"transport": "delta_rule", "decay": "forget", "normalizer": "linear"},
}
CASES = {**PRESETS, **OTHERS}
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "qk_norm": True,
    "initializer_range": 0.3,
}


def make_model(case: str, **overrides: Any) -> PathAttentionForCausalLM:
    torch.manual_seed(0)
    config = PathAttentionConfig(vocab_size=50, **{**SIZES, **CASES[case], **overrides})
    return PathAttentionForCausalLM(config).double().eval()


def make_ids(length: int) -> list[int]:
    return torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(1)).tolist()


class Seen:
    """What a layer of the real model is called with, and what it gives, at every token."""

    def __init__(self, model: PathAttentionForCausalLM, ids: list[int], layer: int) -> None:
        attention = model.model.layers[layer].attention
        assert isinstance(attention, Attention)
        hooks = [
            attention.transport.register_forward_pre_hook(self._raw),
            attention.normalizer.register_forward_hook(self._moved, with_kwargs=True),
        ]
        with torch.no_grad():
            model(torch.tensor([ids], device=model.device))
        for hook in hooks:
            hook.remove()

    def _raw(self, transport: Transport, inputs: tuple[Any, ...]) -> None:
        _, self.q, self.k, _, _ = inputs

    def _moved(self, normalizer: Normalizer, inputs, kwargs, out: Tensor) -> None:
        self.moved, self.log_forget = inputs
        self.scale, self.out = kwargs["scale"], out

    def rows(self, normalizer: str) -> Tensor:
        """Every row of weights `[HQ, T, T]`, as the operator's definition says: values are axes."""
        q, k, v, w, beta, _ = self.moved
        T, H = k.shape[1:3]
        axes = torch.eye(T, dtype=v.dtype)[None, :, None].expand(1, T, H, T)
        given = {"scale": self.scale, "implementation": "definition"}
        if normalizer == "stick_breaking":
            out = stick_breaking_attention(q, k, axes, **given)[0]
        elif normalizer == "linear":
            out = linear_attention(q, k, axes, w, beta, self.log_forget, **given)[0]
        else:
            out = path_attention(q, k, axes, w, beta, self.log_forget, **given)
        return out[0].transpose(0, 1)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_definitions_and_rebuild_the_layers_output(case: str) -> None:
    model, ids = make_model(case), make_ids(150)
    for layer, position in ((0, 1), (1, 70), (2, 140)):
        got = inspect_token(model, ids, position, layer)
        seen = Seen(model, ids, layer)
        exact = seen.rows(model.config.normalizer)[:, position - 1]
        torch.testing.assert_close(got.weights, exact[:, :position], **EXACT)
        assert not exact[:, position:].any()
        v = seen.moved.v[0, :position].repeat_interleave(2, 1)
        rebuilt = torch.einsum("hj,jhe->he", got.weights, v)
        torch.testing.assert_close(rebuilt, seen.out[0, position - 1], **EXACT)


@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_a_score_make_its_weight(case: str) -> None:
    model, ids = make_model(case), make_ids(150)
    got = inspect_token(model, ids, 140, 1)
    logit = got.logit
    if got.normalizer == "softmax":
        assert logit is not None
        exact = logit.exp() / logit.exp().sum(-1, keepdim=True)
    elif got.normalizer == "linear":
        exact, logit = got.match * got.decay.exp(), None
    else:
        assert logit is not None and got.left is not None and not got.decay.any()
        share = 1 / (1 + (-logit).exp())
        exact, left = torch.zeros_like(share), torch.ones(len(share), dtype=share.dtype)
        for j in range(138, -1, -1):
            torch.testing.assert_close(got.left[:, j], left, **EXACT)
            exact[:, j], left = left * share[:, j], left * (1 - share[:, j])
    torch.testing.assert_close(got.weights, exact, **EXACT)
    for row in got.largest(0, 5):
        if logit is not None:
            assert row["logit"] == row["match"] + row["decay"]
        assert row["weight"] == got.weights[0, row["position"]]


@pytest.mark.parametrize("case", CASES)
def test_match_is_the_transported_querys_and_coherence_its_norm_and_direction(case: str) -> None:
    """One factor or rotation matrix at a time, as dense matrices of the route."""
    model, ids = make_model(case), make_ids(40)
    got, seen = inspect_token(model, ids, 38, 1), Seen(model, ids, 1)
    q, k, _, w, beta, _ = seen.moved
    delta = model.config.transport == "delta_rule"
    plain = (k if delta else seen.k)[0].repeat_interleave(2, 1)[:38]
    untransported = seen.scale * torch.einsum("hd,jhd->hj", seen.q[0, 37], plain)
    torch.testing.assert_close(got.untransported, untransported, **EXACT)
    assert got.norm is not None and got.cosine is not None
    for head in range(4):
        vector, raw = q[0, 37, head], seen.q[0, 37, head]
        for j in range(37, -1, -1):
            match = seen.scale * vector @ k[0, j, head // 2]
            torch.testing.assert_close(got.match[head, j], match, **EXACT)
            frame = _frame(model.config.transport, seen, j, head // 2)
            there = frame.T @ vector  # in the frame of a key that isn't turned
            norm, cosine = there.norm() / raw.norm(), there @ raw / (there.norm() * raw.norm())
            torch.testing.assert_close(got.norm[head, j], norm, **EXACT)
            torch.testing.assert_close(got.cosine[head, j], cosine, **EXACT)
            if w is not None:
                factors = zip(
                    w[0, j, head // 2].reshape(-1, 6),
                    beta[0, j, head // 2].reshape(-1),
                    strict=True,
                )
                for w_n, beta_n in reversed(list(factors)):
                    vector = vector - beta_n * (w_n @ vector) * w_n


def _frame(transport: str, seen: Seen, j: int, head: int) -> Tensor:
    """What turns a key at j, from the key itself before and after: pairs (n, n + D/2) turn."""
    if transport not in ("rotary", "accumulated_rotation", "rotary_householder"):
        return torch.eye(6, dtype=torch.float64)
    before, after = seen.k[0, j, head], seen.moved.k[0, j, head]
    turn = torch.complex(*after.chunk(2)) / torch.complex(*before.chunk(2))
    cos, sin = turn.real.diag(), turn.imag.diag()
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def test_rotations_keep_the_norm_and_reflections_lose_only_direction() -> None:
    ids = make_ids(80)
    rope = inspect_token(make_model("rope"), ids, 79, 0)
    path = inspect_token(make_model("path"), ids, 79, 0)
    nope = inspect_token(make_model("nope"), ids, 79, 0)
    assert rope.norm is not None and path.norm is not None and nope.norm is not None
    assert rope.cosine is not None and nope.cosine is not None
    torch.testing.assert_close(rope.norm, torch.ones_like(rope.norm), **EXACT)
    assert rope.cosine.min() < 0.9
    assert (path.norm.diff(dim=-1) >= -1e-12).all() and path.norm.min() < 0.9  # falls going back
    torch.testing.assert_close(nope.cosine, torch.ones_like(nope.cosine), **EXACT)
    torch.testing.assert_close(nope.match, nope.untransported, **EXACT)


def test_masses_add_up_and_curves_are_the_row_by_distance() -> None:
    got = inspect_token(make_model("path_fox"), make_ids(150), 140, 2)
    bands = got.masses()
    assert [(band["from"], band["to"]) for band in bands] == [
        (0, 0), (1, 7), (8, 63), (64, 139)
    ]  # fmt: skip
    for head in range(4):
        assert sum(band["shares"][head] for band in bands) == pytest.approx(1)
    near = got.weights[1, 132:139].sum().item()
    assert bands[1]["shares"][1] == pytest.approx(near)
    curves = got.curves(30)
    distances = curves["distances"]
    assert distances[0] == 0 and distances[-1] == 139 and len(distances) <= 31
    assert distances == sorted(set(distances))
    assert got.norm is not None
    for n, distance in enumerate(distances):
        assert curves["norm"][2][n] == got.norm[2, 139 - distance]
        assert curves["decay"][3][n] == got.decay[3, 139 - distance]


def test_the_first_prediction_has_one_key() -> None:
    got = inspect_token(make_model("path_fox"), make_ids(9), 1, 0)
    assert got.weights.tolist() == [[1.0]] * 4
    assert got.curves(10)["distances"] == [0]
    assert [band["to"] for band in got.masses()] == [0]


def test_a_transport_of_ones_own_has_no_known_route() -> None:
    @register_transport("half_as_long")
    class HalfAsLong(Transport):
        def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Moved:
            return Moved(q, k / 2, v)

    model, ids = make_model("nope", transport="half_as_long"), make_ids(30)
    got = inspect_token(model, ids, 29, 1)
    assert got.norm is None and got.cosine is None
    torch.testing.assert_close(got.match, got.untransported / 2, **EXACT)
    exact = Seen(model, ids, 1).rows("softmax")[:, 28, :29]
    torch.testing.assert_close(got.weights, exact, **EXACT)
    del TRANSPORTS["half_as_long"]


def test_a_model_in_bfloat16_shows_its_own_row() -> None:
    """The layer computes in float32 from what it projects, and rounds its output: to 8 bits."""
    model, ids = make_model("path_fox").bfloat16(), make_ids(60)
    error, size, out, _ = _rebuild(model, ids)
    assert (error <= 2**-8 * out + 1e-5 * size).all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["path_fox", "rope", "fox"])
def test_on_a_gpu_too(case: str) -> None:
    """Kernels round moved queries and keys, weights and the output to 8 bits."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_model(case, **sizes).to("cuda", torch.bfloat16)
    error, size, out, seen = _rebuild(model, make_ids(300))
    q, k = (torch.linalg.vector_norm(x.double(), dim=-1).max() for x in seen.moved[:2])
    scores = 3 * 2**-8 * seen.scale * float(q * k)
    assert (error <= 2**-8 * out + (2**-8 + 2 * scores) * size).all()


def _rebuild(
    model: PathAttentionForCausalLM, ids: list[int]
) -> tuple[Tensor, Tensor, Tensor, Seen]:
    """Of the last layer's output: its error by the weights, Σ weight |v|, its size; the layer."""
    position, layer = len(ids) - 1, model.config.num_hidden_layers - 1
    got, seen = inspect_token(model, ids, position, layer), Seen(model, ids, layer)
    v, out = (x[0].double().cpu() for x in (seen.moved.v, seen.out))
    v = v[:position].repeat_interleave(got.weights.shape[0] // v.shape[1], 1)
    rebuilt = torch.einsum("hj,jhe->he", got.weights, v)
    size = torch.einsum("hj,jhe->he", got.weights, v.abs())
    return (rebuilt - out[position - 1]).abs(), size, out[position - 1].abs(), seen


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("position", {"position": 0}),
        ("position", {"position": 30}),
        ("position", {"position": True}),
        ("position", {"position": 2.0}),
        ("layer", {"layer": 3}),
        ("layer", {"layer": -1}),
        ("token_ids", {"token_ids": [1, 2, 50, 3, 4, 5, 6, 7, 8, 9, 10]}),
        ("token_ids", {"token_ids": [1, 2, -1, 3, 4, 5, 6, 7, 8, 9, 10]}),
        ("model", {"model": torch.nn.Linear(2, 2)}),
    ],
)
def test_bad_arguments_are_named(name: str, arguments: dict[str, Any]) -> None:
    given = {"model": make_model("path"), "token_ids": make_ids(30), "position": 9, "layer": 1}
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        inspect_token(**{**given, **arguments})


def test_scores_that_are_not_finite_are_refused() -> None:
    model = make_model("path")
    torch.nn.init.constant_(model.model.embed_tokens.weight, torch.nan)
    with pytest.raises(ValueError, match="layer: expected finite scores"):
        inspect_token(model, make_ids(9), 5, 0)


def test_nothing_of_the_tokens_after_it_is_read() -> None:
    model, ids = make_model("path_fox"), make_ids(60)
    a, b = (inspect_token(model, x, 30, 2) for x in (ids, ids[:31]))
    assert isinstance(a, Inspection) and torch.equal(a.weights, b.weights)
