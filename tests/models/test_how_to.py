"""The how-tos' code runs as it stands there, and the encoding that it adds works everywhere."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from path_attention import Packing
from path_attention.models import PRESETS, PathAttentionConfig
from path_attention.models.cache import CACHE_NAME
from path_attention.nn import AttentionConfig
from path_attention.nn.encoding import DECAYS, TRANSPORTS
from path_attention.nn.normalizer import NORMALIZERS

DOCS = Path(__file__).parents[2] / "docs"


def code_blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / name).read_text("utf-8"), re.M | re.S)


@pytest.fixture
def how_to() -> Iterator[dict[str, Any]]:
    """What the code of the how-to defines."""
    names: dict[str, Any] = {"__name__": "how_to"}
    before = dict(TRANSPORTS), dict(DECAYS)
    try:
        exec("\n".join(code_blocks("how-to-add-an-encoding.md")), names)
        yield names
    finally:
        for registry, kept in zip((TRANSPORTS, DECAYS), before, strict=True):
            registry.clear()
            registry.update(kept)


def test_an_encoding_takes_less_than_40_lines() -> None:
    encoding = code_blocks("how-to-add-an-encoding.md")[0]
    assert "register_transport" in encoding and "register_decay" in encoding
    assert 0 < sum(bool(line.strip()) for line in encoding.splitlines()) < 40


def test_its_scores_are_its_formula(how_to) -> None:
    layer = how_to["model"].double().model.layers[0].attention
    torch.nn.init.normal_(layer.decay.cost)
    ids = torch.randint(8, 12, (1, 30))
    x = torch.randn(1, 30, 64).double()
    got = layer(x, token_ids=ids)
    q, k, v = (
        F.linear(x, getattr(layer, f"{n}_proj").weight).unflatten(2, (4, 16))[0] for n in "qkv"
    )
    lines = (ids[0] == how_to["NEWLINE"]).cumsum(0)
    between = lines[:, None] - lines[None]  # [query, key]
    turns = torch.polar(torch.ones(()).double(), between[..., None, None] * layer.transport.rates)
    a, b = torch.complex(q[..., :8], q[..., 8:]), torch.complex(k[..., :8], k[..., 8:])
    scores = torch.einsum("ihp,ijhp,jhp->hij", a.conj(), turns, b).real / 4
    scores = scores - F.softplus(layer.decay.cost)[:, None, None] * between
    scores = scores.masked_fill(torch.ones(30, 30).triu(1).bool(), -torch.inf)
    out = torch.einsum("hij,jhe->ihe", scores.softmax(-1), v).flatten(1)
    # Angles and costs are float32: scores of at most 4 or so err by a few of its roundings.
    allowed = 32 * torch.finfo(torch.float32).eps * got.abs().max().item()
    torch.testing.assert_close(got[0], out @ layer.o_proj.weight.T, rtol=0, atol=allowed)


def test_it_trains_decodes_packs_and_is_saved(how_to, tmp_path) -> None:
    model = how_to["model"].train()
    ids = torch.randint(8, 12, (2, 40))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert (model.model.layers[0].attention.decay.cost != 0).all()

    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        whole = model(ids).logits
        assert torch.equal(loaded(ids).logits, whole)
        first = model(ids[:, :25], use_cache=True)
        parts = [first.logits]
        for t in range(25, 40):
            parts.append(model(ids[:, t : t + 1], past_key_values=first[CACHE_NAME]).logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
        packed = model(ids[:1], packing=Packing.from_lengths([15, 25])).logits
        apart = [model(part).logits for part in ids[:1].split([15, 25], 1)]
        torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-4, atol=1e-4)
        out = model.generate(ids, max_new_tokens=5, do_sample=False)
        assert out.shape == (2, 45)


def test_decoding_runs_as_told() -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec("\n".join(code_blocks("how-to-decode.md")), names)
    assert names["text"].shape == (1, 520)
    assert torch.equal(names["first"], names["text"]) and torch.equal(names["again"], names["text"])
    assert [names[x].get_seq_length() for x in ("cache", "other")] == [500, 500]
    ids = torch.cat([names["prompt"], torch.tensor([[7, 8]])], 1)
    model = names["model"]
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits[:, 500:]
        for cache in (names["cache"], names["other"]):
            got = model(ids[:, 500:], past_key_values=cache).logits
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_the_table_of_presets_is_true() -> None:
    exec(code_blocks("how-to-choose-an-encoding.md")[0], {})
    text = (DOCS / "how-to-choose-an-encoding.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \| (\w+) \|", text, re.M)
    told = {name: (transport, decay, norm) for name, transport, decay, norm in rows}
    for name, row in PRESETS.items():
        fields = (row["transport"], row["decay"], row.get("normalizer", "softmax"))
        if name.endswith("_qkv"):
            assert row["moves_values"] and f"`{name}`" in text
            assert row == {**PRESETS[name.removesuffix("_qkv")], "moves_values": True}
        else:
            assert told.pop(name) == fields
    assert not told


def test_the_choice_names_every_option_of_a_layer() -> None:
    text = (DOCS / "how-to-choose-an-encoding.md").read_text("utf-8")
    fields = {field.name for field in dataclasses.fields(AttentionConfig)} | {"nope_layers"}
    assert {name for name in fields if f"`{name}" not in text} == set()
    assert {name for name in (*TRANSPORTS, *DECAYS, *NORMALIZERS) if name not in text} == set()
    taken = re.findall(r"^- \*\*.*: `(\w+)`", text, re.M)
    assert len(taken) == 4 and set(taken) <= set(PRESETS)


def test_layers_without_rope_are_as_told() -> None:
    def transports(preset: str, **options: Any) -> list[str]:
        config = PathAttentionConfig.from_preset(
            preset, num_hidden_layers=4, nope_layers=[1], **options
        )
        return [config.of_layer(n).transport for n in range(4)]

    assert transports("rope") == ["rotary", "none", "rotary", "rotary"]
    both = transports("path_fox", transport="rotary_householder")
    assert both == ["rotary_householder", "householder", *2 * ["rotary_householder"]]
    default = PathAttentionConfig()
    wanted = {"transport": "householder", "decay": "none"}
    assert PRESETS["path"] == wanted == {n: getattr(default, n) for n in wanted}
