"""Prefixes kept by their tokens: found, shared, bounded, written and read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from path_attention.models import PRESETS, PrefixStore, prefix_store
from path_attention.models.cache import CACHE_NAME, cache_bytes, layer_caches
from path_attention.nn.cache import LayerCache
from path_attention.nn.cache_units import memory

HOW = {"max_new_tokens": 12, "do_sample": False}


def make_ids(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 64, (1, length), generator=generator)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("host", [False, True])
def test_what_is_found_is_as_if_computed(make_model, tmp_path, preset: str, host: bool) -> None:
    """In the store, and read by another store from files."""
    model = make_model(preset)
    store = PrefixStore(model, host=host)
    start = make_ids(300)
    assert store.get(start) is None
    kept = store.put(start[:, :-1], store.prefill(start))
    assert kept in (128, 192, 256) and len(store) == 1
    store.save(tmp_path)
    again = PrefixStore(model, host=not host)
    assert again.load(tmp_path) == 1
    ids = torch.cat([start[:, :290], make_ids(40, seed=1)], 1)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits[:, kept:]
        for one in (store, again):
            cache = one.get(ids)
            assert cache is not None and cache.get_seq_length() == kept
            parts = [
                model(p, cache=cache).logits
                for p in ids[:, kept:].split([60, 1, 329 - kept - 60], 1)
            ]
            torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=3e-4, atol=3e-4)
            fresh = one.get(ids)  # what was appended went to a fork
            assert fresh is not None and fresh.get_seq_length() == kept
    assert store.get(make_ids(300, seed=2)) is None


@pytest.mark.parametrize("preset", ["path_fox", "rope", "rotation_learned", "path_linear"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=["greedy", "beams", "samples"],
)
def test_generate_from_a_store(make_model, monkeypatch, preset: str, how: dict) -> None:
    """The same text; a prompt's second time, and a chat's second turn, compute little anew."""
    model = make_model(preset, dtype=torch.float64)  # no ties over hundreds of tokens
    store, ids = PrefixStore(model), make_ids(300)
    texts = []
    for given in (None, store, store):
        torch.manual_seed(3)
        computed: list[int] = []
        forward = type(model.model).forward

        def count(self, input_ids, *args, seen=computed, forward=forward, **kwargs):
            seen.append(input_ids.shape[1])
            return forward(self, input_ids, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(type(model.model), "forward", count)
            mask = torch.ones_like(ids) if given is None else None
            how = {**HOW, **how, "attention_mask": mask}
            texts.append(model.generate(ids, **how, prefix_store=given))
        assert (sum(computed) > 300) == (given is None or len(texts) == 2)
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    if "num_return_sequences" not in how:
        long = model.generate(ids, max_new_tokens=150, do_sample=False, prefix_store=store)
        turn = torch.cat([long, make_ids(9, seed=4)], 1)
        cache = store.get(turn)
        assert cache is not None and cache.get_seq_length() >= 300
        wanted = model.generate(turn, attention_mask=torch.ones_like(turn), **HOW)
        assert torch.equal(model.generate(turn, **HOW, prefix_store=store), wanted)


def test_prefixes_share_units_and_the_oldest_go(make_model) -> None:
    model = make_model()
    store, start = PrefixStore(model), make_ids(1000)
    store.prefill(start)
    alone = store.bytes
    first = store.get(start)
    assert first is not None
    shared = layer_caches(first, 2)[0].groups[0].storage
    for seed in (5, 6):
        store.prefill(torch.cat([start, make_ids(200, seed=seed)], 1))
    assert len(store) == 2  # the first is a part of both
    assert store.bytes < 1.9 * alone
    found = store.get(start)
    assert found is not None and layer_caches(found, 2)[0].groups[0].storage is shared
    small = PrefixStore(model, max_bytes=2 * alone, host=True)
    rows = [make_ids(600, seed=n) for n in (7, 8, 9, 10)]
    for row in rows[:2]:
        small.prefill(row)
    small.max_bytes = small.bytes
    assert small.get(rows[0]) is not None  # used again: now the second is the oldest
    small.prefill(rows[2])
    kept = [small.get(row) is not None for row in rows]
    assert kept == [True, False, True, False] and small.bytes <= small.max_bytes
    nothing = PrefixStore(model, max_bytes=0)
    assert nothing.put(start, nothing.prefill(start)) == 0 and len(nothing) == 0


def test_bytes_are_counted_as_prefixes_come_and_go(make_model, monkeypatch) -> None:
    """Shared units once; and one more costs as much beside many as beside none."""
    model = make_model()
    start, looked = make_ids(300), []
    rows = [torch.cat([start, make_ids(300, seed=n)], 1) for n in range(12)]
    store = PrefixStore(model)
    for row in rows[:6]:
        store.prefill(row)
    store.max_bytes = store.bytes
    for row in rows[6:]:
        store.prefill(row)
        entries = [x for e in store._entries.values() for x in (e.cache, e.shorter)]
        held = [x for cache in entries if cache is not None for x in layer_caches(cache, 2)]
        assert store.bytes == memory(held) <= store.max_bytes
    assert len(store) > 2
    counted = prefix_store.storages
    monkeypatch.setattr(prefix_store, "storages", lambda x: looked.append(1) or counted(x))
    store.max_bytes = None
    store.prefill(make_ids(300, seed=99))
    assert len(looked) == 1
    store.max_bytes = 0
    store.prefill(make_ids(300, seed=98))
    assert store.bytes == len(store) == len(store._users) == 0


def test_a_border_that_is_found_again_costs_a_fork(make_model, monkeypatch) -> None:
    """What lies behind its units is not multiplied anew, whoever put more behind it since."""
    model = make_model()
    start = make_ids(300)
    rows = [torch.cat([start, make_ids(300, seed=n)], 1) for n in range(3)]
    store = PrefixStore(model)
    store.prefill(rows[0])
    first = store.get(rows[1])
    store.prefill(rows[1])
    monkeypatch.setattr(LayerCache, "_rebuild_tables", lambda self: pytest.fail("anew"))
    again = store.get(rows[2])
    assert first is not None and again is not None
    assert first.get_seq_length() == again.get_seq_length() == 256
    for one, other in zip(layer_caches(first, 2), layer_caches(again, 2), strict=True):
        tables = (one.groups[-1].suffix, other.groups[-1].suffix)
        torch.testing.assert_close(*tables, rtol=0, atol=0)
    monkeypatch.undo()
    tight = PrefixStore(model)
    tight.prefill(rows[0])
    tight.max_bytes = tight.bytes
    assert tight.get(rows[1]) is not None
    assert len(tight) == 1 and tight.bytes == tight.max_bytes  # nothing goes for it


class Launches(TorchDispatchMode):
    """How many operations ran that are no views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset", ["path_fox", "rotation_learned"])
