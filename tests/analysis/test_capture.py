"""What is taken from a model's layers is what they attend with, for every encoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from path_attention.analysis.capture import visit_layers
from path_attention.analysis.measure import Probes, measure
from path_attention.analysis.routes import Routes, walk
from path_attention.analysis.summary import summary
from path_attention.models import PRESETS, PathAttentionConfig, PathAttentionForCausalLM
from path_attention.nn.attention import Attention

CASES: dict[str, dict[str, Any]] = {
    **PRESETS,
    "two householders + forget": {"householders_per_token": 2, "decay": "forget"},
    "rope and path": {"transport": "rotary_householder"},
    "rope of values + alibi": {"transport": "rotary", "moves_values": True, "decay": "alibi"},
}
TOKENS = 30


def model_of(name: str) -> PathAttentionForCausalLM:
    torch.manual_seed(0)
    config = PathAttentionConfig(
        **CASES[name],
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        initializer_range=0.3,
    )
    return PathAttentionForCausalLM(config).double().eval()


def read(model: PathAttentionForCausalLM) -> tuple[list[Routes], list[Tensor]]:
    """Each layer's routes, and what its operator made of them `[T, HQ, DV]`."""
    routes: list[Routes] = []
    outputs: list[Tensor] = []
    layers = [m for m in model.modules() if isinstance(m, Attention)]
    hooks = [
        layer.normalizer.register_forward_hook(lambda m, args, out: outputs.append(out[0]))
        for layer in layers
    ]
    ids = torch.randint(50, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    visit_layers(model, ids, lambda n, found: routes.append(found))
    for hook in hooks:
        hook.remove()
    return routes, outputs


def attended(routes: Routes, position: int) -> tuple[Tensor, Tensor]:
    """Scores `[HQ, T]` and output `[HQ, DV]` of one query, from its walk."""
    tiles = list(walk(routes, (position,), 16))[::-1]
    scores = torch.cat([tile.scores[:, 0] for tile in tiles], -1)
    decay = 0 if tiles[0].decay is None else torch.cat([t.decay[:, 0] for t in tiles], -1)
    if routes.normalizer == "softmax":
        weights = (scores + decay).softmax(-1)
    elif routes.normalizer == "linear":
        weights = scores * torch.as_tensor(decay).exp()
    else:
        part = scores[:, :-1].sigmoid()
        left = (1 - part).flip(-1).cumprod(-1).flip(-1) / (1 - part)
        weights = torch.nn.functional.pad(part * left, (0, 1))
    v = routes.v[: position + 1].repeat_interleave(routes.group, 1)
    return scores, torch.einsum("ht,the->he", weights, v)


@pytest.mark.parametrize("name", CASES)
def test_the_walk_makes_the_layers_own_output(name: str) -> None:
    for routes, out in zip(*read(model_of(name)), strict=True):
        for position in (0, 17, TOKENS - 1):
            # Float64 operators of sums of 40 terms; a layer's q, k, v are of order 1 to 30.
            torch.testing.assert_close(
                attended(routes, position)[1], out[position], rtol=1e-9, atol=1e-9
            )


@pytest.mark.parametrize("name", CASES)
def test_one_steps_transport_leads_from_bare_queries_to_bare_keys(name: str) -> None:
    for routes in read(model_of(name))[0]:
        position, G = TOKENS - 1, routes.group
        scores, _ = attended(routes, position)
        key = routes.k if name == "delta_net" else routes.bare_k
        for head in (1, 2):
            x = routes.bare_q[position, head]
            for j in range(position, -1, -1):
                score = routes.scale * (key[j, head // G] @ x)
                assert torch.allclose(score, scores[head, j], rtol=1e-9, atol=1e-9), (head, j)
                x = routes.dense(j, j + 1)[0, head // G] @ x if j else x


@pytest.mark.parametrize("name", ["rope", "path_fox", "rotation_token_qkv", "nope"])
def test_measured_on_a_model(name: str) -> None:
    seen = []
    probes = Probes.spread((16, TOKENS), 4, TOKENS)

    def visit(number: int, routes: Routes) -> None:
        seen.append((number, routes.kind, measure(routes, probes, 8)))

    visit_layers(model_of(name), torch.arange(TOKENS)[None], visit)
    assert [number for number, _, _ in seen] == [0, 1]
    kinds = {"rope": "rotation", "path_fox": "householder", "nope": "none"}
    assert {kind for _, kind, _ in seen} == {kinds.get(name, "rotation")}
    for _, _, totals in seen:
        assert all(x.isfinite().all() for x in totals.sums.values())


def test_bad_models_and_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="model: expected layers of ours"):
        visit_layers(torch.nn.Linear(2, 2), torch.zeros(1, 4, dtype=torch.long), lambda n, r: None)
    with pytest.raises(ValueError, match="input_ids: expected one sequence"):
        visit_layers(model_of("nope"), torch.zeros(2, 4, dtype=torch.long), lambda n, r: None)


def test_queries_that_are_moved_in_another_way_are_measured_where_they_stand() -> None:
    """An encoding of one's own, of which nothing is known but where it moves q and k."""
    rng = torch.Generator().manual_seed(0)
    q, k, bare = (torch.randn(TOKENS, 2, 4, generator=rng).double() for _ in range(3))
    routes = Routes(q, k, k, bare, bare, 0.5)
    assert routes.kind == "other"
    rows = summary(measure(routes, Probes.spread((TOKENS,), 4, TOKENS), 8), (TOKENS,), 8)
    heads = [row for row in rows if row["kind"] == "head"]
    assert all(row["spectral_norm"] is None and row["query_window"] is None for row in heads)
    still = Routes.of(q, k, k, scale=0.5)
    known = summary(measure(still, Probes.spread((TOKENS,), 4, TOKENS), 8), (TOKENS,), 8)
    for row, other in zip(rows, known, strict=True):
        if row["kind"] == "context":
            assert row["far_mass"] == other["far_mass"] and row["gap"] == other["gap"]
