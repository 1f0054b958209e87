"""generate() on a cache of fixed size, kernels run as Python, is what it is on one that grows."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from path_attention.models import (
    PathAttentionConfig,
    PathAttentionForCausalLM,
    StaticPathCache,
    crop_cache,
    fork_cache,
)
from path_attention.models.cache import CACHE_NAME, cache_bytes

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_static_gpu.py has it compiled"
)
MASK = torch.tensor([[0] * 15 + [1] * 5, [1] * 20])


def prompts() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(1, 64, MASK.shape) * MASK


@pytest.mark.parametrize("preset", ["path_fox", "path", "alibi", "rope", "rotation_learned_qkv"])
def test_generate_equals_a_growing_cache_under_left_padding(make_model, preset):
    model = make_model(preset)
    options = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
    grown = model.generate(prompts(), **options)
    assert torch.equal(model.generate(prompts(), cache_implementation="static", **options), grown)


def test_beams(make_model):
    model = make_model("path_fox")
    options = {"max_new_tokens": 3, "do_sample": False, "num_beams": 2}
    prompt = prompts()[1:, :7]
    fixed = model.generate(prompt, cache_implementation="static", **options)
    assert torch.equal(fixed, model.generate(prompt, **options))


@pytest.mark.parametrize("preset", ["path_fox", "rotation_learned"])
def test_drafts_are_taken_back(make_model, preset):
    """Of a lookup in the prompt, and of a smaller model: most are wrong, and cropped."""
    model = make_model(preset)
    options = {"max_new_tokens": 4, "do_sample": False}
    prompt = prompts()[1:].repeat(1, 2)
    grown = model.generate(prompt, **options)
    draft = make_model("nope", num_hidden_layers=1)
    for drafts in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": draft}):
        fixed = model.generate(prompt, cache_implementation="static", **drafts, **options)
        assert torch.equal(fixed, grown)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, False),
        ({"num_beams": 2}, False),
        ({"prompt_lookup_num_tokens": 3}, True),
        ({"return_dict_in_generate": True}, True),  # its caller may take tokens back
    ],
)
def test_generate_keeps_what_cropping_needs_where_someone_may_crop(make_model, options, kept):
    model, seen = make_model("path_fox"), []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["past_key_values"]), with_kwargs=True
    )
    prompt = prompts()[1:, :2]
    options = {"cache_implementation": "static", "max_new_tokens": 2, **options}
    model.generate(prompt, do_sample=False, **options)
    assert {cache.is_croppable for cache in seen} == {kept}
    assert {layer.room for cache in seen for layer in cache.layers} == {64}


def test_a_cache_that_takes_nothing_back_refuses_drafts_and_crops(make_model):
    model = make_model("path_fox")
    cache = StaticPathCache(model.config, 64, croppable=False)
    drafts = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match="crop"):
        model.generate(prompts()[1:].repeat(1, 2), **{CACHE_NAME: cache}, **drafts)
    cache = StaticPathCache(model.config, 64, croppable=False)
    with torch.no_grad():
        model(prompts()[1:, :9], **{CACHE_NAME: cache})
    for crop in (lambda: crop_cache(cache, 8), lambda: cache.crop(-1)):
        with pytest.raises(ValueError, match="croppable=True to take tokens back"):
            crop()
    assert cache.get_seq_length() == 9


def bytes_of_a_row(preset: str, size: int, room: int, croppable: bool) -> int:
    """One layer of one head, in 16 bits."""
    widths = {"hidden_size": size, "num_attention_heads": 1, "intermediate_size": 8}
    config = PathAttentionConfig.from_preset(preset, vocab_size=8, num_hidden_layers=1, **widths)
    model = PathAttentionForCausalLM(config).bfloat16().eval()
    cache = StaticPathCache(config, room, croppable=croppable)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64), **{CACHE_NAME: cache})
    return cache_bytes(cache)


def share_saved(preset: str, size: int, room: int) -> float:
    """In percent, by a row that takes nothing back."""
    kept, less = (bytes_of_a_row(preset, size, room, croppable) for croppable in (True, False))
    return 100 * (1 - less / kept)


def test_what_is_told_of_a_rows_bytes_is_true():
    text = (Path(__file__).parents[2] / "docs/how-to-decode.md").read_text("utf-8")
    titles, *rows = re.findall(r"^\| (head size|64|128) \|(.*) \|$", text, re.M)
    rooms = [int(re.sub(r"\D", "", cell)) for cell in titles[1].split("|")]
    assert rooms == [2048, 8192, 36864] and [name for name, _ in rows] == ["64", "128"]
    for name, cells in rows:
        for room, told in zip(rooms, cells.split("|"), strict=True):
            assert round(share_saved("path", int(name), room), 1) == float(told.strip(" %"))
        for room in rooms[:1]:
            less = share_saved("path", int(name), room) - share_saved("path_fox", int(name), room)
            assert 0 < less <= 0.2
    assert 0 < share_saved("fox", 64, 2048) < 1
    assert bytes_of_a_row("rope", 64, 128, True) == bytes_of_a_row("rope", 64, 128, False)


def test_forked_and_cropped_as_one_that_grows(make_model):
    model = make_model("path_fox")
    cache, ids = StaticPathCache(model.config, 128), prompts()[1:]
    with torch.no_grad():
        model(ids, **{CACHE_NAME: cache})
        model(ids[:, :2], **{CACHE_NAME: cache})
        other = fork_cache(cache)
        crop_cache(other, 18)
        got = model(ids[:, 18:], **{CACHE_NAME: other}).logits
        whole = model(ids, use_cache=False).logits[:, 18:]
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)
    assert (cache.get_seq_length(), other.get_seq_length()) == (22, 20)


def test_its_size_is_there_from_the_start(make_model):
    model = make_model("path_fox")
    cache = StaticPathCache(model.config, 64)
    with torch.no_grad():
        model(prompts()[1:, :3], **{CACHE_NAME: cache})
        before = cache_bytes(cache)
        model(prompts()[1:, 3:10], **{CACHE_NAME: cache})
    assert (cache_bytes(cache), cache.get_seq_length()) == (before, 10)


def test_refusals(make_model):
    model = make_model("path")
    with pytest.raises(ValueError, match="room for 20 tokens, got 12"):
        model(prompts()[1:], **{CACHE_NAME: StaticPathCache(model.config, 12)})
    with pytest.raises(ValueError, match="cache_implementation: expected None"):
        model.generate(prompts()[1:], cache_implementation="offloaded_static", max_new_tokens=1)
    with pytest.raises(ValueError, match="the softmax normalizer"):
        make_model("stick_breaking").generate(prompts()[1:], cache_implementation="static")
