"""The model's forward: padding, packing, cache, loss, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from path_attention import Packing
from path_attention.models import PRESETS, PathAttentionConfig, PathAttentionForCausalLM
from path_attention.models.cache import (
    CACHE_NAME,
    PathAttentionCacheLayer,
    cache_bytes,
    crop_cache,
    fork_cache,
)

DOUBLE = {"rtol": 1e-9, "atol": 1e-9}


def padded(rows: list[torch.Tensor], side: str, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for n, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[n, place], mask[n, place] = row, 1
    return ids, mask


@pytest.fixture
def rows() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randint(1, 64, (n,)) for n in (9, 4, 1)]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_unpadded(make_model, rows, preset: str, side: str) -> None:
    model = make_model(preset, dtype=torch.float64)
    ids, mask = padded(rows, side)
    alone = [model(row[None], output_hidden_states=True) for row in rows]
    together = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(together.hidden_states) == 3
    for n, one in enumerate(alone):
        real = mask[n].bool()
        torch.testing.assert_close(together.logits[n, real], one.logits[0], **DOUBLE)
        for a, b in zip(together.hidden_states, one.hidden_states, strict=True):
            torch.testing.assert_close(a[n, real], b[0], **DOUBLE)
    labels = ids.masked_fill(mask == 0, -100)
    loss = model(ids, attention_mask=mask, labels=labels).loss
    sums = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows]
    torch.testing.assert_close(loss, torch.stack(sums).sum() / (8 + 3 + 0))
    unmasked = model(ids, attention_mask=mask, labels=ids).loss
    torch.testing.assert_close(unmasked, loss)


def test_tokens_masked_in_the_middle_are_as_if_absent(make_model) -> None:
    model = make_model(dtype=torch.float64)
    ids = torch.randint(1, 64, (1, 8))
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1]])
    got = model(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(got, model(ids[mask.bool()][None]).logits[0], **DOUBLE)


@pytest.mark.parametrize("preset", PRESETS)
def test_packed_equals_separate(make_model, rows, preset: str) -> None:
    model = make_model(preset, dtype=torch.float64).train()
    ids = torch.cat(rows)[None]
    packing = Packing.from_lengths([9, 0, 4, 1, 0])
    labels = ids.clone()
    out = model(ids, packing=packing, labels=labels, output_hidden_states=True)
    apart = [model(row[None], labels=row[None]) for row in rows]
    logits = torch.cat([one.logits for one in apart], 1)
    torch.testing.assert_close(out.logits, logits, **DOUBLE)
    sums = [one.loss * (len(row) - 1) for one, row in zip(apart, rows, strict=True)]
    torch.testing.assert_close(out.loss, torch.stack(sums).sum() / 11)
    for other in (
        {"packing": packing.cu_seqlens},
        {"cu_seq_lens_q": packing.cu_seqlens, "cu_seq_lens_k": packing.cu_seqlens,
         "max_length_q": 9, "max_length_k": 9, "position_ids": packing.position_ids()[None]},
    ):  # fmt: skip
        assert torch.equal(model(ids, **other).logits, out.logits)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 1, 1, 5], [2, 10]])
def test_chunked_prefill_and_decoding_equal_the_full_forward(
    make_model, preset: str, chunks: list[int]
) -> None:
    model = make_model(preset)
    torch.manual_seed(6)
    ids = torch.randint(1, 64, (3, 12))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padding in the first chunks
    mask[1, :1] = 0
    with torch.no_grad():
        full = model(ids, attention_mask=mask, use_cache=False)
        assert full.get(CACHE_NAME) is None
        cache, start, parts = DynamicCache(config=model.config), 0, []
        for n in chunks:
            seen = start + n
            out = model(ids[:, start:seen], attention_mask=mask[:, :seen], past_key_values=cache)
            assert out[CACHE_NAME] is cache and cache.get_seq_length() == seen
            parts.append(out.logits)
            start = seen
    got = torch.cat(parts, 1)[mask.bool()]
    torch.testing.assert_close(got, full.logits[mask.bool()], rtol=2e-4, atol=2e-4)
    assert cache.layers[0].lengths.tolist() == [8, 11, 12]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_batch_of_no_rows(make_model, preset: str) -> None:
    model, cache = make_model(preset), DynamicCache()
    for length in (90, 1, 3, 70):
        ids = torch.ones(0, length, dtype=torch.int64)
        assert model(ids, past_key_values=cache).logits.shape == (0, length, 64)


def test_padding_inside_a_cached_chunk_leaves_no_trace(make_model) -> None:
    """Right-padded second turns of different lengths, then a third turn."""
    model = make_model(dtype=torch.float64)
    torch.manual_seed(7)
    turns = [[torch.randint(1, 64, (n,)) for n in lengths] for lengths in ([3, 5], [4, 1], [2, 2])]
    cache = DynamicCache()
    with torch.no_grad():
        for turn in turns:
            ids, mask = padded(turn, "right", pad=9)
            out = model(ids, attention_mask=mask, cache=cache)
        for row in range(2):
            whole = torch.cat([turn[row] for turn in turns])[None]
            torch.testing.assert_close(out.logits[row], model(whole).logits[0, -2:], **DOUBLE)


def test_the_cache_has_one_layer_a_block_and_fills_an_empty_dynamic_cache(make_model) -> None:
    model = make_model()
    ids = torch.randint(1, 64, (1, 4))
    for cache in (DynamicCache(), DynamicCache(config=model.config), None):
        out = model(ids, past_key_values=cache, use_cache=True)
        got = out[CACHE_NAME]
        assert cache is None or got is cache
        assert [type(layer) for layer in got.layers] == [PathAttentionCacheLayer] * 2
        assert got.get_seq_length() == 4 and got.is_croppable and not got.is_compileable
        assert got.get_max_length() == -1 and got.get_mask_sizes(3, 0) == (7, 0)


def test_the_cache_cannot_be_updated_from_outside(make_model) -> None:
    cache = make_model()(torch.ones(1, 4, dtype=torch.int64))[CACHE_NAME]
    with pytest.raises(ValueError, match="Attention to extend it"):
        cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)


@pytest.mark.parametrize("preset", PRESETS)
def test_tokens_are_taken_back_from_every_layer(make_model, preset: str) -> None:
    """transformers' counting: minus the tokens to drop; what follows is as if they never came."""
    model = make_model(preset)
    torch.manual_seed(10)
    ids = torch.randint(1, 64, (2, 160))
    with torch.no_grad():
        cache = model(ids, use_cache=True)[CACHE_NAME]
        cache.crop(0)
        cache.crop(torch.tensor(-40))  # transformers 5.17 counts on the device
        assert cache.get_seq_length() == 120
        wanted = model(ids, use_cache=False).logits[:, 120:140]
        got = model(ids[:, 120:140], past_key_values=cache).logits
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)
    with pytest.raises(ValueError, match="tokens_to_remove: expected at most 0"):
        cache.crop(1)
    cache.crop(-(10**6))
    assert cache.get_seq_length() == 0 and not cache.is_initialized


