"""Every preset and a dozen free combinations: exact, trainable, decodable, saved and packed."""

from __future__ import annotations

import pytest
import torch
from encoding_cases import CASES
from literal_layer import alibi_slopes, literal_layer
from torch import Tensor

from path_attention import Packing
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.nn import Attention, AttentionConfig, LayerCache
from path_attention.nn.encoding import Alibi

EXACT = {"rtol": 1e-8, "atol": 1e-9}
SIZES = {
    "hidden_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "direction_rank": 5,
    "qk_norm": True,
}


def make_layer(case: str) -> tuple[Attention, AttentionConfig]:
    """A layer in float64, no parameter at its start."""
    torch.manual_seed(0)
    fields = {"vocab_size": 40, **SIZES, **CASES[case]}
    if not fields.get("moves_values"):
        fields["value_head_dim"] = 5
    config = AttentionConfig(**fields)
    layer = Attention(config).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer, config


def make_input(batch: int, length: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 40, (batch, length))
    return torch.randn(batch, length, 12, dtype=torch.float64, requires_grad=True), ids


@pytest.mark.parametrize("case", CASES)
def test_output_and_all_gradients_are_the_literal_definitions(case: str) -> None:
    layer, config = make_layer(case)
    x, ids = make_input(2, 9)
    got = layer(x, token_ids=ids)
    parameters = dict(layer.named_parameters())
    exact = literal_layer(config, parameters, x, ids)
    torch.testing.assert_close(got, exact, **EXACT)
    leaves = [x, *parameters.values()]
    grad = torch.randn_like(exact)
    grads = [torch.autograd.grad(y, leaves, grad) for y in (got, exact)]
    for name, a, b in zip(("x", *parameters), *grads, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}", **EXACT)
        assert b.abs().max() > 0, name


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_are_separate(case: str) -> None:
    layer, _ = make_layer(case)
    lengths = [3, 0, 1, 66, 10]
    x, ids = make_input(1, 80)
    packed = layer(x, token_ids=ids, packing=Packing.from_lengths(lengths))
    parts = zip(x.split(lengths, 1), ids.split(lengths, 1), strict=True)
    apart = torch.cat([layer(a, token_ids=b) for a, b in parts if a.shape[1]], 1)
    torch.testing.assert_close(packed, apart, **EXACT)
    grad = torch.randn_like(packed)
    leaves = [x, *layer.parameters()]
    grads = [torch.autograd.grad(y, leaves, grad) for y in (packed, apart)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("case", CASES)
def test_chunks_of_padded_rows_are_the_whole(case: str) -> None:
    """Prefill, decoding, and chunks that are padded with garbage, of rows apart in length."""
    layer, _ = make_layer(case)
    x, ids = make_input(2, 80)
    plain, padded = LayerCache(), LayerCache()
    with torch.no_grad():
        whole = layer(x, token_ids=ids)
        parts = []
        for start, stop in ((0, 66), (66, 67), (67, 68), (68, 80)):
            part = layer(x[:, start:stop], token_ids=ids[:, start:stop], cache=plain)
            parts.append(part)
        torch.testing.assert_close(torch.cat(parts, 1), whole, **EXACT)
        assert plain.seen == 80 and plain.lengths.tolist() == [80, 80]
        starts, got = [0, 0], [[], []]
        for lengths in ([4, 2], [1, 1], [0, 3], [65, 1], [5, 4]):
            width = max(lengths)
            chunk, names = torch.randn(2, width, 12).double(), torch.randint(0, 40, (2, width))
            for row, n in enumerate(lengths):
                chunk[row, :n] = x[row, starts[row] : starts[row] + n]
                names[row, :n] = ids[row, starts[row] : starts[row] + n]
            valid = torch.arange(width) < torch.tensor(lengths)[:, None]
            out = layer(chunk, token_ids=names, valid=valid, cache=padded)
            assert out.isfinite().all()
            for row, n in enumerate(lengths):
                got[row].append(out[row, :n])
                starts[row] += n
        for row in range(2):
            torch.testing.assert_close(torch.cat(got[row]), whole[row, : starts[row]], **EXACT)


@pytest.mark.parametrize("case", CASES)
def test_sealed_units_are_the_whole(case: str) -> None:
    """A prompt of several units, steps and a chunk over borders; then drafts taken back."""
    layer, _ = make_layer(case)
    x, ids = make_input(2, 420)
    cache, parts, start = LayerCache(), [], 0
    with torch.no_grad():
        whole = layer(x, token_ids=ids)
        for n in (250, 1, 1, 100, 1, 5):
            span = slice(start, start + n)
            parts.append(layer(x[:, span], token_ids=ids[:, span], cache=cache))
            start += n
        torch.testing.assert_close(torch.cat(parts, 1), whole[:, :358], **EXACT)
        assert cache.last_border == 256 if cache.kind != "plain" else cache.unit == 64
        for _ in range(3):
            draft = torch.randn(2, 20, 12, dtype=torch.float64)
            layer(draft, token_ids=ids[:, :20], cache=cache)
            cache.crop(start)
            span = slice(start, start + 20)
            got = layer(x[:, span], token_ids=ids[:, span], cache=cache)
            torch.testing.assert_close(got, whole[:, span], **EXACT)
            start += 20


@pytest.mark.parametrize("case", CASES)
def test_trains_50_steps_saves_and_loads_bitwise(case: str, tmp_path) -> None:
    """A batch is learned by heart: context alone tells its tokens apart."""
    torch.manual_seed(2)
    config = PathAttentionConfig(
        **{**SIZES, **CASES[case]}, vocab_size=16, num_hidden_layers=1, intermediate_size=32
    )
    model = PathAttentionForCausalLM(config).train()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    ids = torch.randint(0, 16, (4, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]
    for name, value in model.named_parameters():
        assert value.isfinite().all() and not torch.equal(value, before[name]), name
    model.eval().save_pretrained(tmp_path)
    loaded = PathAttentionForCausalLM.from_pretrained(tmp_path)
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    config, again = model.config.to_dict(), loaded.config.to_dict()
    assert all(config[name] == again[name] for name in CASES[case])


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 33])
def test_alibi_slopes(heads: int) -> None:
    config = AttentionConfig(hidden_size=66, num_attention_heads=heads, head_dim=2, decay="alibi")
    gates = Alibi(config)(torch.zeros(1, 2, 66), None)  # pyright: ignore
    expected = -torch.tensor(alibi_slopes(heads)).expand(1, 2, heads)
    assert gates.dtype == torch.float32
    torch.testing.assert_close(gates, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"normalizer": "stick_breaking", "decay": "forget"}, "decay: expected 'none' with norm"),
        ({"normalizer": "stick_breaking", "decay": "alibi"}, "decay: expected 'none' with norm"),
        ({"normalizer": "stick_breaking", "transport": "householder"}, "transport: expected one"),
        ({"transport": "delta_rule"}, "normalizer: expected 'linear' with transport 'delta_rule'"),
        ({"transport": "delta_rule", "normalizer": "stick_breaking"}, "normalizer: expected 'lin"),
        (
            {"transport": "delta_rule", "normalizer": "linear", "householders_per_token": 2},
            "householders_per_token: expected 1 with transport 'delta_rule'",
        ),
        ({"transport": "none", "moves_values": True}, "moves_values: expected False"),
        ({"transport": "householder", "moves_values": True}, "moves_values: expected False"),
        (
            {"transport": "rotary", "householders_per_token": 2},
            "householders_per_token: expected 1",
        ),
        ({"transport": "none", "householders_per_token": 2}, "householders_per_token: expected 1"),
        (
            {"transport": "rotary", "moves_values": True, "value_head_dim": 4},
            "value_head_dim: expected head_dim = 8 with moves_values",
        ),
        ({"transport": "accumulated_rotation", "head_dim": 7}, "head_dim: expected an even size"),
        ({"rotation_angles": "learned"}, "rotation_angles: expected one of"),
        ({"vocab_size": 0}, "vocab_size: expected an integer of at least 1"),
        ({"rotation_bound": 4.0}, "rotation_bound: expected at most π"),
        ({"rotation_bound": 0.0}, "rotation_bound: expected a finite number above 0"),
        ({"rotation_seed": -1}, "rotation_seed: expected"),
        ({"householders_per_token": 0}, "householders_per_token: expected an integer"),
        ({"normalizer": "relu"}, r"normalizer: expected one of .*, got 'relu'$"),
        ({"transport": "mine"}, r"transport: expected one of .*'mine' \(.*import its module first"),
        ({"moves_values": 1}, "moves_values: expected True or False"),
    ],
)
def test_combinations_that_make_no_sense_are_refused_by_name(fields: dict, message: str) -> None:
    plain = {"transport": "none", "hidden_size": 32, "num_attention_heads": 4}
    with pytest.raises(ValueError, match=f"^{message}"):
        AttentionConfig(**{**plain, **fields})
