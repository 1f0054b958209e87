"""generate() by CUDA graphs of a static cache on an NVIDIA GPU."""

from __future__ import annotations

import pytest
import torch

from path_attention.models import StaticPathCache, crop_cache
from path_attention.models.cache import CACHE_NAME, cache_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("preset", ["path_fox", "path", "fox", "alibi", "rope", "nope"])
def test_generate_equals_a_growing_cache(make_model, preset):
    model = make_model(preset).cuda()
    prompts = torch.randint(1, 64, (2, 40), device="cuda")
    mask = torch.ones_like(prompts)
    mask[0, :25] = 0
    options = {"attention_mask": mask, "max_new_tokens": 100, "do_sample": False}
    grown = model.generate(prompts, **options)
    assert torch.equal(model.generate(prompts, cache_implementation="static", **options), grown)


@pytest.mark.parametrize("preset", ["path_fox", "rope"])
def test_replayed_logits_equal_the_whole(make_model, preset):
    model = make_model(preset, dtype=torch.float32).cuda()
    ids = torch.randint(1, 64, (1, 400), device="cuda")
    cache = StaticPathCache(model.config, 400)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        model(ids[:, :200], **{CACHE_NAME: cache})
        parts = [model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(200, 400)]
    assert cache._graph is not None
    error = (torch.cat(parts, 1) - whole[:, 200:]).abs().max()
    assert error <= 1e-3 * whole.abs().max()


@pytest.mark.parametrize("preset", ["path_fox", "alibi", "rope", "rotation_learned"])
def test_replays_go_on_after_a_crop(make_model, preset):
    """To the tail, over a sealing, to a border; the graph is the one of before."""
    model = make_model(preset, dtype=torch.float32).cuda()
    ids = torch.randint(1, 64, (1, 400), device="cuda")
    cache = StaticPathCache(model.config, 400)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        model(ids[:, :250], **{CACHE_NAME: cache})
        graph, at = None, 250
        for stop, back in ((262, 259), (265, 250), (300, 240), (330, 128), (150, 150)):
            parts = [
                model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(at, stop)
            ]
            error = (torch.cat(parts, 1) - whole[:, at:stop]).abs().max()
            assert error <= 1e-3 * whole.abs().max()
            assert graph is None or cache._graph is graph
            graph, at = cache._graph, back
            assert graph is not None
            crop_cache(cache, back)


@pytest.mark.parametrize("preset", ["path_fox", "fox", "rotation_learned"])
def test_a_cache_that_takes_nothing_back_gives_the_same(make_model, preset):
    """Bit for bit, by graphs over a sealing, and in a long chunk; in fewer bytes."""
    model = make_model(preset).cuda()
    ids, found = torch.randint(1, 64, (2, 400), device="cuda"), []
    for croppable in (True, False):
        cache = StaticPathCache(model.config, 400, croppable=croppable)
        with torch.no_grad():
            model(ids[:, :200], **{CACHE_NAME: cache})
            steps = [model(ids[:, t : t + 1], **{CACHE_NAME: cache}) for t in range(200, 300)]
            last = model(ids[:, 300:], **{CACHE_NAME: cache})
        assert cache._graph is not None
        found.append((torch.cat([x.logits for x in [*steps, last]], 1), cache_bytes(cache)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1] < found[0][1]


@pytest.mark.parametrize("preset", ["path_fox", "rope"])
def test_drafts_and_a_second_turn(make_model, preset):
    model = make_model(preset).cuda()
    prompt = torch.randint(1, 64, (1, 40), device="cuda").repeat(1, 3)
    options = {"max_new_tokens": 60, "do_sample": False}
    grown = model.generate(prompt, **options)
    lookup = {"cache_implementation": "static", "prompt_lookup_num_tokens": 5}
    assert torch.equal(model.generate(prompt, **lookup, **options), grown)
    cache = StaticPathCache(model.config, 1024)
    with torch.no_grad():
        whole = model(grown.repeat(1, 4), use_cache=False).logits[:, 180:]
        model(grown[:, :179], **{CACHE_NAME: cache})
        model(grown[:, 179:], **{CACHE_NAME: cache})
        got = model(grown.repeat(1, 3), **{CACHE_NAME: cache}).logits
    assert (got - whole).abs().max() <= 1e-3 * whole.abs().max()