def test_what_is_kept_is_made_of_nothing_and_holds_no_tail(make_model, preset: str) -> None:
    model, ids = make_model(preset), make_ids(300)
    with torch.no_grad():
        cache = model(ids)[CACHE_NAME]
        store = PrefixStore(model)
        with Launches() as launches:
            assert store.put(ids, cache) in (128, 192, 256)
    assert launches.count == 0
    (entry,) = store._entries.values()
    assert entry.cache is not None
    for kept, own in zip(layer_caches(entry.cache, 2), layer_caches(cache, 2), strict=True):
        assert not kept.tail.buffers and own.tail.buffers


def test_other_weights_find_nothing(make_model, tmp_path) -> None:
    model = make_model()
    store = PrefixStore(model)
    store.prefill(make_ids(300))
    store.save(tmp_path)
    assert PrefixStore(make_model()).load(tmp_path) == 1  # the same weights, another object
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 2**-20
    other = PrefixStore(model)
    assert other.fingerprint != store.fingerprint
    with pytest.raises(ValueError, match="folder: expected prefixes of this model"):
        other.load(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="folder: expected prefixes, .* is none"):
        store.load(tmp_path)


def test_bad_input_is_refused(make_model) -> None:
    model = make_model()
    store, ids = PrefixStore(model), make_ids(10)
    cache = model(ids.expand(2, -1), use_cache=True)[CACHE_NAME]
    with pytest.raises(ValueError, match=r"ids: expected \[1, 10 or more\]"):
        store.put(ids[:, :9], cache)
    with pytest.raises(ValueError, match="cache: expected one row without padding"):
        store.put(ids, cache)
    with pytest.raises(ValueError, match=r"ids: expected \[1, T\] with a prefix store"):
        store.prefill(ids.expand(2, -1))
    with pytest.raises(ValueError, match="max_bytes: expected at least 0, got -1"):
        PrefixStore(model, max_bytes=-1)
    with pytest.raises(ValueError, match="prefix_store: expected one of this model"):
        make_model().generate(ids, prefix_store=store)
    with pytest.raises(ValueError, match="prefix_store: expected token ids without padding"):
        model.generate(ids, attention_mask=ids * 0, prefix_store=store)
    with pytest.raises(ValueError, match="prefix_store: expected no cache beside it"):
        model.generate(ids, prefix_store=store, **{CACHE_NAME: DynamicCache()})
    for draft in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(ValueError, match="prefix_store: expected no drafts beside it"):
            model.generate(ids, prefix_store=store, **draft)
    assert cache_bytes(cache) > 0 and store.put(ids, DynamicCache(config=model.config)) == 0