@pytest.mark.parametrize("preset", ["path_fox", "rope", "rotation_learned", "delta_net"])
@torch.no_grad()
def test_padded_rows_are_taken_back_token_by_token(make_model, preset: str) -> None:
    """A crop drops each row's last columns, wherever its padding is kept."""
    model = make_model(preset)
    ids, mask = padded([torch.randint(1, 64, (n,)) for n in (90, 35, 81)], "left")
    whole = model(ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
    got = model(ids, attention_mask=mask, output_hidden_states=True)
    states = zip(got.hidden_states, whole.hidden_states, strict=True)
    for a, b in ((got.logits, whole.logits), *states):
        torch.testing.assert_close(a[mask == 1], b[mask == 1], rtol=2e-4, atol=2e-4)
    cache = got[CACHE_NAME]
    cache.crop(-5)
    last = model(ids[:, -5:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(last, whole.logits[:, -5:], rtol=2e-4, atol=2e-4)
    refused = "length: expected 0 or .*: padding among columns 0 to 55 has moved; got 50"
    with pytest.raises(ValueError, match=refused):
        crop_cache(cache, 50)
    crop_cache(cache, 0)
    model(ids, past_key_values=cache)
    crop_cache(cache, 64)


@torch.no_grad()
def test_only_the_last_columns_are_cached_apart(make_model) -> None:
    """The others go through the operator at once, however early their padding ends."""
    model, read = make_model("path_fox"), []
    model.model.layers[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape))
    ids, mask = padded([torch.randint(1, 64, (n,)) for n in (200, 190)], "left")
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    got = model(ids, attention_mask=mask)
    assert [shape[1] for shape in read] == [200, 136, 64]
    cache = got[CACHE_NAME]
    cache.crop(-64)
    last = model(ids[:, -64:], attention_mask=mask, past_key_values=cache).logits
    for logits in (got.logits[:, -64:], last):
        torch.testing.assert_close(logits, whole[:, -64:], rtol=2e-4, atol=2e-4)
    with pytest.raises(ValueError, match="padding among columns 0 to 136 has moved; got 135"):
        crop_cache(cache, 135)


def test_a_chunk_with_gradients_stays_whole(make_model) -> None:
    model = make_model()
    ids, mask = padded([torch.randint(1, 64, (n,)) for n in (9, 4)], "left")
    out = model(ids, attention_mask=mask)
    out.logits.sum().backward()
    with pytest.raises(ValueError, match="padding among columns 0 to 9 has moved"):
        out[CACHE_NAME].crop(-1)


@pytest.mark.parametrize("preset", ["path_fox", "rotation_learned", "stick_breaking", "delta_net"])
def test_forks_of_a_model_cache_go_their_own_ways(make_model, preset: str) -> None:
    model = make_model(preset)
    torch.manual_seed(11)
    start, *ways = (torch.randint(1, 64, (1, n)) for n in (200, 90, 90))
    with torch.no_grad():
        cache = model(start, use_cache=True)[CACHE_NAME]
        forks = [cache, fork_cache(cache)]
        for way, fork in zip(ways, forks, strict=True):
            got = model(way, past_key_values=fork).logits
            wanted = model(torch.cat([start, way], 1), use_cache=False).logits[:, 200:]
            torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)
        crop_cache(forks[0], 64 * 4)
        assert [fork.get_seq_length() for fork in forks] == [256, 290]
        assert cache_bytes(forks[0]) > 0
        with pytest.raises(ValueError, match="length: expected 0 to 256, .* got 257"):
            crop_cache(forks[0], 257)


def test_an_offloaded_cache_is_the_same(make_model) -> None:
    model, ids = make_model(), torch.randint(1, 64, (1, 20))
    with torch.no_grad():
        cache = DynamicCache(config=model.config, offloading=True)
        parts = [model(part, cache=cache).logits for part in ids.split([15, 1, 4], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset", ["path_fox", "rope", "path_linear"])
@pytest.mark.parametrize("change", ["none", "crop", "reorder", "fork"])
def test_a_cache_made_in_inference_mode_goes_on_outside_of_it(make_model, preset, change) -> None:
    model = make_model(preset)
    ids = torch.randint(1, 64, (2, 150))
    whole = model(ids, use_cache=False).logits
    with torch.inference_mode():
        cache = model(ids[:, :99])[CACHE_NAME]
        model(ids[:, 99:100], past_key_values=cache)
        if change == "crop":
            crop_cache(cache, 98)
        elif change == "reorder":
            cache.reorder_cache(torch.tensor([1, 0]))
        elif change == "fork":
            cache = fork_cache(cache)
    if change == "reorder":
        ids, whole = ids.flip(0), whole.flip(0)
    for enabled, size in ((True, 1), (False, 1), (True, 30), (False, 18)):
        seen = cache.get_seq_length()
        with torch.set_grad_enabled(enabled):
            out = model(ids[:, seen : seen + size], past_key_values=cache).logits
        torch.testing.assert_close(out, whole[:, seen : seen + size], rtol=1e-4, atol=1e-4)


def test_rows_of_a_cache_can_be_repeated_selected_and_reset(make_model) -> None:
    model = make_model()
    torch.manual_seed(8)
    ids = torch.randint(1, 64, (2, 7))
    with torch.no_grad():
        full = model(ids).logits[:, 5:]
        cache = model(ids[:, :5])[CACHE_NAME]
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 1]))
        cache.batch_select_indices(torch.tensor([0, 1]))
        out = model(ids[[1, 0], 5:], past_key_values=cache).logits
        torch.testing.assert_close(out, full[[1, 0]], rtol=1e-4, atol=1e-4)
        cache.reset()
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(ids, past_key_values=cache).logits[:, 5:], full)


