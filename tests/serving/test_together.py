"""Prompts that are read as one batch leave the caches that they would have left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_server import make_ids, make_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicCache

from path_attention.models.cache import CACHE_NAME, layer_caches
from path_attention.models.prefix_store import PrefixStore
from path_attention.nn.cache_units import memory
from path_attention.serving.together import read_together, suit
from path_attention.serving.warm import read_every_kind

UNIT = 128  # of heads of 16


def read(model, ids: list[int], cache=None):
    more = {} if cache is None else {CACHE_NAME: cache}
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=True, **more)


def check(model, prompt: list[int], cache) -> None:
    """The logits of the next tokens, over a unit's border, by a cache and without one."""
    after = make_ids(70, seed=9)
    logits = read(model, after, cache).logits[0]
    with torch.no_grad():
        whole = model(torch.tensor([prompt + after]), use_cache=False).logits[0, len(prompt) :]
    torch.testing.assert_close(logits, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("preset", "start"),
    [("path_fox", 0), ("path_fox", 256), ("rotation_learned", 256), ("rope", 0)],
)
def test_prompts_are_as_if_read_alone(preset: str, start: int) -> None:
    model = make_model(preset, dtype=torch.float64, num_hidden_layers=1)
    store, shared = PrefixStore(model), make_ids(start)
    cache = DynamicCache(config=model.config)
    if start:
        longer = [*shared, *make_ids(100, seed=1)]
        store.put(torch.tensor([longer]), read(model, longer)[CACHE_NAME])
        cache = store.get(torch.tensor([shared]))
        assert cache is not None
    assert cache.get_seq_length() == start
    rests = [make_ids(n, seed=n) for n in (200, 319, 128)]
    caches = read_together(model, cache, rests)
    for rest, one in zip(rests, caches, strict=True):
        prompt = [*shared, *rest]
        (layer,) = layer_caches(one, 1)
        (alone,) = layer_caches(read(model, prompt)[CACHE_NAME], 1)
        assert not layer.has_padding and layer.seen == len(prompt)
        assert layer.lengths is not None and layer.lengths.tolist() == [len(prompt)]
        assert layer.kind == "plain" or layer.sealed == start + UNIT
        for name, x in alone.before.items():
            torch.testing.assert_close(layer.before[name], x)
        kept = store.put(torch.tensor([prompt]), one)
        assert kept >= start + UNIT and store.keys(torch.tensor([prompt]))
        check(model, prompt, one)  # nor do the others' next tokens come into it


def test_what_prompts_share_is_held_once() -> None:
    model = make_model("path", num_hidden_layers=1)
    cache = read(model, make_ids(1024 + 64))[CACHE_NAME]
    store = PrefixStore(model)
    store.put(torch.tensor([make_ids(1024 + 64)]), cache)
    start = store.get(torch.tensor([make_ids(1024)]))
    assert start is not None
    shared = {x.data_ptr() for x in start.layers[0].groups[0].storage.tokens.values()}  # pyright: ignore
    one, other = read_together(model, start, [make_ids(20, seed=1), make_ids(30, seed=2)])
    for x in (one, other):
        group = x.layers[0].groups[0]  # pyright: ignore[reportAttributeAccessIssue]
        assert shared == {y.data_ptr() for y in group.storage.tokens.values()}
        assert group.rows is None and not group.owner
    both = memory([*layer_caches(one, 1), *layer_caches(other, 1)])
    assert both < 1.2 * memory(layer_caches(one, 1))


def test_who_suits() -> None:
    assert suit([1023], 512, 512, 8192) and suit([512], 1023, 512, 8192)
    assert not suit([1023], 511, 512, 8192)  # its padding would be sealed
    assert suit([575], 1, 512, 8192) and not suit([575], 0, 512, 8192)
    assert suit([1000] * 7, 1023, 512, 8192) and not suit([1000] * 8, 1000, 512, 8192)


def test_a_row_refuses_to_lose_what_is_sealed() -> None:
    model = make_model("path", num_hidden_layers=1)
    cache = read(model, make_ids(300))[CACHE_NAME]
    cache.batch_repeat_interleave(2)
    (layer,) = layer_caches(cache, 1)
    with pytest.raises(ValueError, match="length: expected 0 or 128"):
        layer.row(1, 100)


def test_every_kind_of_piece_is_read_ahead() -> None:
    model, seen = make_model("path", num_hidden_layers=1), set()

    def note(module, args, more) -> None:
        (layer,) = layer_caches(more[CACHE_NAME], 1)
        seen.add((len(args[0]), layer.seen > 0, layer.seen > layer.sealed))

    model.register_forward_pre_hook(note, with_kwargs=True)
    read_every_kind(model)
    kinds = {(1, False, False), (1, True, False), (1, True, True), (2, False, False)}
    assert seen == kinds | {(2, True, False)}


class Waits(TorchDispatchMode):
    """Counts what would wait for a GPU: values that the host asks for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        self.count += func.overloadpacket in asks
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset", ["path_fox", "rope", "rotation_learned"])
def test_nothing_waits_for_the_device(preset: str, monkeypatch) -> None:
    """From what is kept to the caches of all: pieces are launched without a word to the host."""
    model = make_model(preset, num_hidden_layers=1)
    store = PrefixStore(model)
    store.put(torch.tensor([make_ids(200)]), read(model, make_ids(200))[CACHE_NAME])
    keys = store.keys(torch.tensor([make_ids(140)]))
    rests = [make_ids(n, seed=n) for n in (200, 201)]
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("the host waits"))
    with Waits() as waits:
        key, length = store.find(keys)
        assert key is not None and length == 128
        cache = store.open(key)
        for rest in rests:
            read(model, rest, cache)
        read_together(model, store.open(key), [rests[0], rests[0][::-1]])
        alone = waits.count
        read_together(model, store.open(key), rests)
    assert alone == 1  # whether anything is padded, which is on the host
    assert waits.count == 4  # a mask is looked at once, whatever the number of layers
