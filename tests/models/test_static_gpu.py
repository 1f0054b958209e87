"""generate() by CUDA graphs of a static cache on an NVIDIA GPU."""

from __future__ import annotations

import pytest
import torch

from path_attention.models import StaticPathCache
from path_attention.models.cache import CACHE_NAME

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