def test_no_cache_in_training(make_model) -> None:
    model = make_model().train()
    ids = torch.ones(1, 4, dtype=torch.int64)
    assert model(ids).get(CACHE_NAME) is None
    assert model(ids, use_cache=True)[CACHE_NAME] is not None


def test_loss_and_kept_logits(make_model) -> None:
    model = make_model()
    torch.manual_seed(9)
    ids = torch.randint(1, 64, (2, 8))
    labels = ids.clone()
    labels[0, 3:5] = -100
    out = model(ids, labels=labels)
    terms = F.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )
    torch.testing.assert_close(out.loss, terms.sum() / 12)
    for count in (5, torch.tensor(5)):
        loss = model(ids, labels=labels, num_items_in_batch=count).loss
        torch.testing.assert_close(loss, terms.sum() / 5)
    assert model(ids, labels=torch.full_like(ids, -100)).loss.item() == 0
    assert torch.equal(labels[:, 0], ids[:, 0])  # the caller's labels are left alone
    kept = model(ids, logits_to_keep=3).logits
    torch.testing.assert_close(kept, out.logits[:, -3:])
    kept = model(ids, logits_to_keep=torch.tensor([0, 6])).logits
    torch.testing.assert_close(kept, out.logits[:, [0, 6]])
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert torch.equal(embedded, out.logits)
    assert isinstance(model(ids, return_dict=False), tuple)


