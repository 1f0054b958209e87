"""transformers' generate(): with a cache, token for token what it is without."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from path_attention.models import PRESETS
from path_attention.models.cache import CACHE_NAME

MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7, [0] * 6 + [1]])


def prompts() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(1, 64, MASK.shape) * MASK


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prefill_chunk_size": 3},
    ],
    ids=["greedy", "sampled", "beams", "chunked prefill"],
)
def test_cache_equals_no_cache_under_left_padding(make_model, preset: str, how: dict) -> None:
    model = make_model(preset)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(2)
        if not use_cache:
            how = {name: value for name, value in how.items() if name != "prefill_chunk_size"}
        out = model.generate(
            prompts(), attention_mask=MASK, max_new_tokens=12, use_cache=use_cache,
            **{"do_sample": False, **how},
        )  # fmt: skip
        results.append(out)
    assert torch.equal(*results)
    assert results[0][:, 7:].unique().numel() > 5  # not one token over and over


def test_rows_of_a_batch_equal_rows_alone(make_model) -> None:
    model = make_model()
    batch = model.generate(prompts(), attention_mask=MASK, max_new_tokens=12, do_sample=False)
    for n, row in enumerate(prompts()):
        alone = model.generate(row[MASK[n].bool()][None], max_new_tokens=12, do_sample=False)
        assert torch.equal(batch[n, 7:], alone[0, -12:])


@pytest.mark.parametrize("preset", ["path_fox", "rope"])
@pytest.mark.parametrize("turn", [1, 4])
def test_resumed_from_a_cache(make_model, preset: str, turn: int) -> None:
    """A second turn of `turn` tokens on the first turn's cache, padding and all."""
    model = make_model(preset)
    first = model.generate(
        prompts(), attention_mask=MASK, max_new_tokens=5, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    torch.manual_seed(3)
    ids = torch.cat([first.sequences, torch.randint(1, 64, (3, turn))], 1)
    mask = torch.cat([MASK, torch.ones(3, 5 + turn, dtype=torch.int64)], 1)
    cache = first[CACHE_NAME]
    assert cache.get_seq_length() == 11  # the last token is not in yet
    resumed = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **{CACHE_NAME: cache}
    )
    fresh = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, use_cache=False
    )
    assert torch.equal(resumed, fresh)


def test_a_users_empty_cache_is_filled(make_model) -> None:
    model, cache = make_model(), DynamicCache()
    ids = prompts()[1:2]
    out = model.generate(ids, max_new_tokens=4, do_sample=False, **{CACHE_NAME: cache})
    assert cache.get_seq_length() == 10
    assert torch.equal(out, model.generate(ids, max_new_tokens=4, do_sample=False))


def test_embedded_prompts(make_model) -> None:
    model, ids = make_model(), prompts()[1:2]
    embedded = model.get_input_embeddings()(ids)
    out = model.generate(inputs_embeds=embedded, max_new_tokens=5, do_sample=False)
    assert torch.equal(out, model.generate(ids, max_new_tokens=5, do_sample=False)[:, 7:])


@pytest.mark.parametrize("kind", ["offloaded_static", "quantized"])
def test_other_caches_are_refused(make_model, kind: str) -> None:
    with pytest.raises(ValueError, match=f"cache_implementation: .* got '{kind}'"):
        make_model().generate(prompts(), max_new_tokens=2, cache_implementation=kind)


def test_offloaded(make_model) -> None:
    model, how = make_model(), {"max_new_tokens": 6, "do_sample": False}
    out = model.generate(prompts(), attention_mask=MASK, cache_implementation="offloaded", **how)
    assert torch.equal(out, model.generate(prompts(), attention_mask=MASK, **how))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_rejected_drafts_leave_no_trace(make_model, preset: str, draft: str) -> None:
    """Greedy decoding by drafts, of which most are rejected, is greedy decoding."""
    model = make_model(preset)
    torch.manual_seed(4)
    ids = torch.randint(1, 8, (1, 100))
    other = make_model(preset, num_hidden_layers=1)
    drafts = {"prompt_lookup_num_tokens": 5} if draft == "lookup" else {"assistant_model": other}
    how = {"max_new_tokens": 60, "do_sample": False}
    assert torch.equal(model.generate(ids, **how, **drafts), model.generate(ids, **how))


@pytest.mark.parametrize("preset", ["path_fox", "rope", "delta_net"])
def test_drafts_after_left_padding(make_model, preset: str) -> None:
    model, mask = make_model(preset), torch.ones(1, 40, dtype=torch.int64)
    mask[:, :9] = 0
    how = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    ids = torch.randint(1, 8, (1, 40)) * mask
    assert torch.equal(
        model.generate(ids, prompt_lookup_num_tokens=5, **how), model.generate(ids, **how)
    )


def test_drafts_of_its_own_first_layers(make_model) -> None:
    model, how = make_model(), {"max_new_tokens": 30, "do_sample": False}
    out = model.generate(prompts()[1:2], assistant_early_exit=1, **how)
    assert torch.equal(out, model.generate(prompts()[1:2], **how))


def test_sampled_drafts_run(make_model) -> None:
    model, other = make_model(), make_model(num_hidden_layers=1)
    torch.manual_seed(5)
    ids = prompts()[1:2]
    out = model.generate(ids, max_new_tokens=20, do_sample=True, assistant_model=other)
    assert out.shape == (1, 27) and torch.equal(out[:, :7], ids)