def test_position_ids_are_checked(make_model) -> None:
    model = make_model("rope")
    ids = torch.randint(1, 64, (2, 4))
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    right = torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]])
    plain = model(ids, attention_mask=mask).logits
    assert torch.equal(model(ids, attention_mask=mask, position_ids=right).logits, plain)
    assert model(ids, position_ids=torch.arange(4)[None]).logits.shape == (2, 4, 64)
    with pytest.raises(ValueError, match=r"position_ids: .* packing"):
        model(ids, position_ids=torch.tensor([[0, 1, 0, 1]]))
    with pytest.raises(ValueError, match="position_ids: expected"):
        model(ids, position_ids=torch.arange(5)[None])


IDS = torch.ones(2, 4, dtype=torch.int64)
PACKED = {"input_ids": IDS[:1], "packing": Packing.from_lengths([1, 3])}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "input_ids: expected"),
        ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 4, 32)}, "input_ids: expected"),
        ({"input_ids": IDS, "past_key_values": DynamicCache(), "cache": DynamicCache()}, "cache:"),
        ({"input_ids": IDS, "cache": ((), ())}, "cache: expected a transformers Cache"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 5)}, "attention_mask: expected"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 4, 4)}, "attention_mask: expected"),
        ({**PACKED, "attention_mask": torch.ones(1, 4)}, "attention_mask: expected None"),
        ({**PACKED, "cache": DynamicCache()}, "cache: expected none with packed"),
        ({**PACKED, "use_cache": True}, "cache: expected none with packed"),
        ({**PACKED, "cu_seq_lens_q": torch.tensor([0, 4])}, "packing: expected once"),
        ({**PACKED, "input_ids": IDS}, "packing: expected a batch"),
        ({"input_ids": IDS[:1], "packing": torch.tensor([0, 3])}, "packing: expected a batch"),
        ({"input_ids": IDS, "labels": IDS, "logits_to_keep": 1}, "labels: expected"),
        ({"input_ids": IDS, "output_attentions": True}, "output_attentions: expected"),
        ({"input_ids": IDS, "past_key_value": None}, "forward: .*past_key_value'"),
    ],
)
def test_bad_input_is_refused(make_model, arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_model()(**arguments)


def test_an_encoding_by_token_ids_asks_for_them(make_model) -> None:
    model = make_model("rotation_token")
    with pytest.raises(ValueError, match="token_ids: expected .* input_ids"):
        model(inputs_embeds=model.get_input_embeddings()(IDS))


@pytest.mark.parametrize("preset", ["rope", "nope", "rotation_random"])
def test_without_factors_and_gates_every_step_is_sdpa(make_model, preset: str) -> None:
    model = make_model(preset)
    ids = torch.randint(1, 64, (2, 9))
    with torch.no_grad():
        cache = model(ids[:, :4])[CACHE_NAME]
        for columns in (slice(4, 5), slice(5, 9)):
            with torch.profiler.profile() as profiler:
                model(ids[:, columns], past_key_values=cache)
            called = [event.name for event in profiler.events()]
            assert called.count("aten::scaled_dot_product_attention") == 2  # one a layer
            assert not any("path_attention::blockwise" in name for name in called)
        with torch.profiler.profile() as profiler:
            model(ids, use_cache=False)
        called = [event.name for event in profiler.events()]
        assert called.count("aten::scaled_dot_product_attention") == 2


def test_a_cache_of_another_model_is_refused(make_model) -> None:
    model, deeper = make_model(), make_model(num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"cache: .* of 2 layers"):
        model(IDS, cache=DynamicCache(config=deeper.config))
    plain = DynamicCache()
    plain.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), 0)
    plain.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), 1)
    with pytest.raises(ValueError, match="cache: expected DynamicCache"):
        model(IDS, cache=plain)


def test_start_of_parameters() -> None:
    config = PathAttentionConfig.from_preset(
        "path_fox", vocab_size=300, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        qk_norm=True, beta_bias_init=-2.0, forget_bias_init=3.0, initializer_range=0.05,
    )  # fmt: skip
    for name, value in PathAttentionForCausalLM(config).named_parameters():
        if "beta_proj.bias" in name:
            assert (value == -2).all()
        elif "forget_proj.bias" in name:
            assert (value == 3).all()
        elif "norm" in name:
            assert (value == 1).all()
        else:
            assert abs(value.std().item() / 0.05 - 1) < 0.15, name
            assert abs(value.mean().item()) < 0.01, name
